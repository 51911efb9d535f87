"""Check of user code in a process of its own, before any rank starts.

``python -m paceline.training.user_code.checking`` is that process: it reads one line of JSON on
standard input, imports, calls and builds the reference, and runs a first batch of the job's data
through it. On failure its last line of output is the error as JSON. A preemption watcher is only
opened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.config import scrub_variables
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.training.identity import task_size_of
from paceline.training.user_code.loading import MAX_MESSAGE_CHARACTERS, Task, load, user_code_error
from paceline.training.user_code.reference import CodeRef, parse, require_allowed

if TYPE_CHECKING:
    from torch import nn

    from paceline.config import Runtime
    from paceline.schemas import TrainJob
    from paceline.training.loop import Workload

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
    _check_in_process(parse(text), sources, cache, more, deadline_s)


def check_watcher(
    text: str, sources: Sequence[str], cache: Path, deadline_s: float = CHECK_S
) -> None:
    """Open the preemption watcher ``text`` in a process of its own; raises that process's error."""
    from paceline.training.loop import require_allowed_watcher

    ref = require_allowed_watcher(text, sources)
    if ref is not None:
        _check_in_process(ref, sources, cache, {"task": None}, deadline_s)


def _check_in_process(
    ref: CodeRef, sources: Sequence[str], cache: Path, more: dict[str, Any], deadline_s: float
) -> None:
    """Run ``main`` in a process without ambient credentials; raise the error that it reports."""
    require_allowed(ref, sources)
    environment = dict(os.environ)
    scrub_variables(environment)
    asked = {"text": ref.text, "sources": list(sources), "cache": str(cache), **more}
    command = [sys.executable, "-m", "paceline.training.user_code.checking"]
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
            got=f"exit code {done.returncode}: {tail[0][:MAX_MESSAGE_CHARACTERS]}",
            where=ref.where,
        ) from error
    raise kind(
        said["what"], got=said["got"], wanted=said["wanted"], where=said["where"], do=said["do"]
    )


def require_code(job: TrainJob, runtime: Runtime, vocabulary: int) -> None:
    """Check the job's user code on the job's data before any rank starts; see ``check``."""
    if not job.settings.code_ref:
        return
    size = task_size_of(job, runtime.profile)
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
    from paceline.training.loop import open_watcher

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
        said = {"code": error.code, "what": error.what, "do": error.do}
        for name in ("got", "wanted", "where"):
            value = getattr(error, name)
            said[name] = None if value is None else str(value)[:MAX_MESSAGE_CHARACTERS]
        sys.stdout.write("\n" + json.dumps(said) + "\n")
        return error.exit_code
    return 0


def _try(workload: Workload, model: nn.Module, job: str, task: Task, ref: CodeRef) -> None:
    from paceline.schemas import TrainJob
    from paceline.training.user_code.trying import first_rows, try_batch

    batch = first_rows(TrainJob.model_validate_json(job), task)
    if batch is not None:
        try_batch(workload, model, batch, ref)


def _build(workload: Workload, ref: CodeRef) -> nn.Module:
    from torch import nn

    try:
        model = workload.build()
    except Exception as error:
        raise user_code_error(
            "code reference raised while it built its model", ref, error
        ) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise InvalidInput(
            "code reference builds no model",
            got=type(model).__name__,
            wanted="a torch.nn.Module with parameters",
            where=ref.where,
        )
    return model


if __name__ == "__main__":
    from paceline.training.loop import leave_removed_directory

    leave_removed_directory()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # user code may have left threads
