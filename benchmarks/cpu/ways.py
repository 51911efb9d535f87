"""What one hop over loopback costs by the way a piece goes from the socket into the file, and so
whether the floor of ``cpu_bound.py`` is the least. Prints CPU-seconds per GiB
of both ends, median (worst) of interleaved rounds.

    python benchmarks/cpu/ways.py --rounds 7

Sendfile on one side in every row; the other receives, hashes (BLAKE3) and keeps pieces of 1 MiB.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import resource
import socket
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

SIZE, PIECE = 512 << 20, 1 << 20
MOVE, F_SETPIPE_SZ = 1, 1031  # of splice(2) and fcntl(2)
Way = Callable[[socket.socket, int], None]


def _fill(peer: socket.socket, room: memoryview) -> None:
    at = 0
    while at < len(room):
        got = peer.recv_into(room[at:])
        assert got, "the other side ended early"
        at += got


def copied(step: int, *, hashes: bool = True, keeps: bool = True) -> Way:
    """Receive ``step`` bytes at a time into one buffer; hash and write from there."""

    def way(peer: socket.socket, file: int) -> None:
        buffer = memoryview(bytearray(step))
        for piece in range(0, SIZE, PIECE):
            digest = blake3()
            for at in range(piece, piece + PIECE, step):
                _fill(peer, buffer)
                if hashes:
                    digest.update(buffer)
                if keeps:
                    os.pwrite(file, buffer, at)
            digest.digest()

    return way


def waited(peer: socket.socket, file: int) -> None:
    """Let the kernel fill a whole piece in one call."""
    buffer = memoryview(bytearray(PIECE))
    for piece in range(0, SIZE, PIECE):
        assert peer.recv_into(buffer, PIECE, socket.MSG_WAITALL) == PIECE
        blake3(buffer).digest()
        os.pwrite(file, buffer, piece)


def mapped(peer: socket.socket, file: int) -> None:
    """Receive into the mapped file: no write, but a fault for every page."""
    room = memoryview(mmap.mmap(file, SIZE))
    for piece in range(0, SIZE, PIECE):
        part = room[piece : piece + PIECE]
        _fill(peer, part)
        blake3(part).digest()


def spliced(peer: socket.socket, file: int) -> None:
    """Splice socket to file, so that no byte enters this process, and hash the mapped file."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, F_SETPIPE_SZ, PIECE)
    room = memoryview(mmap.mmap(file, SIZE, prot=mmap.PROT_READ))
    for piece in range(0, SIZE, PIECE):
        at = piece
        while at < piece + PIECE:
            inside = os.splice(peer.fileno(), writes, piece + PIECE - at, flags=MOVE)
            while inside:
                moved = os.splice(reads, file, inside, offset_dst=at, flags=MOVE)
                at, inside = at + moved, inside - moved
        blake3(room[piece : piece + PIECE]).digest()
    os.close(reads)
    os.close(writes)


WAYS: dict[str, Way] = {
    "floor: recv, hash, write, 1 MiB": copied(PIECE),
    "512 KiB at a time": copied(PIECE // 2),
    "256 KiB at a time": copied(PIECE // 4),
    "MSG_WAITALL, 1 MiB": waited,
    "into the mapped file": mapped,
    "splice, hash the mapped file": spliced,
    "(without the hash)": copied(PIECE, hashes=False),
    "(received only)": copied(PIECE, hashes=False, keeps=False),
}


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def cost(way: Way, source: Path, target: Path) -> float:
    """Return the CPU-seconds per GiB of one transfer, of sender and receiver together."""
    file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(file, 0, SIZE)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        child = os.fork()
        if child == 0:
            with (
                socket.create_connection(listening.getsockname()) as out,
                source.open("rb") as sent,
            ):
                out.sendfile(sent)
            os._exit(0)
        peer, _ = listening.accept()
    with peer:
        before = _cpu_s(resource.getrusage(resource.RUSAGE_SELF))
        way(peer, file)
        own = _cpu_s(resource.getrusage(resource.RUSAGE_SELF)) - before
    _, _, used = os.wait4(child, 0)
    os.close(file)
    return (own + _cpu_s(used)) * (1 << 30) / SIZE


def main() -> None:
    """Measure every way in turn, ``--rounds`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    costs: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        source, target = Path(directory) / "source", Path(directory) / "target"
        source.write_bytes(os.urandom(SIZE))
        for _ in range(rounds):
            for name, way in WAYS.items():
                costs[name].append(cost(way, source, target))
    floor = statistics.median(next(iter(costs.values())))
    for name, each in costs.items():
        median = statistics.median(each)
        print(f"{name:34} {median:.2f} ({max(each):.2f})  {median / floor:.3f} of the floor")
    print("load", os.getloadavg())


if __name__ == "__main__":
    main()
