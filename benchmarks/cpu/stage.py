"""What every contender's processes share: orders by standard input, news by standard output.

A *conductor* is one process in a session of its own. It starts its nodes, says {"ready"}, waits for
"go", delivers, says {"seconds"} when the last receiver has verified its copy, waits for "end".
The CPU time of all processes of the session is read between "ready" and {"seconds"}.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK = 512 * 1024
TIMEOUT_S = 300.0  # of one delivery
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to deliver to whom."""

    source: Path  # one file in a directory of its own
    scratch: Path  # receivers' copies go below it
    size: int
    sha256: str
    receivers: int
    piece_bytes: int

    @classmethod
    def parse(cls, raw: str) -> Order:
        """Return the order in ``raw``."""
        made = json.loads(raw)
        return cls(**{**made, "source": Path(made["source"]), "scratch": Path(made["scratch"])})

    def text(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self), default=str)

    def copy(self, name: str) -> Path:
        """Return where ``name`` keeps its copy; the directory exists."""
        directory = self.scratch / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory / self.source.name


def say(**what: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def hear() -> str:
    """Return the next line of orders; ends the process when nobody gives any."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)
    return line.strip()


class Nodes:
    """Child processes of a conductor that speak line by line."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *argv: object, inside: Sequence[str] = ()) -> int:
        """Start ``python -m argv``, by the command ``inside`` where given; return its number."""
        command = [*inside, sys.executable, "-m", *(str(each) for each in argv)]
        self._processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return len(self._processes) - 1

    def tell(self, number: int, what: str) -> None:
        """Say a line to one node."""
        stdin = self._processes[number].stdin
        stdin.write(what + "\n")
        stdin.flush()

    def hear(self, number: int) -> dict[str, Any]:
        """Return what one node says next."""
        line = self._processes[number].stdout.readline()
        if not line:
            raise RuntimeError(f"node {number} ended with {self._processes[number].wait()}")
        return json.loads(line)

    def pid(self, number: int) -> int:
        """Return the process id of one node."""
        return self._processes[number].pid

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def delivery(sources: Sequence[Path] = (), sha256: str = "") -> Iterator[None]:
    """Say ready, wait for "go", time the body, say how long it took, wait for "end".

    Afterwards, outside what is measured, ``sources`` must be files of that digest.
    """
    say(ready=True)
    hear()
    started = time.monotonic()
    yield
    say(seconds=time.monotonic() - started)
    hear()
    for path in sources:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise RuntimeError(f"{path} is not what was sent")
    say(verified=len(sources))


def session_cpu_s(session: int) -> float:
    """Return the user and system seconds of ``session``'s processes and their ended children."""
    return sum(_TICK_S * sum(int(each) for each in stat[11:15]) for stat in _stats(session))


def session_anonymous_mb(session: int) -> float:
    """Return the memory of ``session`` that is not file pages."""
    total = 0
    for stat in _stats(session):
        try:
            lines = Path(f"/proc/{stat[-1]}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return total * 1024 / 1e6


def _stats(session: int) -> Iterator[list[str]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            yield [*fields, path.parent.name]
