"""The least a Python relay could do for each byte: recv_into → BLAKE3 → pwrite → sendfile.

One process a node, a chain, 1 MiB pieces, no protocol, no piece log. ``--tls`` is the same with
Python's ssl: recv_into → BLAKE3 → pwrite, pread → sendall.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from benchmarks.cpu.stage import BLOCK, Nodes, Order, delivery, hear, say
from paceline.relay.transport import TlsSettings, issue_identity, make_authority

PIECE = 1024 * 1024


def conduct(order: Order, tls: bool) -> None:
    """Run a source and a chain of receivers."""
    pki = order.scratch / "pki"
    issue_identity(make_authority(pki), "node", pki)
    names = ["source", *(f"node-{number}" for number in range(order.receivers))]
    with Nodes() as nodes:
        addresses = []
        for name in names:
            number = nodes.start("benchmarks.cpu.floor", name, pki if tls else "")
            nodes.tell(number, order.text())
            addresses.append(nodes.hear(number)["address"])
        copies = [order.copy(name) for name in names[1:]]
        with delivery(copies, order.sha256):
            for number in range(1, len(names)):
                nodes.tell(number, addresses[number - 1])  # whom to ask
            for number in range(1, len(names)):
                nodes.hear(number)


def node(name: str, pki: str) -> None:
    """Be one node: serve one caller, from what is fetched meanwhile unless this is the source."""
    order = Order.parse(hear())
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Semaphore(0)
    source = name == "source"
    path = order.source if source else order.copy(name)
    descriptor = os.open(path, os.O_RDONLY if source else os.O_RDWR | os.O_CREAT)
    if source:
        ready.release(order.size // PIECE + 1)
    settings = None
    if pki:
        at = Path(pki)
        settings = TlsSettings(ca=at / "ca.pem", cert=at / "node.pem", key=at / "node-key.pem")
    files = [(descriptor, order.size)]
    threading.Thread(target=serve, args=(listener, files, ready, settings), daemon=True).start()
    say(address=str(listener.getsockname()[1]))
    port = int(hear())
    os.posix_fallocate(descriptor, 0, order.size)  # a file's pages are part of what it costs
    sock = socket.create_connection(("127.0.0.1", port))
    if settings:
        sock = settings.context(server=False).wrap_socket(sock)
    block = memoryview(bytearray(BLOCK))
    for _, start, stop in pieces_of(files):
        piece = blake3()
        for at in range(start, stop, BLOCK):
            view = block[: stop - at]
            fill(sock, view)
            piece.update(view)
            os.pwrite(descriptor, view, at)
        piece.digest()
        ready.release()
    os.fdatasync(descriptor)
    say(finished=True)
    hear()


def pieces_of(files: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (descriptor, start, stop) of each piece of ``files``: (descriptor, size) each."""
    for descriptor, size in files:
        for start in range(0, size, PIECE):
            yield descriptor, start, min(size, start + PIECE)


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receive all of ``view``."""
    if not isinstance(sock, ssl.SSLSocket):
        if sock.recv_into(view, 0, socket.MSG_WAITALL) != len(view):
            raise RuntimeError("the source hung up")
        return
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if not got:
            raise RuntimeError("the source hung up")
        done += got


def serve(
    listener: socket.socket,
    files: Sequence[tuple[int, int]],
    ready: threading.Semaphore,
    settings: TlsSettings | None,
) -> None:
    """Send one caller each piece of ``files`` once ``ready`` counts it."""
    sock, _ = listener.accept()
    if settings:
        sock = settings.context(server=True).wrap_socket(sock, server_side=True)
    block = memoryview(bytearray(BLOCK // 2))
    for descriptor, start, stop in pieces_of(files):
        ready.acquire()
        at = start
        while at < stop:
            if settings is None:
                at += os.sendfile(sock.fileno(), descriptor, at, stop - at)
            else:
                got = os.preadv(descriptor, [block[: min(len(block), stop - at)]], at)
                sock.sendall(block[:got])
                at += got


if __name__ == "__main__":
    node(*sys.argv[1:])
