"""SIGKILL at the n-th system call of a program, for each that it makes: strace counts and kills."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

DISK_CALLS = (
    "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,ftruncate,fallocate,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,fchmod,copy_file_range"
)
NETWORK_CALLS = "sendto,connect"

SAMPLED = pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.nightly)])

_LINE = re.compile(r"(\d+) +(\w+)\(")


@dataclass(frozen=True)
class Point:
    """Die at the ``number``-th ``call`` of whichever thread makes so many first."""

    call: str
    number: int

    def __str__(self) -> str:
        return f"{self.call}-{self.number}"


def require_strace() -> None:
    """Skip with the reason, or fail where the environment says that nothing may be skipped."""
    reason = ""
    if shutil.which("strace") is None:
        reason = "strace is not installed"
    elif subprocess.run(["strace", "-f", "true"], check=False, capture_output=True).returncode:
        reason = "this machine does not allow strace"
    if reason and "netns" in os.environ.get("PACELINE_REQUIRE", ""):
        pytest.fail(f"required but missing: {reason}")
    if reason:
        pytest.skip(reason)


def run(
    program: Sequence[str | Path], strace: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python program, under strace with these options where there are any."""
    traced = ["strace", "-f", "-qq", "--seccomp-bpf", *strace] if strace else []
    return subprocess.run(
        [*traced, sys.executable, *map(str, program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **(env or {}), "PYTHONDONTWRITEBYTECODE": "1"},
    )


def points(
    program: Sequence[str | Path], calls: str, trace: Path, env: dict[str, str] | None = None
) -> list[Point]:
    """Return every point at which ``program`` can die at one of ``calls``, from one run of it."""
    done = run(program, ["-o", str(trace), "-e", f"trace={calls}"], env)
    assert done.returncode == 0, done.stderr
    by_thread = Counter(
        (match[1], match[2])
        for line in trace.read_text().splitlines()
        if (match := _LINE.match(line))
    )
    most: dict[str, int] = {}
    for (_, call), count in by_thread.items():
        most[call] = max(most.get(call, 0), count)
    return [Point(call, number) for call in sorted(most) for number in range(1, most[call] + 1)]


def kill(program: Sequence[str | Path], point: Point, env: dict[str, str] | None = None) -> bool:
    """Run ``program`` until ``point`` and return whether it died there (else it ended before)."""
    inject = f"inject={point.call}:signal=KILL:when={point.number}"
    done = run(program, ["-o", os.devnull, "-e", inject], env)
    assert done.returncode in (0, -9, 137), done.stderr
    return done.returncode != 0


def sample(found: list[Point], count: int, seed: int) -> list[Point]:
    """Return ``count`` points by chance."""
    return Random(seed).sample(found, min(count, len(found)))
