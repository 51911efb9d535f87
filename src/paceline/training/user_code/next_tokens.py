"""Logits of a user's module, in a process of its own: an evaluation passes it rows of tokens.

``python -m`` this module is that process, the child of ``paceline.data.ChildProcess``. Its first
request is JSON (see ``_open``), each further one a line of JSON (``rows``, ``threads``) and the
tokens as int64. It has no credentials in its environment. Does not score: what a position is
compared with is the next token of its row, which a causal module does not use.

Shapes in names: B rows, T tokens a row, V rows of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data import DONE, FAILED, Batch, serve, token_dtype
from paceline.errors import CorruptData, InvalidInput, PacelineError, SourceMissing, to_record
from paceline.models import fill, read_user_code, require_finite, stored_tensors
from paceline.training.loop import HasLogits, leave_removed_directory
from paceline.training.user_code.loading import Task, build_model, load, user_code_error
from paceline.training.user_code.reference import CodeRef, parse

if TYPE_CHECKING:
    from paceline.training.loop import Workload

PROBE_TOKENS = 32  # of a row, at most
TOLERANCE = 1e-3  # of logits: kernels may round a row by its neighbours


class NextTokens:
    """A module and its workload as a causal language model, in evaluation mode."""

    def __init__(
        self,
        workload: Workload,
        module: nn.Module,
        ref: CodeRef,
        task: Task,
        device: torch.device | None = None,
    ) -> None:
        """Probe ``module`` with two rows.

        Raises InvalidInput where it does not give the logits of the next token, or gives others
        once later tokens change; TrainingFailed where the code raises.
        """
        self._workload, self._module, self._ref = workload, module.eval(), ref
        self._vocabulary, self._device = task.vocabulary, device or torch.device("cpu")
        self.width = 0  # of the logits; 0 until the probe
        length = min(task.context, PROBE_TOKENS)
        half = length // 2
        probe_BT = np.tile(np.arange(length) % task.vocabulary, (2, 1))
        probe_BT[1, half:] = (probe_BT[1, half:] + 1) % task.vocabulary
        logits_BTV = self.logits(probe_BT)
        self.width = logits_BTV.shape[-1]
        apart = (logits_BTV[0, :half] - logits_BTV[1, :half]).abs()
        if half and bool((apart > TOLERANCE * (1 + logits_BTV[0, :half].abs())).any()):
            raise InvalidInput(
                "logits follow from later tokens, so that figures would compare with none",
                got=f"other logits before token {half} once the tokens from there on change",
                wanted="a causal model: each position sees itself and the ones before it",
                where=ref.where,
                do="Mask attention, pad on the left; a model of another kind cannot be judged.",
            )

    def logits(self, tokens_BT: np.ndarray[Any, Any]) -> Tensor:
        """Return logits_BTV in float32, on the module's device; raises as ``__init__`` does."""
        rows, length = tokens_BT.shape
        batch = Batch(
            step=0,
            inputs_BT=tokens_BT.astype(token_dtype(self._vocabulary)),
            targets_BT=np.zeros(tokens_BT.shape, token_dtype(self._vocabulary)),
            weights_BT=np.ones(tokens_BT.shape, np.float32),
            rows=range(rows),
            global_tokens=float(rows * length),
        )
        found: Any
        try:
            with torch.inference_mode():
                inputs = self._workload.inputs(batch, self._device)
                found = self._module(*inputs.args, **inputs.kwargs)
                if isinstance(self._workload, HasLogits):
                    found = self._workload.logits(found)
        except Exception as error:
            raise user_code_error(
                "code reference raised while it computed logits", self._ref, error
            ) from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else ()
        wanted = (rows, length, self.width or max(self._vocabulary, *shape[2:3], 0))
        if shape != wanted:
            raise InvalidInput(
                "code reference gives no logits of the next token, so it cannot be judged",
                got=f"{type(found).__name__} {list(shape) or ''}".strip(),
                wanted=f"a tensor {list(wanted)}, also of short rows",
                where=self._ref.where,
                do="Give the workload a method logits(outputs) that returns them.",
            )
        logits_BTV: Tensor = found.float()
        return logits_BTV


def _open(
    directory: str, sources: list[str], cache: str, device: str
) -> tuple[NextTokens, dict[str, Any]]:
    """Return the user's model whose weights are in ``directory``, and its facts.

    Raises what ``load`` and ``NextTokens`` do, and CorruptData or InvalidInput for weights that do
    not fit the module or are not finite.
    """
    where = Path(directory)
    config = read_user_code(where)
    if config is None:
        raise SourceMissing("no model of user code here", where=where)
    ref = parse(config.code_ref)
    task = Task(config.seed, config.max_position_embeddings, config.vocab_size, config.parameters)
    workload = load(config.code_ref, sources, Path(cache), task)
    stored, shown = stored_tensors(where), f"{where}, {ref.where}"
    held = {name: tuple(each.shape) for name, each in stored.items()}
    if (built := _built_without_memory(workload)) is not None:
        _require_fitting(held, built, shown)
    module = build_model(workload, ref)
    wanted = _tensors_of(module)
    _require_fitting(held, wanted, shown)
    require_finite(stored)
    fill({name: (each, (0,) * each.dim()) for name, each in wanted.items()}, stored)
    module = module.float().to(device)
    opened = NextTokens(workload, module, ref, task, torch.device(device))
    parameters = sum(each.numel() for each in module.parameters())
    return opened, {"width": opened.width, "parameters": parameters}


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}


def _built_without_memory(workload: Workload) -> dict[str, Tensor] | None:
    """Return the tensors that ``workload`` builds, without memory for them, so that a config of a
    huge model is refused by its small files; None where its code cannot be built so."""
    try:
        with torch.device("meta"):
            return _tensors_of(workload.build())
    except Exception:  # noqa: BLE001 - it is built again with memory, which reports what it raises
        return None


def _require_fitting(
    found: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Raise CorruptData unless the files have the module's tensors, by name and shape."""
    wanted = {name: tuple(each.shape) for name, each in tensors.items()}
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [name for name in wanted if not odd and found[name] != wanted[name]]
    if odd:
        got, due = (
            f"{odd[0]} {list(shapes[odd[0]])}" if odd[0] in shapes else f"no {odd[0]}"
            for shapes in (found, wanted)
        )
        raise CorruptData(
            "weights do not fit the module that the code builds",
            got=f"{got} (and {len(odd) - 1} more)",
            wanted=due,
            where=where,
            do="Build the module from the Task alone: it is the same as at the training.",
        )


def _start(_argument: str) -> Callable[[bytes], tuple[bytes, bytes]]:
    opened: NextTokens | None = None

    def answer(request: bytes) -> tuple[bytes, bytes]:
        nonlocal opened
        try:
            if opened is None:
                opened, facts = _open(**json.loads(request))
                return DONE, json.dumps(facts).encode()
            head, _, tokens = request.partition(b"\n")
            asked = json.loads(head)
            if asked["threads"] != torch.get_num_threads():
                torch.set_num_threads(asked["threads"])
            tokens_BT = np.frombuffer(tokens, np.int64).reshape(asked["rows"], -1)
            return DONE, opened.logits(tokens_BT).cpu().numpy().tobytes()
        except PacelineError as error:
            return FAILED, json.dumps(to_record(error)).encode()

    return answer


if __name__ == "__main__":
    leave_removed_directory()
    serve(_start)
