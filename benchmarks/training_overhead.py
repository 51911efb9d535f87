"""What our loop costs: tokens a second of ``paceline.training.loop.loop`` against other trainers'
loops.

Same model, same batch, one thread a rank, fused AdamW in all. ``plain`` is the shortest PyTorch
loop: no clipping, no schedule, no stream, no checks. Each trainer runs in processes of its own that
stand still until they are asked for a few steps; pairs of (ours, other) are interleaved, so that a
busy machine slows both alike, and processes are started anew several times, because one process's
memory layout alone is worth a percent. ``cpu_ratio`` compares CPU seconds instead: what is left to
say on a machine that is never quiet; it does not see time spent waiting.

    python benchmarks/training_overhead.py [--ranks 1 2] [--against plain] [--pairs 21]
                                           [--launches 3] [--steps 4] [--quick]
    python benchmarks/training_overhead.py --against plain fabric accelerate ray   # make peers
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ROOT / "benchmarks" / "peers" / "trainers.py"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
RESULT = ROOT / "benchmarks" / "results" / "training_overhead.json"
START_S, WORK_S = 180.0, 600.0
GOAL_MEDIAN, GOAL_LOW = 0.98, 0.97
RESAMPLES = 10_000


class Gang:
    """The ranks of one trainer, waiting for work."""

    def __init__(self, kind: str, ranks: int, sizes: list[int]) -> None:
        self.kind = kind
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[IO[str]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._ranks = ranks
        self._server = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        address = f"127.0.0.1:{self._server.getsockname()[1]}"
        command = [self._python(), str(TRAINERS), kind, address, *map(str, sizes)]
        port = str(_free_port())
        for rank in range(1 if kind == "ray" else ranks):
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self._environment(rank, ranks, port),
                    stdout=self._log,
                    stderr=self._log,
                )
            )

    def ready(self) -> None:
        """Wait until every rank stands still for its work."""
        self._server.settimeout(1.0)
        until = time.monotonic() + START_S
        while len(self._lines) < self._ranks:
            self._require_alive(until)
            with contextlib.suppress(TimeoutError), self._server.accept()[0] as connection:
                connection.settimeout(WORK_S)
                line = connection.makefile("rw")  # keeps the connection
                line.readline()
                self._lines.append(line)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Return the slowest rank's seconds for ``steps`` steps, and all ranks' CPU seconds."""
        for line in self._lines:
            line.write(f"{steps}\n")
            line.flush()
        try:
            answers = [line.readline() for line in self._lines]
        except OSError:  # gone, or silent for WORK_S
            self._give_up()
        if not all(answers):
            self._give_up()
        wall_s, cpu_s = zip(*(map(float, each.split()) for each in answers), strict=True)
        return max(wall_s), sum(cpu_s)

    def close(self) -> None:
        """End the ranks."""
        self._server.close()
        for line in self._lines:
            line.close()
        for process in self._processes:
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.terminate()  # Ray's driver also ends its servers
                process.wait(60)
        self._log.close()

    def _python(self) -> str:
        return sys.executable if self.kind in ("ours", "plain") else str(PEERS)

    def _environment(self, rank: int, ranks: int, port: str) -> dict[str, str]:
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        if self.kind == "ray":
            place = {"WORLD_SIZE": str(ranks), "RAY_TRAIN_V2_ENABLED": "1"}
        elif ranks == 1:
            place = {}
        return {
            **os.environ,
            **place,
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def _require_alive(self, until: float) -> None:
        gone = [each for each in self._processes if each.poll() is not None]
        if gone or time.monotonic() > until:
            self._give_up()

    def _give_up(self) -> NoReturn:
        self._log.seek(0)
        sys.stderr.write(self._log.read().decode(errors="replace")[-4000:])
        raise SystemExit(f"{self.kind}: a rank ended or is silent")


@contextlib.contextmanager
def gangs(kinds: tuple[str, str], ranks: int, sizes: list[int]) -> Iterator[list[Gang]]:
    """Both trainers, started and waiting."""
    found: list[Gang] = []
    try:
        for kind in kinds:
            found.append(Gang(kind, ranks, sizes))  # noqa: PERF401 - those started are closed
        for each in found:
            each.ready()
        yield found
    finally:
        for each in found:
            each.close()


def race(other: str, ranks: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs of ours against ``other`` and return their figures."""
    sizes = [asked.parameters, asked.context, asked.batch]
    ours_s: list[tuple[float, float]] = []
    other_s: list[tuple[float, float]] = []
    for launch in range(asked.launches):
        with gangs(("ours", other), ranks, sizes) as (ours, theirs):
            for each in (ours, theirs):
                each.seconds(asked.warm)  # allocator, kernels, DDP's buckets, the measured peak
            for number in range(launch, asked.pairs, asked.launches):
                order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
                took = {each.kind: each.seconds(asked.steps) for each in order}
                ours_s.append(took["ours"])
                other_s.append(took[other])
    tokens = asked.batch * asked.context * asked.steps
    ratios, of_cpu = (
        [theirs[kind] / mine[kind] for mine, theirs in zip(ours_s, other_s, strict=True)]
        for kind in (0, 1)
    )
    low, high = interval(ratios)
    cpu_low, cpu_high = interval(of_cpu)
    return {
        "against": other,
        "ranks": ranks,
        "pairs": len(ratios),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "worst": round(min(ratios), 4),
        "ours_tokens_per_second": tokens / statistics.median(wall_s for wall_s, _ in ours_s),
        "other_tokens_per_second": tokens / statistics.median(wall_s for wall_s, _ in other_s),
        "ratios": [round(each, 4) for each in ratios],
        "cpu_ratio": round(statistics.median(of_cpu), 4),
        "cpu_low": round(cpu_low, 4),
        "cpu_high": round(cpu_high, 4),
    }


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the races and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--against", nargs="+", default=["plain"])
    parser.add_argument("--quick", action="store_true", help="tiny: does it run at all?")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.parameters, asked.context, asked.batch = 20_000, 16, 2
        asked.ranks, asked.pairs, asked.launches, asked.steps = [1], 2, 1, 2
    races = []
    for ranks in asked.ranks:
        for other in asked.against:
            races.append(race(other, ranks, asked))
            sys.stderr.write(f"{races[-1]}\n")
    result: dict[str, Any] = {
        "benchmark": "training_overhead",
        "parameters": asked.parameters,
        "context": asked.context,
        "batch": asked.batch,
        "steps": asked.steps,
        "goal": {"median": GOAL_MEDIAN, "low": GOAL_LOW},
        "reached": all(
            each["ratio"] >= GOAL_MEDIAN and each["low"] >= GOAL_LOW
            for each in races
            if each["against"] == "plain"
        ),
        "races": races,
    }
    if not asked.quick:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
