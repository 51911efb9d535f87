"""A TCP proxy on loopback that can hold a server's answers back, and cut connections off."""

from __future__ import annotations

import contextlib
import socket
import threading


class HoldUp:
    """Stands before one server; nothing is held back to begin with."""

    def __init__(self, port: int) -> None:
        """``port``: of the server, on loopback."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._may_answer = threading.Event()
        self.free()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def free(self) -> None:
        """Let everything through, what was held back first."""
        self._may_answer.set()

    def hold_answers(self) -> None:
        """Keep what the server says until ``free``."""
        self._may_answer.clear()

    def cut(self) -> None:
        """Close every connection; what was held back is lost."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for one in [each for pair in pairs for each in pair]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        """Let go of everything."""
        self._listener.close()
        self.free()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            for source, sink, gate in (
                (client, server, _OPEN),
                (server, client, self._may_answer),
            ):
                threading.Thread(target=_pump, args=(source, sink, gate), daemon=True).start()


_OPEN = threading.Event()
_OPEN.set()


def _pump(source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            gate.wait()
            sink.sendall(data)
    gate.wait()
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
