"""The least tracker that lets BitTorrent clients find each other: HTTP announces, compact peers.

    python tracker.py ADDRESS PORT

Keeps one swarm in memory, whatever its hash, and answers every announce with all other peers.
"""

from __future__ import annotations

import socket
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

INTERVAL_S = 5


class _Announce(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    peers: dict[tuple[str, int], bool] = {}

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, encoding="latin-1")
        me = (self.client_address[0], int(query["port"][0]))
        if query.get("event") == ["stopped"]:
            self.peers.pop(me, None)
        else:
            self.peers[me] = True
        others = b"".join(
            socket.inet_aton(address) + struct.pack(">H", port)
            for address, port in list(self.peers)
            if (address, port) != me
        )
        body = b"d8:intervali%de12:min intervali%de5:peers%d:%be" % (
            INTERVAL_S,
            INTERVAL_S,
            len(others),
            others,
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), _Announce).serve_forever()
