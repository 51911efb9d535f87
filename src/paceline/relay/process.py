"""When a process should end: SIGTERM, SIGINT, or the death of the process that started it."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from paceline.errors import InvalidInput
from paceline.manifest import Manifest
from paceline.schemas.base import NAME

PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


class SignalEvent(threading.Event):
    """An Event that a signal handler may set while any thread waits for it, the interrupted one
    too. It stays set.

    A ``threading.Event`` has a lock that ``wait`` holds for moments: a handler that comes in one of
    them, on the same thread, waits for that lock for ever. Here it is a flag and a pipe that nobody
    empties.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Let everybody go who waits, now or later."""
        if not self._is_set:
            self._is_set = True
            os.write(self._write, b"!")

    def clear(self) -> None:
        """Raise: whoever asked to stop is not to be forgotten."""
        raise RuntimeError("a signal cannot be taken back")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds and return whether it is set."""
        if not self._is_set:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        return self._is_set

    def __del__(self) -> None:
        for descriptor in (self._read, self._write):
            os.close(descriptor)


class StopSignal:
    """Waits until the process should end. Make it in the main thread.

    The kernel's parent-death signal comes when the *thread* that started us ends, even while its
    process lives on; so it only makes us look, and who decides is the parent's process id.
    """

    def __init__(self, *, die_with_parent: bool = False) -> None:
        self._event = SignalEvent()
        self._parent = os.getppid() if die_with_parent else 0
        signal.signal(signal.SIGTERM, self._asked)
        signal.signal(signal.SIGINT, self._asked)
        if die_with_parent:
            signal.signal(signal.SIGUSR1, self._look)
            if sys.platform == "linux":
                ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)

    def wait(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` and return whether the process should end."""
        end = time.monotonic() + wait_s
        while not self._event.is_set():
            if self._orphaned():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._event.wait(min(left, PARENT_POLL_S))
        return True

    def set(self) -> None:
        """End, as a signal would have it."""
        self._event.set()

    def _orphaned(self) -> bool:
        return bool(self._parent) and os.getppid() != self._parent

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()

    def _look(self, _number: int, _frame: FrameType | None) -> None:
        if self._orphaned():
            self._event.set()


# How many files this process may have open: every file of a model that arrives is.
#
# Shells and services begin with a soft limit of 1,024, which a model of a thousand files passes;
# the hard one is what the system really allows.

BESIDE = 16  # of a worker, beside its files: lock, marks, counts, port, connections
OURS = 64  # of the process


def allow_all() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(manifest: Manifest, workers: int) -> None:
    """Make room for ``workers`` in this process; raises InvalidInput where the system has none."""
    wanted = workers * (len(manifest.files) + BESIDE) + OURS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted <= soft:
        return
    if wanted > hard:
        raise InvalidInput(
            "too many files would be open in one process",
            got=f"{len(manifest.files)} files on each of {workers} workers: about {wanted}",
            wanted=f"at most {hard}",
            do="Raise the hard limit (ulimit -Hn), or ask for fewer workers.",
        )
    allow_all()


# An agent's settings, refused before anything is made with them.
#
# Their bounds are the registration's: what a coordinator would not take ends the agent at once,
# with the option that was wrong, and no directory of a name that no path may hold.

LABEL_MAX = 255
LINK_MBIT = (1e-3, 1e9)  # what plans can be made with
MOST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Who this agent is and where it works; raises InvalidInput."""

    state_dir: Path
    worker_id: str
    host: str = ""  # labels: where the node stands
    rack: str = ""
    zone: str = ""
    link_mbit: float | None = None  # what plans count on; None: the profile's
    limit_mbit: float | None = None  # of each direction; None: the link's if [cluster] paced; 0: no
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # the host that others are told; "": the one listened on, or found out
    die_with_parent: bool = False
    warm: bool = False  # import the S3 client before somebody waits for it

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.worker_id):
            got = repr(self.worker_id)[:200]
            raise InvalidInput("not a worker's name", got=got, wanted=NAME, where="--worker-id")
        for label in ("host", "rack", "zone"):
            length = len(getattr(self, label))
            if length > LABEL_MAX:
                got, wanted = f"{length} characters", f"at most {LABEL_MAX}"
                raise InvalidInput(
                    "a label is too long", got=got, wanted=wanted, where=f"--{label}"
                )
        least, most = LINK_MBIT
        for option, mbit in (("link-mbit", self.link_mbit), ("limit-mbit", self.limit_mbit)):
            unlimited = option == "limit-mbit" and mbit == 0
            if mbit is not None and not (unlimited or least <= mbit <= most):
                wanted = f"{least:g} to {most:g} Mbit/s"
                raise InvalidInput("not a rate", got=mbit, wanted=wanted, where=f"--{option}")


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``listen``; raises InvalidInput."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        wanted = f"host:port, a port up to {MOST_PORT} (0: a free one)"
        raise InvalidInput("bad listen address", got=listen, wanted=wanted, where="--listen")
    return host, int(port)


# Which address other nodes are told: one that they reach, whatever the peer port listens on.

_ANYWHERE = 9  # a port; nothing is sent there: connecting a datagram socket only asks for the route


def advertised(listening: str, wanted: str, coordinator_urls: Sequence[str]) -> str:
    """Return ``host:port`` for the peer port that listens at ``listening`` (``host:port``).

    ``wanted`` is a host that somebody chose, or "". Without it: the address listened on, or, where
    that is every address of the machine, the one that the way to the coordinator uses. Raises
    InvalidInput where there is none that others could reach.
    """
    host, _, port = listening.rpartition(":")
    chosen = wanted.strip("[]") or host.strip("[]")
    if not _is_everywhere(chosen):
        return _joined(chosen, port)
    if wanted:
        raise InvalidInput(
            "this address cannot be advertised",
            got=wanted,
            wanted="an address or a name of this machine that other nodes reach",
            where="--advertise",
        )
    family = socket.AF_INET6 if ":" in chosen else socket.AF_INET
    for url in coordinator_urls:
        if (found := _way_to(url, family)) is not None:
            return _joined(found, port)
    raise InvalidInput(
        "an agent that listens on every address has to say which one others reach it at",
        got=f"{listening}, and no way to {', '.join(filter(None, coordinator_urls)) or 'anybody'}",
        wanted="an address of this machine",
        where="--listen",
        do="Add --advertise HOST, or listen on one address.",
    )


def _way_to(url: str, family: socket.AddressFamily) -> str | None:
    """Return this machine's address on the way to ``url``, or None where there is no way."""
    host = urlsplit(url).hostname
    if not host:
        return None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((host, _ANYWHERE))
            found = str(sock.getsockname()[0])
    except OSError:
        return None
    return None if _is_everywhere(found) else found


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
