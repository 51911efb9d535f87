"""Mutual TLS on the peer port: TLS 1.3 only, with certificates that carry the worker id.

Both sides verify the other's certificate against the cluster's authority and compare its worker id
with the expected one: the server with the id in the greeting, the client with the id in its plan. A
valid certificate of another worker is refused. Certificates are issued in ``identity``.

Two threads must not use one TLS connection at once, so each call into it takes a lock, does not
block while it holds the lock, and waits outside. Files are read into a reused block and sent from
there: Python 3.11 offers no kernel TLS, so there is no ``sendfile``.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import one_certificate, read_other
from paceline.errors import AccessDenied, InvalidInput, PacelineError, PeerLost
from paceline.relay.transport.sockets import (
    IO_TIMEOUT_S,
    LEAST_BYTES,
    TAKES_NOTHING,
    Channel,
    broken,
    held_bytes,
)
from paceline.schemas import NAME, revoked_admission

WORKER_URI = "paceline://worker/"
ADMISSION_URI = "paceline://join/"  # the admission (join) that the certificate was issued for
SEND_BLOCK = 256 * 1024  # 64 KiB blocks cost 15 % more CPU, 512 KiB no less
_NAME = re.compile(NAME)
_LINGER_S = 0.5  # so that the peer reads an alert before the connection is reset
_SAME = "Set [security] peer_tls the same on every worker."
_ADMIN = "Issue this worker an identity of this cluster's authority."


def valid_name(worker_id: str) -> bool:
    """Return whether ``worker_id`` is valid in a certificate."""
    return bool(_NAME.fullmatch(worker_id))


def worker_host_name(worker_id: str) -> str:
    """Return the host name that represents ``worker_id`` where only host names are compared."""
    return f"{hashlib.sha256(worker_id.encode()).hexdigest()[:40]}.worker.paceline.internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Paths of PEM files: the cluster's authority, this worker's certificate and its key."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of the three files; the authority's certificate is encoded again,
        with the one that is trusted beside it while it is replaced.

        Raises InvalidInput with the file that cannot be read, or if ``ca`` is not one certificate.
        """
        found = []
        for path in (self.ca, self.cert, self.key):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise InvalidInput(
                    "the peer port's credentials cannot be read",
                    got=error.strerror,
                    where=path,
                    do=_ADMIN,
                ) from error
        return one_certificate(found[0], self.ca) + read_other(self.ca), found[1], found[2]

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return one side's SSL context; raises InvalidInput if the files are not usable."""
        authority = self.read()[0].decode()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a worker is identified by its id, wherever it listens
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # streams are long-lived: there is nothing to resume
        try:
            context.load_verify_locations(cadata=authority)
            context.load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            raise InvalidInput(
                "the peer port's credentials are not usable",
                got=error.reason or error,
                wanted="a certificate and its key, and the authority's certificate, as PEM",
                where=self.cert,
                do=_ADMIN,
            ) from error
        return context


def peer_ids(certificate_names: Iterable[str]) -> list[str]:
    return [
        name.removeprefix(WORKER_URI) for name in certificate_names if name.startswith(WORKER_URI)
    ]


def admission_of(certificate_names: Iterable[str]) -> str:
    """Return the revocation key of the admission in a certificate's alternative names, or ""."""
    found = (each for each in certificate_names if each.startswith(ADMISSION_URI))
    return next((revoked_admission(each.removeprefix(ADMISSION_URI)) for each in found), "")


class TlsChannel(Channel):
    """A TLS connection after its handshake; see Channel. ``peer_id`` is the peer's worker id."""

    def __init__(self, sock: ssl.SSLSocket, timeout_s: float) -> None:
        said: dict[str, Any] = dict(sock.getpeercert() or {})
        names = [value for kind, value in said.get("subjectAltName", ()) if kind == "URI"]
        ids = peer_ids(names)
        if len(ids) != 1:
            raise AccessDenied(
                "the peer's certificate names no worker",
                got=names,
                wanted=f"{WORKER_URI}ID",
                do=_ADMIN,
            )
        self.peer_id, self.admission = ids[0], admission_of(names)
        super().__init__(sock)
        self._sock = sock
        self.timeout_s = timeout_s
        self._lock = threading.Lock()  # held for one non-blocking call
        self._sending = threading.Lock()  # held for one frame: records of two frames must not mix
        self._block = memoryview(bytearray(SEND_BLOCK))
        self._filled = 0  # bytes of the block that wait for more
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        sock.setblocking(False)

    _sleeps_inside = True

    def _read(self, view: memoryview, whole: bool) -> int:
        done = 0
        while done < len(view):
            try:
                with self._lock:
                    got = self._sock.recv_into(view[done:])  # a record at most
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if done and not whole:
                    break
                if whole:
                    held = held_bytes(self._sock)
                    if wait_s := self._coalescer.wait_s(len(view) - done, held):
                        self._coalescer.sleep(wait_s)
                began_s = time.monotonic()
                if not self._wait(error, self.timeout_s):
                    break
                self._blocked_s = max(self._blocked_s, time.monotonic() - began_s)
                continue
            except OSError as error:
                if done:  # what came before it counts; the next read meets the error again
                    break
                raise refused(error) from error
            if got == 0:
                if done:
                    break
                raise PeerLost("the peer closed the connection")
            done += got
        return done

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with self._sending:
            while view:
                try:
                    with self._lock:
                        view = view[self._sock.send(view) :]
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    if not self._wait(error, self.timeout_s):
                        raise PeerLost(TAKES_NOTHING, got=f"{len(view)} bytes left") from None
                except OSError as error:
                    raise refused(error) from error

    def send_file(self, descriptor: int, offset: int, count: int, header: bytes, more: bool) -> int:
        """Read part of the file into the reused block, and send it once it is full."""
        block, start = self._block, self._filled + len(header)
        block[self._filled : start] = header
        try:
            got = os.preadv(descriptor, [block[start : start + count]], offset)
        except OSError as error:
            raise broken(error) from error
        self._filled = start + got
        if not more or got < count or self._filled + LEAST_BYTES > len(block):
            self.send(block[: self._filled])
            self._filled = 0
        return got

    def readable(self, wait_s: float) -> bool:
        with self._lock:
            if self._sock.pending():
                return True
        return super().readable(wait_s)

    def close(self) -> None:
        with self._lock:
            super().close()

    def _wait(self, why: ssl.SSLError, timeout_s: float) -> bool:
        poll = self._writable if isinstance(why, ssl.SSLWantWriteError) else self.readable_poll
        return bool(poll.poll(timeout_s * 1000))


def accept_tls(
    sock: socket.socket,
    context: ssl.SSLContext,
    timeout_s: float,
    on_wrapped: Callable[[ssl.SSLSocket], None] = lambda _made: None,
) -> TlsChannel:
    """Return the channel of an accepted socket; raises AccessDenied for a bad certificate.

    ``timeout_s`` applies to each step of the handshake. To bound the whole handshake, shut the
    socket that is passed to ``on_wrapped``.
    """
    sock.settimeout(timeout_s)
    made = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    on_wrapped(made)
    return _after_handshake(made, IO_TIMEOUT_S)


def _after_handshake(made: ssl.SSLSocket, timeout_s: float) -> TlsChannel:
    try:
        made.do_handshake()
        return TlsChannel(made, timeout_s)
    except OSError as error:
        if made.server_side:
            _linger(made)
        made.close()
        raise refused(error) from error
    except AccessDenied:
        made.close()
        raise


def connect_tls(
    sock: socket.socket, context: ssl.SSLContext, worker_id: str, timeout_s: float
) -> TlsChannel:
    """Return the channel to ``worker_id``; raises AccessDenied if the peer is not that worker."""
    made = context.wrap_socket(sock, do_handshake_on_connect=False)
    channel = _after_handshake(made, timeout_s)
    if channel.peer_id != worker_id:
        channel.close()
        raise wrong_identity(channel.peer_id, worker_id)
    return channel


def diagnose_refusal(
    address: str, tls: TlsSettings | None, worker_id: str, timeout_s: float
) -> AccessDenied | None:
    """Return the TLS reason why a gRPC port refused this worker, or None if TLS was not the reason.

    gRPC reports "Socket closed" whatever the reason, and its server sends a refused peer no reason;
    so this connects once more. A server that accepts sends the first bytes.
    """
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except OSError:
        return None
    with sock:
        try:
            if tls is None:
                sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                return None if sock.recv(1) == b"\0" else plain_refused("a plain connection")
            context = tls.context(server=False)
            context.set_alpn_protocols(["h2"])
            channel = connect_tls(sock, context, worker_id, timeout_s)
        except AccessDenied as error:
            return error
        except OSError:
            return plain_refused("a plain connection") if tls is None else None
        except PacelineError:
            return None
    try:
        channel.receive(memoryview(bytearray(1)), time.monotonic() + timeout_s)
    except PeerLost:
        return AccessDenied(
            "the peer refused this worker's certificate", got=_validity(tls.cert), do=_ADMIN
        )
    except AccessDenied as error:
        return error
    finally:
        channel.close()
    return None


def _validity(certificate: Path) -> str:
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    expired = " (it has expired)" if found.not_valid_after_utc < now else ""
    return f"one that is valid until {found.not_valid_after_utc:%Y-%m-%d}{expired}"


def plain_refused(got: str) -> AccessDenied:
    return AccessDenied(
        "this peer port speaks TLS only", got=got, wanted="mutual TLS 1.3", do=_SAME
    )


def wrong_identity(got: object, wanted: str) -> AccessDenied:
    """Return the error for a valid certificate of another worker."""
    return AccessDenied(
        "the peer's certificate is another worker's",
        got=got,
        wanted=wanted,
        do="Give each worker its own identity, and the plan its real address.",
    )


def refused(error: OSError) -> PeerLost | AccessDenied:
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDenied(
            "the peer's certificate is not acceptable", got=error.verify_message, do=_ADMIN
        )
    if isinstance(error, TimeoutError):
        return PeerLost("the peer went silent in the TLS handshake")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if "ALERT" in reason:
            return AccessDenied("the peer refused this worker's TLS", got=reason, do=_ADMIN)
        if reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "UNSUPPORTED_PROTOCOL"):
            return AccessDenied("the peer offers no mutual TLS 1.3", got=reason, do=_ADMIN)
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
            return AccessDenied(
                "the peer does not speak TLS",
                got=reason,
                wanted="TLS 1.3",
                do=_SAME,
            )
        if isinstance(error, ssl.SSLEOFError):
            return PeerLost("the peer closed the connection")
    return broken(error)


def _linger(sock: ssl.SSLSocket) -> None:
    """Let the peer read the TLS alert: unread bytes would turn the close into a reset."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        end_s = time.monotonic() + _LINGER_S
        sock.settimeout(_LINGER_S)
        while time.monotonic() < end_s and socket.socket.recv(sock, 4096):
            pass
