"""What one relaying agent costs at the speed of a data centre's link: cores for each 10 Gbit/s.

    python benchmarks/one_relay.py                       # plain and mTLS, three rounds (root only)
    python benchmarks/one_relay.py --mb 4000 --piece-kib 1024 --rounds 5

A source, the relay and a leaf, each in a network namespace, over veth without a limit. The relay
receives, verifies (BLAKE3), writes and serves each byte once; its user and system seconds count,
from the order to the last node's verified version, the publishing included. Copies lie in memory.
All nodes share this machine's cores, so the throughput is what they reach together. Every copy is
checked by SHA-256 outside the clock. Prints JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # run as a file: its directory is the path, not the project
    sys.path[0] = str(ROOT)

from benchmarks.cpu.relay import FINAL, chain_lanes, names_of, seed  # noqa: E402
from benchmarks.cpu.stage import Nodes, Order  # noqa: E402
from benchmarks.cpu_bound import write_model  # noqa: E402
from benchmarks.race.usage import Machine, cpu_s  # noqa: E402
from benchmarks.testbed import start, why_not  # noqa: E402

BYTES_S = 10e9 / 8
RELAY = 1  # between the source and the leaf
MODES = {"plain": False, "mtls": True}


def main() -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=2000)
    parser.add_argument("--piece-kib", type=int, default=4096, help="4096: as of 26 GB and more")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if reason := why_not():
        print(f"one_relay: {reason}", file=sys.stderr)
        return 2
    runs = [
        {"mode": mode, **measure(int(options.mb * 1e6), options.piece_kib * 1024, MODES[mode])}
        for _ in range(options.rounds)
        for mode in MODES
    ]
    middle = {
        mode: {
            name: statistics.median(run[name] for run in runs if run["mode"] == mode)
            for name in ("cores_per_10_gbit", "gbit_s")
        }
        for mode in MODES
    }
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "kernel_tls": kernel_tls()}
    print(json.dumps({"machine": machine, "runs": runs, "median": middle}, indent=1))
    return 0


def measure(size: int, piece_bytes: int, mtls: bool) -> dict[str, float]:
    """Return one delivery's figures."""
    with start(hosts=3, rate_mbit=math.inf) as bed, Nodes() as nodes:
        scratch = bed.scratch()
        source = scratch / "model/weights.bin"
        size, sha256 = write_model(source, size)
        order = Order(
            source=source,
            scratch=scratch,
            size=size,
            sha256=sha256,
            receivers=2,
            piece_bytes=piece_bytes,
        )
        names, manifest, addresses = names_of(order), seed(order, mtls), []
        for name, host in zip(names, bed.hosts, strict=True):
            inside = ["nsenter", f"--net=/run/netns/{host.namespace}", "--"]
            argv = ["benchmarks.cpu.relay", name, "tcp", int(mtls), host.address]
            number = nodes.start(*argv, inside=inside)
            nodes.tell(number, order.text())
            addresses.append(nodes.hear(number)["address"])
        lanes = chain_lanes(names, addresses, manifest)
        touch_memory(scratch / "touched", 2 * size)
        machine, before_s, began_s = Machine(), cpu_s(nodes.pid(RELAY)), time.monotonic()
        for number, mine in enumerate(lanes, start=1):
            nodes.tell(number, mine)
        for number in range(1, len(names)):
            nodes.hear(number)
        took_s = time.monotonic() - began_s
        relay_s = cpu_s(nodes.pid(RELAY)) - before_s
        found = {
            "gbit_s": round(size * 8 / took_s / 1e9, 2),
            "cores_per_10_gbit": round(relay_s / (size / BYTES_S), 3),
            "cpu_s_per_gb": round(relay_s / (size / 1e9), 3),
            "load": round(machine.load, 1),
            "busy": round(machine.busy(), 2),
        }
        for name in names[1:]:
            with (scratch / name / FINAL / source.name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise RuntimeError(f"{name} has another file than was sent")
        return {**found, "copies_verified": len(names) - 1}


def touch_memory(path: Path, size: int) -> None:
    """Write and remove ``size`` bytes, so that a virtual machine has its host's memory for them: a
    page's first use after the host took it back cost 1.7 of 3.0 CPU-seconds per GB.
    """
    block = bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(0, size, len(block)):
            file.write(block)
    path.unlink()


def kernel_tls() -> bool:
    """Return whether this kernel encrypts TLS records for sockets (kTLS)."""
    return "tls" in Path("/proc/sys/net/ipv4/tcp_available_ulp").read_text().split()


if __name__ == "__main__":
    sys.exit(main())
