"""How fast one TCP stream goes between two hosts of a testbed.

python probe.py receive PORT          → one JSON line: bytes, seconds, bytes_s
python probe.py send ADDRESS PORT BYTES
"""

from __future__ import annotations

import json
import socket
import sys
import time

BLOCK = 256 * 1024
PATIENCE_S = 10.0


def receive(port: int) -> None:
    """Take one stream to its end and print how fast it was."""
    listener = socket.create_server(("0.0.0.0", port))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sock, _ = listener.accept()
    sock.settimeout(PATIENCE_S)
    block = memoryview(bytearray(BLOCK))
    start_s, total, ended = time.monotonic(), 0, "closed"
    try:
        while got := sock.recv_into(block):
            total += got
    except TimeoutError:
        ended = "silent"
    seconds = time.monotonic() - start_s
    said = {"bytes": total, "seconds": seconds, "bytes_s": total / seconds, "ended": ended}
    sys.stdout.write(json.dumps(said) + "\n")


def send(address: str, port: int, count: int) -> None:
    """Send ``count`` bytes."""
    with socket.create_connection((address, port), timeout=PATIENCE_S) as sock:
        block = bytes(BLOCK)
        while count > 0:
            count -= sock.send(block[: min(BLOCK, count)])
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
