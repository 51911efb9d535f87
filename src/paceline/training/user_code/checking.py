"""Check of user code in a process of its own, before any rank starts.

``python -m paceline.training.user_code.checking`` is that process: it reads one line of JSON on
standard input, and imports, calls and builds the reference. On failure its last line of output is
the error as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import TrainingSettings, scrub_variables
from paceline.errors import PacelineError, TrainingFailed, from_record, to_record
from paceline.training.user_code.loading import (
    MAX_MESSAGE_CHARACTERS,
    Task,
    build_model,
    load,
    task_of,
)
from paceline.training.user_code.reference import OPTIMIZER, parse, require_allowed

if TYPE_CHECKING:
    from torch import nn

    from paceline.config import Runtime
    from paceline.schemas import TrainJob

CHECK_S = 180.0  # import, call and build


def check(
    text: str,
    sources: Sequence[str],
    cache: Path,
    task: Task,
    *,
    settings: TrainingSettings | None = None,
    judged: bool = False,
    deadline_s: float = CHECK_S,
) -> None:
    """Load the reference and build its model in a process of its own, before any rank starts.

    Raises what ``load`` raises, with the same fields, and InvalidInput where ``settings`` name
    layers or parameters that the model does not have, or where it is to be ``judged`` and gives no
    logits (``NextTokens``). The process gets no ambient credentials. An optimiser of ``settings``
    takes trial steps, too; ``text`` may then be "".
    """
    own = settings.optimizer_ref if settings is not None else ""
    refs = [parse(text)] if text or not own else []
    refs += [parse(own, OPTIMIZER)] if own else []
    for each in refs:
        require_allowed(each, sources)
    ref = refs[0]
    asked: dict[str, object] = {
        "text": text,
        "sources": list(sources),
        "cache": str(cache),
        "task": asdict(task),
        "judged": judged,
    }
    asked["settings"] = None if settings is None else settings.model_dump()
    check_in_process(__name__, asked, "code reference", ref.where, deadline_s=deadline_s)


def check_in_process(
    module: str,
    asked: Mapping[str, object],
    what: str,
    where: str,
    *,
    deadline_s: float = CHECK_S,
    shown: Mapping[str, str] | None = None,
) -> None:
    """Run ``module`` with ``asked`` as its line of JSON, without ambient credentials; raise the
    error that it reports. Of its texts, those in ``shown`` are replaced.

    Raises TrainingFailed, which names ``what`` and ``where``, for a process that reports none.
    """
    environment = dict(os.environ)
    scrub_variables(environment)
    command = [sys.executable, "-m", module]
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
            f"{what} does not come to an end",
            got=f"nothing within {deadline_s:.0f} s",
            where=where,
        ) from error
    if done.returncode == 0:
        return
    said = done.stdout
    for text, other in (shown or {}).items():
        said = said.replace(text, other)
    try:
        refused = from_record(json.loads(said.splitlines()[-1]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        tail = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise TrainingFailed(
            f"{what} ended its process",
            got=f"exit code {done.returncode}: {tail[0][:MAX_MESSAGE_CHARACTERS]}",
            where=where,
        ) from error
    raise refused


def require_code(job: TrainJob, runtime: Runtime, vocabulary: int) -> None:
    """Check the job's user code before any rank starts; see ``check``."""
    if not (job.settings.code_ref or job.settings.optimizer_ref):
        return
    task = task_of(job, runtime.profile, vocabulary)
    sources = runtime.profile.security.code_sources
    check(job.settings.code_ref, sources, runtime.state_dir / "code", task, settings=job.settings)


def main() -> int:
    """Check the reference on standard input; on failure the last line of output is the error."""
    asked = json.loads(sys.stdin.readline())
    try:
        sources, cache, settings = asked["sources"], Path(asked["cache"]), None
        if asked["settings"] is not None:
            settings = TrainingSettings(**asked["settings"])
        if asked["text"]:
            task, ref = Task(**asked["task"]), parse(asked["text"])
            workload = load(asked["text"], sources, cache, task)
            model = build_model(workload, ref)
            if settings is not None:
                _require_names(model, settings)
            if asked["judged"]:
                from paceline.training.user_code.next_tokens import NextTokens

                NextTokens(workload, model, ref, task)
        if settings is not None and settings.optimizer_ref:
            from paceline.training.user_code.optimizers import require_optimizer

            require_optimizer(settings, sources, cache)
    except PacelineError as error:
        sys.stdout.write("\n" + json.dumps(to_record(error)) + "\n")
        return error.exit_code
    return 0


def _require_names(model: nn.Module, settings: TrainingSettings) -> None:
    from paceline.models import add_adapters
    from paceline.training.loop import require_groups

    if settings.lora is not None:
        add_adapters(model, settings.lora, settings.seed)
    require_groups(model, settings)


if __name__ == "__main__":
    from paceline.training.loop import leave_removed_directory

    leave_removed_directory()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # user code may have left threads
