"""What can be checked of a model directory without torch: config, tokenizer, and the headers of its
weights. ``Pretrained`` checks all of it, by building the model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import LoraSettings
from paceline.errors import CorruptData, InvalidInput
from paceline.manifest import EMBEDDINGS, ties_embeddings
from paceline.models.config import require_context, require_tokenizer
from paceline.models.files import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    file_sha256,
    read_index,
    read_json,
    read_pretrained_config,
    weight_files,
)

TRAINED = ("F32", "BF16", "F16")
LAYER = re.compile(r"\blayers\.(\d{1,6})\.")
# buffers that older versions of transformers wrote among the weights
is_unread = re.compile(r"(attention\.(masked_)?bias|rotary_emb\.inv_freq)$").search
SINGLE = "model.safetensors"
PREFIX = re.compile(r"^(?:\w+\.)*?(?=layers\.|embed_|norm\.|final_layer_norm\.)")
# model_type → its prefix, and the parts that each layer and the model around them have in a file
OF_LLAMA = (
    "model.",
    "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj "
    "self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj",
    "embed_tokens norm",
)
HEAD = "lm_head"
QK_NORMS = "self_attn.q_norm self_attn.k_norm"
FEEDFORWARD_NORMS = "pre_feedforward_layernorm post_feedforward_layernorm"
MORE_PARTS = {  # of a layer, beyond Llama's
    "qwen3": QK_NORMS,
    "gemma2": FEEDFORWARD_NORMS,
    "gemma3_text": f"{QK_NORMS} {FEEDFORWARD_NORMS}",
}
BIASED = ("qwen2", "gpt_neox")  # whatever the config says
PARTS = {
    "gpt_neox": (
        "gpt_neox.",
        "input_layernorm post_attention_layernorm attention.query_key_value attention.dense "
        "mlp.dense_h_to_4h mlp.dense_4h_to_h",
        "embed_in final_layer_norm",
    ),
}
ALL_LINEAR = "all-linear"
TARGETS = "training.lora.target_modules"
MAX_HEADER_BYTES = 100_000_000  # that safetensors reads


@dataclass(frozen=True)
class _Described:
    vocab_size: int
    tokenizer_digest: str


def require_described(
    directory: Path, context: int, tokenizer_digest: str, vocabulary: int
) -> None:
    """Raise InvalidInput or CorruptData where what describes the model in ``directory`` shows that
    rows of ``context`` tokens of this tokenizer cannot train it."""
    raw = read_pretrained_config(directory)
    sizes = {
        key: raw[key] for key in ("vocab_size", "hidden_size") if isinstance(raw.get(key), int)
    }
    path = directory / TOKENIZER_FILE
    own = file_sha256(path) if path.is_file() else ""
    rows = int(sizes.get("vocab_size", vocabulary))
    require_tokenizer(_Described(rows, own), tokenizer_digest, vocabulary)
    require_context(raw, context, directory)
    _require_shapes(directory, raw, _tensors(directory), list(sizes.values()))


def require_tensors(directory: Path, lora: LoraSettings | None) -> None:
    """Raise InvalidInput where the weights in ``directory``, of ours or in transformers' layout,
    lack a tensor that their family has, have another, or lack a layer that ``lora`` names."""
    raw, found = read_json(directory / CONFIG_FILE), _tensors(directory)
    family, count = raw.get("model_type", "llama"), raw.get("num_hidden_layers")
    prefix, parts, around = PARTS.get(family, OF_LLAMA)
    numbers = {int(each[1]) for name in found if (each := LAYER.search(name))}
    layers = range(count) if isinstance(count, int) else sorted(numbers)
    parts = f"{parts} {MORE_PARTS.get(family, '')}"
    wanted = {f"{each}.weight": prefix for each in around.split()} | {f"{HEAD}.weight": ""}
    wanted |= {f"layers.{n}.{part}.weight": prefix for n in layers for part in parts.split()}
    names = {
        PREFIX.sub("", name).replace("embed_out.", f"{HEAD}."): name
        for name in found
        if not is_unread(name)
    }
    lacking = [f"{wanted[each]}{each}" for each in wanted if each not in names]
    ends = f"{prefix}{around.split()[0]}.weight", f"{HEAD}.weight"
    if ties_embeddings(raw) and not set(ends) <= set(lacking):
        lacking = [each for each in lacking if each not in ends]  # tied: either has the values
    if family in BIASED or raw.get("attention_bias") or raw.get("mlp_bias"):
        wanted |= {f"{each.removesuffix('.weight')}.bias": prefix for each in wanted}
    unknown = sorted(name for each, name in names.items() if each not in wanted)
    for what, odd in (("lack", lacking), ("have unknown", unknown)):
        if odd:
            raise InvalidInput(
                f"weights {what} tensors of the architecture",
                got=f"{odd[0]} (and {len(odd) - 1} more)",
                wanted=f"the tensors of model_type {family}",
                where=directory,
            )
    if lora is not None and list(lora.target_modules) != [ALL_LINEAR]:
        matrices = [name for name in found if len(found[name].get("shape", ())) == 2]
        linear = [each.removesuffix(".weight") for each in matrices if LAYER.search(each)]
        require_layers(lora.target_modules, linear)


def ends_with(name: str, wanted: Iterable[str]) -> bool:
    """Return whether a layer's dotted ``name`` ends with one of ``wanted``, whole parts of it."""
    return f".{name}".endswith(tuple(f".{each}" for each in wanted))


def require_layers(wanted: Iterable[str], linear: Collection[str]) -> None:
    """Raise InvalidInput where no name of ``linear`` layers ends with one of ``wanted``."""
    for each in wanted:
        if not any(ends_with(name, [each]) for name in linear):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise InvalidInput(
                "no layer to adapt has this name",
                got=each,
                wanted=f"linear layers: {known}; or {ALL_LINEAR}",
                where=TARGETS,
            )


def _require_shapes(
    directory: Path, raw: dict[str, Any], found: dict[str, dict[str, Any]], wanted: list[int]
) -> None:
    def require(passed: bool, got: str, wanted: str) -> None:
        if not passed:
            raise InvalidInput(
                "weights do not fit the config", got=got, wanted=wanted, where=directory
            )

    dtypes = sorted({str(each.get("dtype")) for name, each in found.items() if not is_unread(name)})
    require(len(dtypes) == 1 and dtypes[0] in TRAINED, ", ".join(dtypes), f"one of {TRAINED}")
    for name in EMBEDDINGS:
        shape = found.get(name, {}).get("shape")
        require(shape is None or len(wanted) < 2 or shape == wanted, f"{name} {shape}", str(wanted))
    layers = {int(each[1]) for name in found if (each := LAYER.search(name))}
    count = raw.get("num_hidden_layers")
    require(
        not isinstance(count, int) or layers == set(range(count)),
        f"{len(layers)} layers",
        f"{count} (num_hidden_layers)",
    )


def _tensors(directory: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor, by its name in the files."""
    files = {each.name: each for each in weight_files(directory)}
    named = read_index(directory) if (directory / INDEX_FILE).is_file() else None
    if named is None and SINGLE in files:
        files = {SINGLE: files[SINGLE]}  # what else lies there is not read
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(set(files if named is None else named.values())):
        if file not in files:
            raise InvalidInput("weights file is missing", got=f"no {file}", where=directory)
        found |= _header(files[file])
    if named is not None and (odd := sorted(named.keys() ^ found.keys())):
        raise InvalidInput(
            "weights index does not match its files", got=odd[0], where=directory / INDEX_FILE
        )
    return found


def _header(path: Path) -> dict[str, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MAX_HEADER_BYTES))
    try:
        found: dict[str, dict[str, Any]] = json.loads(header)
        found.pop("__metadata__", None)
        end = max((int(each["data_offsets"][1]) for each in found.values()), default=0)
        if 8 + length + end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes, not {8 + length + end}")
    except (
        ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        said = f"{type(error).__name__}: {error}"[:200]
        raise CorruptData("weights file cannot be read", got=said, where=path) from error
    return found
