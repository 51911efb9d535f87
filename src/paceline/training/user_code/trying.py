"""Trial of a first batch of user code: collation, forward pass, loss, backward pass.

Runs in the process that ``checking`` starts. The batch is real, of two rows at most, from the job's
own snapshot: correct code could reject an invented one. Where the trial would cost too much (large
shards, a large model, a model on the meta device), less is tried, and errors show only in the
ranks. Imports torch, which ``checking`` does not.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import load_runtime
from paceline.data import Batch, ShardCache, load_snapshot, open_stream
from paceline.data.loading import open_transforms
from paceline.errors import InvalidInput, PacelineError
from paceline.schemas import TrainJob
from paceline.storage import open_store
from paceline.training.loop import Inputs, Workload
from paceline.training.user_code.loading import Task, user_code_error
from paceline.training.user_code.reference import CodeRef

ROWS = 2  # some layers (batch norm) reject a single row
MOST_SHARD_BYTES = 64 * 1024 * 1024  # the trial fetches one shard
MOST_PARAMETERS = 30_000_000  # a forward and a backward pass within seconds on one core
SCRATCH_TRIES, SCRATCH_WAIT_S = 100, 0.05  # to remove a directory that a last fetch still writes to
CPU = torch.device("cpu")


def first_rows(job: TrainJob, task: Task) -> Batch | None:
    """Return the first rows of ``job``'s training split; None where its shards are too large."""
    runtime = load_runtime(job.state_dir)
    store = open_store(runtime)
    snapshot = load_snapshot(job.snapshot_url, store)
    if max(each.bytes for each in snapshot.of_split("train")) > MOST_SHARD_BYTES:
        return None
    transforms = open_transforms(
        job.data.transform,
        runtime.profile.security.code_sources,
        processes=1,
        deadline_s=job.data.transform_deadline_s,
    )
    settings = job.data.model_copy(update={"columns": 1, "prefetch_batches": 1})
    with (
        _scratch() as directory,
        ShardCache(
            snapshot,
            store,
            directory,
            limit_bytes=job.data.cache_bytes,
            transforms=transforms,
            purpose=job.purpose,
            project=job.data.project,
        ) as shards,
        open_stream(
            snapshot, "train", shards, settings, context=task.context, global_batch=ROWS, seed=0
        ) as stream,
    ):
        return stream.next()


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a temporary directory; on exit retry its removal, because a shard that is fetched ahead
    may still be written for a moment after the cache was closed.
    """
    directory = Path(mkdtemp(prefix="paceline-first-batch-"))
    try:
        yield directory
    finally:
        for _ in range(SCRATCH_TRIES):
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                break
            time.sleep(SCRATCH_WAIT_S)


def try_batch(workload: Workload, model: nn.Module, batch: Batch, ref: CodeRef) -> None:
    """Raise TrainingFailed for an exception of user code on ``batch``, InvalidInput for a result
    that training cannot use."""
    found = _called("collation (inputs)", ref, lambda: workload.inputs(batch, CPU))
    _require_inputs(found, ref)
    parameters = list(model.parameters())
    if any(each.is_meta or each.is_cuda for each in parameters):
        return
    if sum(each.numel() for each in parameters) > MOST_PARAMETERS:
        return
    outputs = _called("model", ref, lambda: model(*found.args, **found.kwargs))
    loss = _called("loss (loss_sum)", ref, lambda: workload.loss_sum(outputs, *found.targets))
    _require_loss(loss, ref)
    _called("backward pass", ref, lambda: torch.autograd.backward(loss))
    if all(each.grad is None for each in parameters):
        raise _wrong("loss does not depend on the model", "no gradient", "a gradient", ref)


def _called(what: str, ref: CodeRef, call: Any) -> Any:
    try:
        return call()
    except PacelineError:
        raise
    except Exception as error:
        raise user_code_error(
            f"code reference's {what} raised on the first batch", ref, error
        ) from error


def _require_inputs(found: Any, ref: CodeRef) -> None:
    if not isinstance(found, Inputs):
        wanted = f"Inputs({', '.join(each.name for each in dataclasses.fields(Inputs))})"
        raise _wrong("collation returns no Inputs", type(found).__name__, wanted, ref)
    for name in ("args", "targets"):
        value = getattr(found, name)
        if not isinstance(value, tuple) or not value:
            wanted = "a tuple of tensors"
            raise _wrong(f"collation returns no {name}", type(value).__name__, wanted, ref)
    weight = found.weight
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise _wrong(
            "collation's weight is no number", repr(weight)[:80], "the sum of weights", ref
        )


def _require_loss(loss: Any, ref: CodeRef) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        got = (
            f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        )
        raise _wrong("loss is no scalar", got[:80], "a float tensor without dimensions: a SUM", ref)
    if not loss.requires_grad:
        got = "a tensor without a gradient"
        raise _wrong("loss cannot be differentiated", got, "one made of the model's outputs", ref)


def _wrong(what: str, got: str, wanted: str, ref: CodeRef) -> InvalidInput:
    return InvalidInput(
        f"code reference's {what}",
        got=got,
        wanted=wanted,
        where=ref.where,
        do="Mend the code, pin it anew, and start the job again.",
    )
