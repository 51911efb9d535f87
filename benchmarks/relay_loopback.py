"""What a hop costs: CPU-seconds per GB of a relay chain on unlimited loopback, beside a bare loop.

The floor is the least a Python relay could do for each byte: recv_into → SHA-256 → pwrite →
sendfile, one process a node, no protocol, no marks, no verdicts. Ratios travel, seconds do not.

    python benchmarks/relay_loopback.py --mb 1000 --piece-kib 1024 --nodes 4

prints one JSON object; ``--mb 4`` runs as a test.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paceline.manifest import build_manifest, parse_manifest, write_manifest
from paceline.plan import PlanWorker, make_plan
from paceline.relay.local import LocalFleet
from paceline.wire.plan import Labels, WorkerLanes

FLOOR_PIECE = 1024 * 1024
FLOOR_BLOCK = 512 * 1024
TIMEOUT_S = 500.0


def main() -> None:
    """Measure and print, or (with --role) be one node of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=1000)
    parser.add_argument("--piece-kib", type=int, default=1024, help="0: as the model's size says")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--role", choices=["relay", "floor"])
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.role:
        {"relay": relay_node, "floor": floor_node}[options.role](options.directory)
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), int(options.mb * 1e6), options.piece_kib, options.nodes)
    print(json.dumps(result))


def measure(root: Path, size: int, piece_kib: int, nodes: int) -> dict[str, Any]:
    """Return both chains' seconds and CPU-seconds per GB and hop."""
    model = root / "model"
    model.mkdir()
    with (model / "weights.bin").open("wb") as file:
        for at in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - at)))
    manifest = build_manifest(
        model, model_id="bench", version="v1", link_mbit=10_000, piece_bytes=piece_kib * 1024
    )
    write_manifest(model, manifest)
    names = [f"node-{number}" for number in range(nodes)]

    def lanes(addresses: list[str]) -> list[str]:
        workers = [
            PlanWorker(worker_id=name, labels=Labels(), address=address, link_mbit=10_000)
            for name, address in zip(names, addresses, strict=True)
        ]
        plan = make_plan(
            "chain",
            deployment_id="bench",
            epoch=1,
            manifest=manifest,
            workers=workers,
            source_url=str(model),
        )
        by_name = {each.worker_id: each.model_dump_json() for each in plan.workers}
        return [by_name[name] for name in names]

    def floor_orders(addresses: list[str]) -> list[str]:
        after = [*addresses[1:], ""]
        return [
            json.dumps({"first": number == 0, "next": address, "size": size})
            for number, address in enumerate(after)
        ]

    relay = chain("relay", root, names, lanes)
    floor = chain("floor", root, names, floor_orders)
    gb_hops = size / 1e9 * nodes
    report: dict[str, Any] = {
        "bytes": size,
        "nodes": nodes,
        "piece_bytes": manifest.piece_bytes,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    for name, (seconds, cpu_s) in (("relay", relay), ("floor", floor)):
        report[name] = {
            "seconds": round(seconds, 3),
            "cpu_s_per_gb_hop": round(cpu_s / gb_hops, 3),
        }
    report["ratio"] = round(relay[1] / floor[1], 3)
    return report


def chain(role: str, root: Path, names: list[str], orders: Any) -> tuple[float, float]:
    """Run one process a node and return the seconds of the slowest and the CPU-seconds of all."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--role", role, "--directory", root / role / name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        addresses = [_read(process)["address"] for process in processes]
        for process, order in reversed(
            list(zip(processes, orders(addresses), strict=True))
        ):  # the tail first, so that nobody waits for a listener
            process.stdin.write(order + "\n")
            process.stdin.flush()
        ended = [_read(process) for process in processes]
        for process in processes:
            process.communicate("done\n", timeout=TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(each["seconds"] for each in ended), sum(each["cpu_s"] for each in ended)


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.stdout.readline())


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def relay_node(directory: Path) -> None:
    """Be one Paceline node."""
    name = directory.name
    with LocalFleet(directory.parent, [name]) as fleet:
        _say(address=fleet.addresses[name])
        lanes = WorkerLanes.model_validate_json(sys.stdin.readline())
        model = directory.parents[1] / "model"
        manifest = parse_manifest((model / "manifest.json").read_bytes())
        started, cpu_s = time.monotonic(), _cpu_s()
        fleet.deploy(manifest, {name: lanes})
        fleet.receipts("bench", timeout_s=TIMEOUT_S)
        seconds = time.monotonic() - started
        time.sleep(0.2)  # let the last pieces leave
        _say(seconds=seconds, cpu_s=_cpu_s() - cpu_s)
        sys.stdin.readline()


def floor_node(directory: Path) -> None:
    """Be one node of the bare loop."""
    directory.mkdir(parents=True)
    listener = socket.create_server(("127.0.0.1", 0))
    _say(address=f"127.0.0.1:{listener.getsockname()[1]}")
    order = json.loads(sys.stdin.readline())
    started, cpu_s = time.monotonic(), _cpu_s()
    size, out = order["size"], None
    if order["next"]:
        host, port = order["next"].split(":")
        out = socket.create_connection((host, int(port)))
    target = os.open(directory / "weights.bin", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(target, 0, size)
    ready = threading.Semaphore(0)
    sender = threading.Thread(target=_forward, args=(out, target, size, ready))
    sender.start()
    block = memoryview(bytearray(FLOOR_BLOCK))
    if order["first"]:
        source = os.open(directory.parents[1] / "model/weights.bin", os.O_RDONLY)
        take = lambda view, at: os.preadv(source, [view], at)  # noqa: E731
    else:
        sock, _ = listener.accept()
        take = lambda view, _at: sock.recv_into(view, 0, socket.MSG_WAITALL)  # noqa: E731
    for start in range(0, size, FLOOR_PIECE):
        digest, at, stop = hashlib.sha256(), start, min(size, start + FLOOR_PIECE)
        while at < stop:
            got = take(block[: min(FLOOR_BLOCK, stop - at)], at)
            digest.update(block[:got])
            os.pwrite(target, block[:got], at)
            at += got
        digest.digest()
        ready.release()
    sender.join()
    os.fdatasync(target)
    _say(seconds=time.monotonic() - started, cpu_s=_cpu_s() - cpu_s)
    sys.stdin.readline()


def _forward(out: socket.socket | None, target: int, size: int, ready: threading.Semaphore) -> None:
    for start in range(0, size, FLOOR_PIECE):
        ready.acquire()
        at, stop = start, min(size, start + FLOOR_PIECE)
        while out is not None and at < stop:
            at += os.sendfile(out.fileno(), target, at, stop - at)


if __name__ == "__main__":
    main()
