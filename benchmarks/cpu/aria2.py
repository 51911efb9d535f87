"""aria2: every receiver fetches from one HTTP server and checks the file's SHA-256.

The server costs as little as Python can (sendfile).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.cpu.stage import Nodes, Order, delivery, hear, say

# The cheapest of a sweep on loopback.
TUNED = ("--split=4", "--max-connection-per-server=4", "--file-allocation=none")


def conduct(order: Order, *options: str) -> None:
    """Run the server and the receivers; ``options`` replace TUNED."""
    with Nodes() as nodes:
        server = nodes.start("benchmarks.cpu.aria2")
        nodes.tell(server, order.text())
        port = nodes.hear(server)["port"]
        copies = [order.copy(f"node-{number}") for number in range(order.receivers)]
        with delivery(copies, order.sha256):
            fetching = [
                subprocess.Popen(
                    [
                        "aria2c",
                        "--quiet=true",
                        "--no-conf=true",
                        f"--dir={copy.parent}",
                        f"--checksum=sha-256={order.sha256}",
                        *(options or TUNED),
                        f"http://127.0.0.1:{port}/{copy.name}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                )
                for copy in copies
            ]
            for each in fetching:
                if each.wait():
                    raise RuntimeError(f"aria2c ended with {each.returncode}")


def serve() -> None:
    """Be the server: one file, whole or in ranges."""
    order = Order.parse(hear())
    descriptor = os.open(order.source, os.O_RDONLY)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            first, last = 0, order.size - 1
            if asked := self.headers.get("Range"):
                low, _, high = asked.removeprefix("bytes=").partition("-")
                first, last = int(low), int(high or last)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{order.size}")
            self.end_headers()
            self.wfile.flush()
            while first <= last:
                first += os.sendfile(self.connection.fileno(), descriptor, first, last + 1 - first)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(port=server.server_address[1])
    hear()


if __name__ == "__main__":
    serve()
