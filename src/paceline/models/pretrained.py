"""A model directory that Hugging Face's transformers wrote: checked, built, filled, written again.

``config.json`` is read by ``AutoConfig`` for the families below, the model is built without values,
and weights are copied from the safetensors files into whatever part of the model a process has.
Never runs code of the directory and never reads pickled weights. Contains no parallelism.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidInput
from paceline.models.config import BY_LENGTH, FAMILIES, require_context, require_tokenizer
from paceline.models.description import is_unread
from paceline.models.files import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    read_json,
    read_pretrained_config,
)
from paceline.models.tensor_files import (
    StoredTensor,
    fill,
    require_equal,
    require_finite,
    stored_tensors,
)
from paceline.models.transformers_attention import needs_scopes, scopes_of, whole_rows

CPU = torch.device("cpu")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")  # go with the weights
OURS = "manifest.json"  # that Paceline adds beside a model


@dataclass(frozen=True)
class Pretrained:
    """A checked model directory; ``config`` is transformers' own."""

    directory: Path
    config: Any
    stored: Mapping[str, StoredTensor]  # by the name that the weight has in the model
    empty: nn.Module  # on the meta device

    @classmethod
    def open(cls, directory: Path) -> Pretrained:
        """Return the model in ``directory``, after comparing its weights with its architecture.

        Reads headers only; ``require_sound`` reads the values. Raises InvalidInput where names,
        shapes or dtypes do not fit, where the family is unknown, or for code or pickled weights.
        """
        directory = Path(directory)
        config = _read_config(directory)
        stored = stored_tensors(directory)
        try:
            empty = _build(config)
        except Exception as error:
            raise _unacceptable(error, directory / CONFIG_FILE) from error
        found = cls(directory, config, _renamed(stored, empty), empty)
        found._require_weights()
        return found

    @property
    def family(self) -> str:
        """Return the ``model_type``."""
        return str(self.config.model_type)

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        return int(self.config.vocab_size)

    @property
    def longest_context(self) -> int:
        """Return the number of positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def reads_in_pieces(self) -> bool:
        """Return whether logits of a row that is read in pieces, with a cache, are those of the
        whole row: its rotary positions do not depend on the row's length."""
        return not any(each in repr(self.config.rope_parameters) for each in BY_LENGTH)

    @cached_property
    def tokenizer_digest(self) -> str:
        """Return the SHA-256 of the tokenizer.json; "" without one: tokens are bytes."""
        path = self.directory / TOKENIZER_FILE
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    @property
    def parameters(self) -> int:
        """Return the number of weights (tied ones once)."""
        return sum(each.numel() for name, each in self._expected.items() if name not in self._tied)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the files."""
        return DTYPES[next(iter(self._used.values())).dtype]

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters of {FAMILIES[self.family]}"

    def require_trainable(self, context: int, tokenizer_digest: str, vocabulary: int) -> None:
        """Raise InvalidInput unless rows of ``context`` tokens of this tokenizer fit the model."""
        require_tokenizer(self, tokenizer_digest, vocabulary)
        require_context(self.config.to_dict(), context, self.directory)

    def require_sound(self) -> None:
        """Raise InvalidInput where a weight is not finite, or tied weights differ; reads all."""
        require_finite(self._used)
        self.require_tied()

    def require_tied(self) -> None:
        """Raise InvalidInput where tied weights differ; reads those."""
        for target, source in self._tied.items():
            if target in self.stored and source in self.stored:
                require_equal(self.stored[target], self.stored[source])

    def build(self) -> nn.Module:
        """Return the model without values (on the meta device).

        ``forward(tokens_BT, positions_BT, documents_BT, cache)`` returns logits_BTV, and
        ``new_cache()`` a cache of keys and values, as ours do; ``cut_stage`` makes it a stage.
        """
        return _build(self.config)

    def load(self, device: torch.device = CPU) -> nn.Module:
        """Return the whole model in float32 on ``device``, with the values of the files."""
        model = self.build().float().to_empty(device=device)
        model.tie_weights()  # type: ignore[operator] # a method of transformers' models
        self.restore_buffers(model)
        self.fill({
            name: (each, (0,) * each.dim()) for name, each in model.state_dict().items()
        })  # fmt: skip
        return model.eval()

    def restore_buffers(self, model: nn.Module) -> None:
        """Compute what no file has: the frequencies of rotary positions, scales of embeddings.

        ``model`` may be sharded; its buffers are whole on each process.
        """
        with torch.no_grad():
            for module in model.modules():
                if module._non_persistent_buffers_set:
                    _initialise_buffers(model, module)

    def fill(self, parts: Mapping[str, tuple[Tensor, Sequence[int]]]) -> int:
        """Copy weights from the files into ``parts`` (name → destination, offsets of its box).

        Returns the number of bytes read: those of the boxes, and no others.
        """
        alias = {name: self._stored_name(name) for name in parts if name not in self._tied}
        return fill({alias[name]: parts[name] for name in alias}, self.stored)

    def file_name(self, name: str) -> str:
        """Return the name that a weight of the model has in files."""
        return self.stored[self._stored_name(name)].name

    @property
    def written(self) -> list[str]:
        """Return the weights of the files to write, in the order of the model: tied ones once."""
        return [name for name in self._expected if name not in self._tied]

    def copy_others(self, into: Path, dtype: torch.dtype | None = None) -> None:
        """Copy config, tokenizer, chat template, generation config and licence, no weights.

        ``dtype`` is written into the config, where the weights get another one.
        """
        for each in sorted(self.directory.iterdir()):
            legal = each.name.upper().startswith(LEGAL) and each.is_file()
            if legal or (each.suffix in COPIED_SUFFIXES and each.name not in (OURS, INDEX_FILE)):
                shutil.copyfile(each, into / each.name)
        if dtype not in (None, self.dtype):
            config = read_json(self.directory / CONFIG_FILE)
            config.pop("torch_dtype", None)  # as older versions of transformers called it
            config["dtype"] = str(dtype).removeprefix("torch.")
            (into / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    def copy(self, into: Path) -> None:
        """Copy the files of the model that are used."""
        self.copy_others(into)
        for path in {each.file for each in self.stored.values()}:
            shutil.copyfile(path, into / path.name)
        index = self.directory / INDEX_FILE
        if index.is_file():
            shutil.copyfile(index, into / INDEX_FILE)

    @cached_property
    def _expected(self) -> dict[str, torch.Size]:
        return {name: each.shape for name, each in self.empty.state_dict().items()}

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Return second name → first name of tied weights."""
        tied: dict[str, str] = dict(getattr(self.empty, "all_tied_weights_keys", None) or {})
        return tied

    @cached_property
    def _used(self) -> dict[str, StoredTensor]:
        return {
            name: self.stored[name]
            for name in map(self._stored_name, self._expected)
            if name in self.stored
        }

    def _stored_name(self, name: str) -> str:
        """Return the name under which the files have the weight: of tied ones, either."""
        same = {self._tied.get(name, name)}
        same |= {target for target, source in self._tied.items() if source in same}
        return name if name in self.stored else next(iter(sorted(same & set(self.stored))), name)

    def _require_weights(self) -> None:
        missing = [name for name in self._expected if self._stored_name(name) not in self.stored]
        unknown = [
            name
            for name in sorted(self.stored)
            if name not in self._expected and not is_unread(name)
        ]
        for what, names in (("lack", missing), ("have unknown", unknown)):
            if names:
                raise InvalidInput(
                    f"weights {what} tensors of the architecture",
                    got=f"{names[0]} (and {len(names) - 1} more)",
                    wanted=f"the tensors of {FAMILIES[self.family]}",
                    where=self.directory,
                )
        for name, shape in self._expected.items():
            its = self.stored[self._stored_name(name)]
            if its.shape != tuple(shape):
                raise InvalidInput(
                    "weights are of another shape than the config's",
                    got=f"{name}: {list(its.shape)}",
                    wanted=str(list(shape)),
                    where=its.file,
                )
        self._require_dtype()

    def _require_dtype(self) -> None:
        by_dtype: dict[str, str] = {}
        for name, each in self._used.items():
            by_dtype.setdefault(each.dtype, name)
        odd = [each for each in by_dtype if each not in DTYPES]
        if odd or len(by_dtype) > 1:
            raise InvalidInput(
                "weights have a dtype that is not trained" if odd else "weights mix dtypes",
                got=", ".join(f"{name} {dtype}" for dtype, name in by_dtype.items()),
                wanted=f"one of {', '.join(DTYPES)} for all weights",
                where=self.directory,
                do="Load it with transformers and save it in one dtype.",
            )


def _read_config(directory: Path) -> Any:
    path = directory / CONFIG_FILE
    read_pretrained_config(directory)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            int(config.max_position_embeddings), int(config.vocab_size)
    except Exception as error:
        raise _unacceptable(error, path) from error
    config.use_cache = False
    return config


def _unacceptable(error: Exception, path: Path) -> InvalidInput:
    """Return the error of a config.json that transformers refuses or cannot build."""
    said = str(error)
    if isinstance(error, KeyError):  # of a table of transformers: its text is the value alone
        said = _named(read_json(path), error.args[0]) or f"unknown {said}"
    return InvalidInput("model config is not acceptable", got=said.split("\n")[0][:300], where=path)


def _named(settings: Mapping[str, Any], value: object) -> str | None:
    """Return the setting that has ``value``, with its name."""
    for name, each in settings.items():
        if each == value:
            return f"{name} = {value!r}"
        if isinstance(each, dict) and (inner := _named(each, value)):
            return f"{name}.{inner}"
    return None


def _build(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=whole_rows(_attention(config.model_type))
        )
    plain: Any = type(model)
    model.__class__ = _with_documents(plain)
    return model


def _renamed(stored: Mapping[str, StoredTensor], empty: nn.Module) -> dict[str, StoredTensor]:
    """Return ``stored`` by the names in the model: files of some families have other names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    mapping = get_model_conversion_mapping(empty, add_legacy=False)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return {apply_renamings(name, renamings): each for name, each in stored.items()}


def _attention(family: str) -> str:
    """Return the attention code: torch's kernel, or plain products where scores are capped."""
    return "eager" if family == "gemma2" else "sdpa"


@cache
def _with_documents(kind: type[Any]) -> type[Any]:
    """Return ``kind`` with the arguments and the result of our transformer's ``forward``."""

    def forward(
        self: Any,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        attention: dict[str, Any] = {"attention_mask": None}
        exchange = getattr(self, "exchange", None)  # a ``RowExchange``: tokens are parts of rows
        if documents_BT is None and cache is None and not torch.compiler.is_exporting():
            size = tokens_BT.shape[1] * (1 if exchange is None else exchange.parts)
            if needs_scopes(self.config, size, tokens_BT.device, is_part=exchange is not None):
                documents_BT = tokens_BT.new_zeros(len(tokens_BT), size)
        if documents_BT is not None:
            # Of four dimensions: transformers takes it as it is, and makes no mask of its own.
            attention = {"attention_mask": documents_BT[:, None, None]}
            attention["scopes"] = scopes_of(self.config, documents_BT)
            if any(each in repr(self.config.rope_parameters) for each in BY_LENGTH):
                positions_BT = positions_in_pieces(documents_BT)
        # The parts around the head, as caps of logits, are of the class: not of other stages.
        run = partial(kind.forward, self) if self.has_head else self.base_model
        outputs = run(
            **{"input_ids" if self.has_embedding else "inputs_embeds": tokens_BT},
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=cache is not None,
            **attention,
        )
        found: Tensor = outputs.logits if self.has_head else outputs.last_hidden_state
        return found

    def new_cache(self: Any) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    added = {"forward": forward, "new_cache": new_cache, "__module__": kind.__module__}
    added |= {"has_embedding": True, "has_head": True}
    return type(kind.__name__, (kind,), added)


class OtherStage(nn.Module):
    """In the place of a part that another pipeline stage has: returns what it is given."""

    def forward(self, x_BTD: Tensor, *_: Any, **__: Any) -> Tensor:
        return x_BTD


def cut_stage(model: Any, layers: range, *, embedding: bool, head: bool) -> None:
    """Leave of ``model``, built here, what one pipeline stage needs, in place, under the same
    names; it then takes and returns what a stage of ours does.

    What runs before and after the layers, the family's plan for pipelines says. Tied weights are
    in the first and in the last stage.
    """
    base = model.base_model
    parts = list(model.config.base_model_pp_plan)
    at = parts.index("layers")
    tied = base.get_input_embeddings() if head and model.all_tied_weights_keys else None
    for name in [] if embedding else parts[:at]:
        if getattr(base, name) is not tied:
            setattr(base, name, OtherStage())
    for number in set(range(len(base.layers))) - set(layers):
        base.layers[number] = OtherStage()
    if not head:
        for name in parts[at + 1 :]:
            setattr(base, name, OtherStage())
        model.set_output_embeddings(OtherStage())
        model._tied_weights_keys, model.all_tied_weights_keys = None, {}
    model.has_embedding, model.has_head = embedding, head


def positions_in_pieces(documents_BT: Tensor) -> Tensor:
    """Return each token's position in its piece of a document, from 0."""
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT.diff(prepend=documents_BT[:, :1]) != 0
    return at_T - (begins_BT * at_T).cummax(1).values


def _initialise_buffers(model: Any, module: nn.Module) -> None:
    """Let transformers initialise the buffers of ``module``; its weights are filled afterwards."""
    for each in module.parameters(recurse=False):
        each._is_hf_initialized = True  # type: ignore[attr-defined] # its mark: leave it alone
    model._init_weights(module)
