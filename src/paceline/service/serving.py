"""One port, one process: bind, serve, log to a file, stop on SIGTERM with status 0.

It knows sockets, signals and uvicorn; the app it serves could be any.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.errors import PortInUse
from paceline.service.connections import Prompt
from paceline.system.files import PRIVATE_DIRECTORY, ensure_private, make_directories
from paceline.text import OneLine

log = logging.getLogger(__name__)

LOG_BYTES = 10 * 1024 * 1024
BACKLOG = 2048
GRACE_S = 5  # for requests in progress when the process is asked to stop


def serve_app(
    make_app: Callable[[str], FastAPI],
    *,
    log_file: Path,
    host: str,
    port: int,
    ready_fd: int | None,
    tls: ssl.SSLContext | None = None,
    end_waits: Callable[[FastAPI], None],
) -> int:
    """Serve the app that ``make_app`` returns until SIGTERM or SIGINT; return the exit status.

    Over TLS where ``tls`` is given. Whether ``host`` may be served plain is the caller's decision.
    """
    _log_to(log_file)
    listener = _bind(host, port)
    with listener:
        address = listener.getsockname()
        shown = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
        url = f"{'https' if tls else 'http'}://{shown}:{address[1]}"
        app = make_app(url)
        config = uvicorn.Config(
            app,
            http=Prompt,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,  # longer than any beat, so that agents keep their connection
            h11_max_incomplete_event_size=64 * 1024,
            backlog=BACKLOG,
            proxy_headers=False,  # who calls is what the socket says, whatever a header claims
            server_header=False,
        )
        config.load()
        config.ssl = tls
        server = _Server(
            config,
            end_waits=lambda: end_waits(app),
            announce=lambda: _announce(ready_fd, url),
        )
        server.run(sockets=[listener])
    log.info("stopped %s", url)
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Announces once it accepts connections, ends long polls early, and keeps signals to itself.

    The stock server raises the signal again when it is done, so that a clean stop would look like a
    death by SIGTERM to whoever supervises it.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        end_waits: Callable[[], None],
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._end_waits, self._announce = end_waits, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        log.info("asked to stop by %s", signal.Signals(sig).name)
        self._end_waits()
        self.force_exit = self.should_exit
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without
    # this each answer on a kept-alive connection took 44 ms instead of 2 (delayed ACK).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Listening at once, so that a second coordinator fails here and not at its first request.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortInUse(
                "the coordinator's port cannot be had",
                got=f"port {port}: {error.strerror}",
                wanted="a free port",
                where=host,
                do="Stop what listens there (`ss -ltnp`), or set services.coordinator_port to 0.",
            ) from error
        raise
    return listener


def _announce(ready_fd: int | None, url: str) -> None:
    log.info("listening %s", url)
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w", encoding="utf-8") as ready:
            ready.write(json.dumps({"url": url}) + "\n")


class _PrivateLog(RotatingFileHandler):
    """A rotating log that only its owner can read, whatever the umask."""

    def _open(self) -> TextIOWrapper:
        ensure_private(Path(self.baseFilename))
        return super()._open()


def _log_to(path: Path) -> None:
    """Have this process's log end in a file; standard output stays empty."""
    make_directories(path.parent, PRIVATE_DIRECTORY)
    handler = _PrivateLog(path, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8")
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
