"""A node of a bare chain: fetches files from the node before it and passes each piece on.

Reads its order (JSON), "go" and "end" from standard input; says {"ready"}, {"finished_at"} and
{"ended"}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from blake3 import blake3

sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.cpu.floor import PIECE, fill, pieces_of, serve  # noqa: E402
from benchmarks.cpu.stage import BLOCK, say  # noqa: E402
from paceline.relay.transport import TlsSettings  # noqa: E402

PORT = 6900


def main() -> None:
    """Take part."""
    order = json.loads(sys.stdin.readline())
    source, settings = order["from"] is None, None
    if order["pki"]:
        pki = Path(order["pki"])
        settings = TlsSettings(ca=pki / "ca.pem", cert=pki / "node.pem", key=pki / "node-key.pem")
    files, ready = [], threading.Semaphore(0)
    for path, size in order["files"]:
        flags = os.O_RDONLY if source else os.O_RDWR | os.O_CREAT
        files.append((os.open(Path(order["copy"], path), flags, 0o644), size))
        if source:
            ready.release(size // PIECE + 1)
    listener = socket.create_server((order["address"], PORT))
    threading.Thread(target=serve, args=(listener, files, ready, settings), daemon=True).start()
    say(ready=True)
    if source:
        threading.Event().wait()
    sys.stdin.readline()
    for descriptor, size in files:
        os.posix_fallocate(descriptor, 0, size)
    sock = socket.create_connection((order["from"], PORT))
    if settings:
        sock = settings.context(server=False).wrap_socket(sock)
    block = memoryview(bytearray(BLOCK))
    for descriptor, start, stop in pieces_of(files):
        piece = blake3()
        for at in range(start, stop, BLOCK):
            view = block[: stop - at]
            fill(sock, view)
            piece.update(view)
            os.pwrite(descriptor, view, at)
        piece.digest()
        ready.release()
    for descriptor, _ in files:
        os.fdatasync(descriptor)
    say(finished_at=time.time())
    sys.stdin.readline()  # what is still to be sent is sent meanwhile
    say(ended=True)


if __name__ == "__main__":
    main()
