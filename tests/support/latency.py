"""A TCP proxy on loopback that makes a server look far away: each request arrives later."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

CHUNK = 256 * 1024
DEPTH = 1024  # chunks on the way; a sender waits when so many are


class FarAway:
    """Stands before one server; what clients send reaches it ``latency_s`` later.

    Only the time is added, no limit on bytes a second: chunks travel behind each other. So a
    request and its answer take ``latency_s`` more than they would, and so does a new connection.
    """

    def __init__(self, port: int, latency_s: float) -> None:
        """``port``: of the server, on loopback."""
        self.latency_s = latency_s
        self.connections = 0
        self.requests = 0  # chunks that clients sent, each of them late
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, name="far-accept", daemon=True).start()

    def close(self) -> None:
        """Cut every connection and take no more."""
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> FarAway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            way: queue.Queue[tuple[float, bytes]] = queue.Queue(DEPTH)
            # the first chunk also pays for the connection: a handshake is one way and back
            first_due = time.monotonic() + self.latency_s
            for target, arguments in (
                (self._take, (client, way, first_due)),
                (self._deliver, (way, server)),
                (self._pump, (server, client)),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()

    def _take(
        self, client: socket.socket, way: queue.Queue[tuple[float, bytes]], first_due: float
    ) -> None:
        data = b"-"
        while data:
            try:
                data = client.recv(CHUNK)
            except OSError:
                data = b""
            self.requests += 1 if data else 0
            way.put((max(time.monotonic(), first_due) + self.latency_s, data))

    def _deliver(self, way: queue.Queue[tuple[float, bytes]], server: socket.socket) -> None:
        while True:
            due, data = way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    server.shutdown(socket.SHUT_WR)
                    return
                server.sendall(data)
            except OSError:
                return

    def _pump(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
