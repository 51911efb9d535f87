"""Real ranks of a test module, forked from one process that has imported it.

An import of torch and of what ranks need takes 5 s of CPU time, longer than most of what they do
here. ``python -m tests.support.forked`` stays as long as its caller: each line that it reads, a
module and its gangs as JSON, it answers with what became of them. Its tests are of the xdist group
"forked ranks".
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]
_SET = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # a thread spoils forking
    "HF_HUB_OFFLINE": "1",
}
_helpers: list[subprocess.Popen[str]] = []


class Ended(NamedTuple):
    """How a rank ended: negative codes are signals."""

    code: int
    out: str
    err: str


def run_gangs(
    module: str, gangs: Sequence[Sequence[Sequence[str]]], deadline_s: float = 100.0
) -> list[list[Ended]]:
    """Run ``module.main()`` in a process for each rank of each gang, whose arguments are given;
    gangs one after another, ranks at once. Whoever is too late is killed, with all others.
    """
    if not _helpers:
        _helpers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked"],
                cwd=ROOT,
                env={**os.environ, **_SET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    (helper,) = _helpers
    assert helper.stdin is not None and helper.stdout is not None
    said = ""
    try:
        helper.stdin.write(json.dumps([module, [[*map(list, each)] for each in gangs]]) + "\n")
        helper.stdin.flush()
        if select.select([helper.stdout], [], [], deadline_s)[0]:
            said = helper.stdout.readline()
    finally:
        if not said:
            _end()
    assert said, f"ranks of {module} do not end within {deadline_s} s"
    return [[Ended(*each) for each in gang] for gang in json.loads(said)]


@atexit.register
def _end() -> None:
    while _helpers:
        helper = _helpers.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
        helper.communicate()


def main() -> None:
    """Be the process that has imported the modules."""
    for line in sys.stdin:
        name, gangs = json.loads(line)
        sys.stdout.write(json.dumps(_ran(name, gangs)) + "\n")
        sys.stdout.flush()


def _ran(name: str, gangs: list[list[list[str]]]) -> list[list[tuple[int, str, str]]]:
    module = importlib.import_module(name)
    if "paceline.training.parallel.pipeline" in sys.modules:  # a stage imports it: once for all
        importlib.import_module("torch.distributed.pipelining")
    ended = []
    with tempfile.TemporaryDirectory() as scratch:
        for gang in gangs:
            files = [Path(scratch, f"rank-{rank}") for rank in range(len(gang))]
            pids = []
            for arguments, file in zip(gang, files, strict=True):
                if not (pid := os.fork()):
                    _become(module, [name, *arguments], file)
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            ended.append(
                [
                    (
                        code,
                        file.with_suffix(".out").read_text(),
                        file.with_suffix(".err").read_text(),
                    )
                    for code, file in zip(codes, files, strict=True)
                ]
            )
    return ended


def _become(module: object, argv: list[str], file: Path) -> NoReturn:
    """Be a rank; never returns."""
    code = 1
    try:
        for fd, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(file.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        sys.argv = argv
        code = module.main() or 0  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - its last word
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
