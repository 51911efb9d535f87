"""What a delivered byte costs: CPU-seconds per GB of a file brought to N receivers over loopback.

User and system time of every process that takes part (source, receivers, servers) from the moment
all of them are ready to the last verified copy, divided by the bytes delivered: N copies. On a
chain that is one hop each. Every copy is a file, and is checked by SHA-256 by whoever received it;
after the clock has stopped it is checked once more. The floor is the least a Python relay could do.

    python benchmarks/cpu_bound.py                       # all contenders, interleaved: 10 minutes
    python benchmarks/cpu_bound.py --only tcp,floor --mb 500 --rounds 5

prints JSON and writes ``cpu_bound.json`` and ``cpu_bound.png`` to ``--out``. Copies lie in memory
(/dev/shm): on a disk the kernel's work for pages that are touched for the first time, and for
writing them back, is three quarters of the floor. Ratios travel, seconds do not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: its directory is the path, not the project
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.cpu import aria2, dask_scatter, floor, gloo, relay, torrent
from benchmarks.cpu.stage import TIMEOUT_S, Order, session_anonymous_mb, session_cpu_s

MEMORY = Path("/dev/shm")
CONTENDERS: dict[str, Callable[[Order], None]] = {
    "floor": lambda order: floor.conduct(order, tls=False),
    "tcp": lambda order: relay.conduct(order, "tcp", mtls=False),
    "grpc": lambda order: relay.conduct(order, "grpc", mtls=False),
    "tls-floor": lambda order: floor.conduct(order, tls=True),
    "tcp+mtls": lambda order: relay.conduct(order, "tcp", mtls=True),
    "grpc+mtls": lambda order: relay.conduct(order, "grpc", mtls=True),
    "libtorrent": torrent.conduct,
    "aria2": aria2.conduct,
    "dask-scatter": dask_scatter.conduct,
    "gloo-broadcast": gloo.conduct,
}
# How the peers were tuned: each of these beside the peer as it is above (docs/measurements).
SWEEP: dict[str, Callable[[Order], None]] = {
    "libtorrent-256k": lambda order: torrent.conduct(order, piece_kib=256),
    "libtorrent-4m": lambda order: torrent.conduct(order, piece_kib=4096),
    "libtorrent-plain": lambda order: torrent.conduct(order, super_seeding=False),
    "libtorrent-sequential": lambda order: torrent.conduct(order, sequential=True),
    "aria2-1-connection": lambda order: aria2.conduct(order, "--split=1", "--file-allocation=none"),
    "aria2-no-cache": lambda order: aria2.conduct(
        order, "--split=1", "--file-allocation=none", "--disk-cache=0"
    ),
    "aria2-cache": lambda order: aria2.conduct(
        order, "--split=1", "--file-allocation=none", "--disk-cache=64M"
    ),
    "aria2-falloc": lambda order: aria2.conduct(
        order, "--split=1", "--file-allocation=falloc", "--disk-cache=0"
    ),
    "gloo-4m": lambda order: gloo.conduct(order, 4 << 20),
    "gloo-64m": lambda order: gloo.conduct(order, 64 << 20),
}
PEERS = ("libtorrent", "aria2", "dask-scatter", "gloo-broadcast")
VERIFY = ("libtorrent", "aria2")  # by SHA-256 of their own; the others only carry, we hash
FLOOR_OF = {"tcp": "floor", "grpc": "floor", "tcp+mtls": "tls-floor", "grpc+mtls": "tls-floor"}


def main() -> None:
    """Measure, or (with --conduct) be one contender."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=1000)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--piece-kib", type=int, default=1024, help="0: as the size says")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--sweep", action="store_true", help="the peers, tuned in other ways")
    parser.add_argument("--directory", type=Path, help="where copies lie (default: in memory)")
    parser.add_argument("--out", type=Path, help="where to write cpu_bound.json and .png")
    parser.add_argument("--conduct", choices=CONTENDERS | SWEEP, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.conduct:
        (CONTENDERS | SWEEP)[options.conduct](Order.parse(sys.stdin.readline()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the contenders go too
    result = measure(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "cpu_bound.json").write_text(text)
        plot(result, options.out / "cpu_bound.png")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return every run, and the summary of each contender."""
    place = options.directory or (MEMORY if MEMORY.is_dir() else None)
    names = [name for name in options.only.split(",") if name]
    if options.sweep:
        names = [*PEERS, *SWEEP]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=place, prefix="paceline-cpu-") as raw:
        root = Path(raw)
        source = root / "model/weights.bin"
        size, sha256 = write_model(source, int(options.mb * 1e6))
        for number in range(options.rounds):
            # Interleaved, each round in another order: what disturbs one round disturbs all.
            for name in random.Random(number).sample(names, len(names)):
                scratch = root / "scratch"
                scratch.mkdir()
                order = Order(
                    source=source,
                    scratch=scratch,
                    size=size,
                    sha256=sha256,
                    receivers=options.receivers,
                    piece_bytes=options.piece_kib * 1024,
                )
                runs.append({"round": number, "contender": name, **run(name, order)})
                shutil.rmtree(scratch)
                print(json.dumps(runs[-1]), file=sys.stderr)
    return {
        "bytes": size,
        "receivers": options.receivers,
        "piece_kib": options.piece_kib,
        "directory": str(place),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "summary": summary(runs),
        "runs": runs,
    }


def write_model(path: Path, size: int) -> tuple[int, str]:
    """Write ``size`` random bytes and return (size, SHA-256)."""
    path.parent.mkdir()
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for at in range(0, size, 1 << 24):
            data = os.urandom(min(1 << 24, size - at))
            digest.update(data)
            file.write(data)
    return size, digest.hexdigest()


def run(name: str, order: Order) -> dict[str, Any]:
    """Return what one delivery by ``name`` took."""
    load = os.getloadavg()[0]
    conductor = subprocess.Popen(
        [sys.executable, __file__, "--conduct", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
    )
    end = lambda: os.killpg(conductor.pid, signal.SIGKILL)  # noqa: E731 (its nodes too)
    timer = threading.Timer(TIMEOUT_S, end)
    timer.start()
    try:
        tell(conductor, order.text())
        hear(conductor, name)
        before = session_cpu_s(conductor.pid)
        tell(conductor, "go")
        seconds = hear(conductor, name)["seconds"]
        cpu_s = session_cpu_s(conductor.pid) - before
        memory_mb = session_anonymous_mb(conductor.pid)
        tell(conductor, "end")
        verified = hear(conductor, name)["verified"]
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            end()
        conductor.communicate()
    return {
        "seconds": round(seconds, 3),
        "cpu_s_per_gb": round(cpu_s / (order.size / 1e9 * order.receivers), 3),
        "memory_mb": round(memory_mb),
        "verified": verified,
        "load": round(load, 2),
    }


def tell(conductor: subprocess.Popen[str], what: str) -> None:
    """Say a line to the conductor."""
    conductor.stdin.write(what + "\n")
    conductor.stdin.flush()


def hear(conductor: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Return the conductor's next line."""
    line = conductor.stdout.readline()
    if not line:
        raise RuntimeError(f"{name} ended with {conductor.wait()}")
    return json.loads(line)


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return median and worst of each contender, beside its floor and the best peer."""
    costs = {
        name: [each["cpu_s_per_gb"] for each in runs if each["contender"] == name]
        for name in dict.fromkeys(each["contender"] for each in runs)
    }
    median = {name: statistics.median(mine) for name, mine in costs.items()}
    best_peer = min((median[name] for name in VERIFY if name in median), default=None)
    lines: dict[str, dict[str, Any]] = {}
    for name, mine in costs.items():
        walls = [each["seconds"] for each in runs if each["contender"] == name]
        line: dict[str, Any] = {
            "cpu_s_per_gb": round(median[name], 3),
            "worst": max(mine),
            "seconds": round(statistics.median(walls), 2),
            "memory_mb": max(each["memory_mb"] for each in runs if each["contender"] == name),
            "load": max(each["load"] for each in runs if each["contender"] == name),
        }
        if (under := FLOOR_OF.get(name)) in median:
            # Of the same round: the machine was as busy for both. A floor of a few ticks of the
            # CPU clock, of a tiny run, may read 0.
            ratios = [a / b for a, b in zip(mine, costs[under], strict=True) if b]
            line["of_floor"] = round(statistics.median(ratios), 3) if ratios else None
        if best_peer and median[name] and name in FLOOR_OF:
            line["best_verifying_peer_over_this"] = round(best_peer / median[name], 2)
        lines[name] = line
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw median and worst of every contender."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = result["summary"]
    names = sorted(lines, key=lambda name: lines[name]["cpu_s_per_gb"], reverse=True)
    medians = [lines[name]["cpu_s_per_gb"] for name in names]
    worst = [lines[name]["worst"] - lines[name]["cpu_s_per_gb"] for name in names]
    colours = [
        "tab:grey" if "floor" in name else "tab:orange" if name in PEERS else "tab:blue"
        for name in names
    ]
    figure, axis = pyplot.subplots(figsize=(8, 1 + 0.4 * len(names)), layout="constrained")
    axis.barh(names, medians, color=colours)
    axis.errorbar(
        medians, names, xerr=[[0] * len(names), worst], fmt="none", ecolor="black", capsize=3
    )
    axis.set_xlabel(
        "CPU-seconds per GB delivered (median; whisker: worst), "
        f"{result['bytes'] / 1e9:g} GB to {result['receivers']} receivers"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
