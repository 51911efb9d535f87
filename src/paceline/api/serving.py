"""Run an ASGI app with uvicorn: bind, TLS, log to a file, stop on SIGTERM with status 0.

It handles sockets, signals and TLS settings and does not depend on the app's content.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.api.limits import LOOPBACK_NAMES, HttpProtocol
from paceline.config import Runtime
from paceline.errors import InvalidProfile, PortInUse, StorageFailed
from paceline.relay.transport import ensure_authority, issue_server
from paceline.system import PRIVATE_DIRECTORY, ensure_private, is_loopback, make_directories
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
    end_long_polls: Callable[[FastAPI], None],
) -> int:
    """Serve the app that ``make_app`` returns until SIGTERM or SIGINT; return the exit status.

    ``tls`` None serves plain HTTP; ``port_protection`` decides whether ``host`` allows that.
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
            http=HttpProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,  # above any heartbeat interval: connections stay open
            h11_max_incomplete_event_size=64 * 1024,
            backlog=BACKLOG,
            proxy_headers=False,  # the client address is the socket's, not a header's
            server_header=False,
        )
        config.load()
        config.ssl = tls
        server = _Server(
            config,
            end_long_polls=lambda: end_long_polls(app),
            announce=lambda: _announce(ready_fd, url),
        )
        server.run(sockets=[listener])
    log.info("stopped %s", url)
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn server that announces readiness, ends long polls early and exits with status 0.

    uvicorn's own server raises the signal again after a clean stop, which looks to a supervisor
    like a death by SIGTERM.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        end_long_polls: Callable[[], None],
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._end_waits, self._announce = end_long_polls, announce

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
    # IPPROTO_TCP is explicit because asyncio disables Nagle's algorithm only then: without it each
    # answer on a kept-alive connection took 44 ms instead of 2 (delayed ACK).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Listen at once, so that a second coordinator fails here and not at its first request.
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
    """A rotating log that only its owner can read, independent of the umask."""

    def _open(self) -> TextIOWrapper:
        ensure_private(Path(self.baseFilename))
        return super()._open()


def _log_to(path: Path) -> None:
    """Send this process's log to a file; standard output stays empty."""
    make_directories(path.parent, PRIVATE_DIRECTORY)
    handler = _PrivateLog(path, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8")
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


# Protection of the coordinator's port: loopback only, or TLS with a certificate for its names.
# Nothing listens beyond loopback without TLS, unless the profile sets "plaintext-anywhere".

SERVER_DAYS = 825.0  # validity; each start issues a new certificate
SERVER_DIRECTORY = "tls/coordinator"


@dataclass(frozen=True, slots=True)
class PortProtection:
    """TLS context of the port (None: plain HTTP) and the allowed Host names besides loopback's."""

    tls: ssl.SSLContext | None
    names: tuple[str, ...]


def port_protection(runtime: Runtime, host: str) -> PortProtection:
    """Return the TLS context and host names for serving on ``host``.

    Raises InvalidProfile that lists every missing setting, before anything listens.
    """
    _require_settings(runtime, host)
    security = runtime.profile.security
    names = allowed_hosts(runtime, host)
    if security.rest_tls in ("off", "plaintext-anywhere"):
        return PortProtection(None, names)
    if security.rest_tls == "files":
        cert, key = (runtime.state_dir / each for each in (security.rest_cert, security.rest_key))
    else:
        authority = ensure_authority(runtime.state_dir / security.authority)
        directory = runtime.state_dir / SERVER_DIRECTORY
        hosts = (*LOOPBACK_NAMES, *names)
        try:
            cert, key = issue_server(authority, hosts, directory, valid_days=SERVER_DAYS)
        except OSError as error:
            raise StorageFailed(
                "the certificate of this port cannot be written",
                got=error.strerror,
                where=directory,
                do='Make it writable, or set [security] rest_tls = "files".',
            ) from error
    return PortProtection(_context(cert, key), names)


def allowed_hosts(runtime: Runtime, host: str) -> tuple[str, ...]:
    """Return the names, besides loopback's, that the Host header may carry."""
    own = () if not host or _is_wildcard(host) else (host,)
    return (*own, *runtime.profile.security.rest_hosts)


def _require_settings(runtime: Runtime, host: str) -> None:
    security = runtime.profile.security
    beyond = not is_loopback(host)
    missing = []
    if not runtime.secrets.coordinator_token:
        missing.append("a coordinator_token in secrets.json (`paceline up` makes one)")
    if beyond and security.rest_tls == "off":
        missing.append(
            '[security] rest_tls = "installation" (or "files" with rest_cert and rest_key)'
        )
    if beyond and (not host or _is_wildcard(host)) and not security.rest_hosts:
        missing.append('[security] rest_hosts = ["the names and addresses callers use"]')
    if security.rest_tls == "files":
        missing += [
            f'[security] {key} = "FILE.pem"'
            for key in ("rest_cert", "rest_key")
            if not getattr(security, key)
        ]
    if missing:
        raise InvalidProfile(
            "the coordinator may not listen there without authentication and TLS"
            if beyond
            else "the coordinator's port is not protected as the profile says",
            got=f'host {host or "(any)"}, [security] rest_tls = "{security.rest_tls}"',
            wanted="; ".join(missing),
            where=f"profile {runtime.profile.name}",
            do="Add what is wanted; or, where every machine of that network may read tokens, set "
            '[security] rest_tls = "plaintext-anywhere".',
        )


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidProfile(
            "the coordinator's certificate cannot be used",
            got=error,
            wanted="a certificate and its key, as PEM",
            where=f"{cert}, {key}",
            do="Correct [security] rest_cert and rest_key.",
        ) from error
    return context


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
