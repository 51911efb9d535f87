"""Check of user code in a process of its own, before any rank starts.

``python -m paceline.training.user_code`` is that process: it reads one line of JSON on standard
input, imports, calls and builds the reference, and runs a first batch of the job's data through it.
On failure its last line of output is the error as JSON. A preemption watcher is only opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline import errors
from paceline.config import load_runtime
from paceline.config.settings import scrub
from paceline.data import Batch, ShardCache, load_snapshot, open_stream
from paceline.data.loading.process_transform import open_transforms
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.schemas.training import TrainJob
from paceline.storage import open_store
from paceline.training.identity import size_of
from paceline.training.loop.workload import Inputs, Workload
from paceline.training.user_code.loading import SAID_CHARACTERS, Task, load, raised
from paceline.training.user_code.reference import CodeRef, parse, require_allowed

if TYPE_CHECKING:
    from torch import nn

    from paceline.config import Runtime
    from paceline.schemas.training import TrainJob
    from paceline.training.loop.workload import Workload


CHECK_S = 180.0  # import, call and build


def check(
    text: str,
    sources: Sequence[str],
    cache: Path,
    task: Task,
    *,
    job: TrainJob | None = None,
    deadline_s: float = CHECK_S,
) -> None:
    """Load the reference and build its model in a process of its own, before any rank starts; with
    a ``job``, run it on a first batch of that job's data.

    Raises what ``load`` and ``try_batch`` raise, with the same fields. The process gets no ambient
    credentials.
    """
    more = {"task": asdict(task), "job": None if job is None else job.model_dump_json()}
    _try_apart(parse(text), sources, cache, more, deadline_s)


def check_watcher(
    text: str, sources: Sequence[str], cache: Path, deadline_s: float = CHECK_S
) -> None:
    """Open the preemption watcher ``text`` in a process of its own; raises that process's error."""
    from paceline.training.loop.preemption import require_allowed_watcher

    ref = require_allowed_watcher(text, sources)
    if ref is not None:
        _try_apart(ref, sources, cache, {"task": None}, deadline_s)


def _try_apart(
    ref: CodeRef, sources: Sequence[str], cache: Path, more: dict[str, Any], deadline_s: float
) -> None:
    """Run ``main`` in a process without ambient credentials; raise the error that it reports."""
    require_allowed(ref, sources)
    environment = dict(os.environ)
    scrub(environment)
    asked = {"text": ref.text, "sources": list(sources), "cache": str(cache), **more}
    command = [sys.executable, "-m", "paceline.training.user_code"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environment,
            timeout=deadline_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise TrainingFailed(
            "code reference does not come to an end",
            got=f"nothing within {deadline_s:.0f} s",
            where=ref.where,
        ) from error
    if done.returncode == 0:
        return
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        kind = _KINDS[said["code"]]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        tail = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise TrainingFailed(
            "code reference ended its process",
            got=f"exit code {done.returncode}: {tail[0][:SAID_CHARACTERS]}",
            where=ref.where,
        ) from error
    raise kind(
        said["what"], got=said["got"], wanted=said["wanted"], where=said["where"], do=said["do"]
    )


def require_code(job: TrainJob, runtime: Runtime, vocabulary: int) -> None:
    """Check the job's user code on the job's data before any rank starts; see ``check``."""
    if not job.settings.code_ref:
        return
    size = size_of(job, runtime.profile)
    task = Task(
        seed=job.settings.seed,
        context=size.context,
        vocabulary=vocabulary,
        parameters=size.parameters,
    )
    sources = runtime.profile.security.code_sources
    check(job.settings.code_ref, sources, runtime.state_dir / "code", task, job=job)


_KINDS: dict[str, type[PacelineError]] = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, PacelineError)
}


def main() -> int:
    """Check the reference on standard input; on failure the last line of output is the error."""
    from paceline.training.loop.preemption import open_watcher

    asked = json.loads(sys.stdin.readline())
    what = asked["text"], asked["sources"], Path(asked["cache"])
    try:
        if asked["task"] is None:
            open_watcher(*what)
            return 0
        task, ref = Task(**asked["task"]), parse(asked["text"])
        workload = load(*what, task)
        model = _build(workload, ref)
        if asked["job"] is not None:
            _try(workload, model, asked["job"], task, ref)
    except PacelineError as error:
        said = {"code": error.code, "what": error.what, "do": error.do} | {
            name: None if value is None else str(value)[:SAID_CHARACTERS]
            for name, value in (
                ("got", error.got),
                ("wanted", error.wanted),
                ("where", error.where),
            )
        }
        sys.stdout.write("\n" + json.dumps(said) + "\n")
        return error.exit_code
    return 0


def _try(workload: Workload, model: nn.Module, job: str, task: Task, ref: CodeRef) -> None:
    from paceline.schemas.training import TrainJob

    batch = first_rows(TrainJob.model_validate_json(job), task)
    if batch is not None:
        try_batch(workload, model, batch, ref)


def _build(workload: Workload, ref: CodeRef) -> nn.Module:
    from torch import nn

    try:
        model = workload.build()
    except Exception as error:
        raise raised("code reference raised while it built its model", ref, error) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise InvalidInput(
            "code reference builds no model",
            got=type(model).__name__,
            wanted="a torch.nn.Module with parameters",
            where=ref.where,
        )
    return model


# Trial of a first batch: collation, forward pass, loss, backward pass. The batch is real, of two
# rows at most, from the job's own snapshot: correct code could reject an invented one. Where the
# trial would cost too much (large shards, a large model, a model on the meta device), less is
# tried, and errors show only in the ranks.

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
        processes=0,
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
            ahead=1,
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
        raise raised(f"code reference's {what} raised on the first batch", ref, error) from error


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
