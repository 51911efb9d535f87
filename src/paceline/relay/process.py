"""The agent as a process: stop signals, open-file limit, settings, and its advertised address."""

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
from paceline.schemas import LABEL_KEY, LABEL_VALUE, MOST_LABELS, NAME, PLACES, Inventory

PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


class SignalEvent(threading.Event):
    """An Event that a signal handler may set while any thread waits for it, the interrupted one
    too. It stays set.

    A ``threading.Event`` has a lock that ``wait`` holds for moments: a handler that runs in such a
    moment on the same thread waits for that lock for ever. This one is a flag and a pipe that is
    never read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Release all waiting threads, and all later ones."""
        if not self._is_set:
            self._is_set = True
            os.write(self._write, b"!")

    def clear(self) -> None:
        """Raise RuntimeError: a stop request is never cancelled."""
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
    """Waits until the process should end: SIGTERM, SIGINT or, on request, the death of its parent.
    Create it in the main thread.

    The kernel sends the parent-death signal when the *thread* that started us ends, even while its
    process continues; so the signal only triggers a check of the parent's process id, which
    decides.
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
        """Request the end of the process, as a signal would."""
        self._event.set()

    def _orphaned(self) -> bool:
        return bool(self._parent) and os.getppid() != self._parent

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()

    def _look(self, _number: int, _frame: FrameType | None) -> None:
        if self._orphaned():
            self._event.set()


# The limit of open files: a process keeps all files of an arriving model open.
#
# Shells and services begin with a soft limit of 1,024, which a model of a thousand files exceeds;
# the hard limit is what the system really allows.

EXTRA_FILES_PER_WORKER = 16  # lock, piece log, counts, port, connections
PROCESS_FILES = 64  # for the process itself


def raise_file_limit() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_file_limit(manifest: Manifest, workers: int) -> None:
    """Raise the soft limit for ``workers`` here; raises InvalidInput beyond the hard one."""
    wanted = workers * (len(manifest.files) + EXTRA_FILES_PER_WORKER) + PROCESS_FILES
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
    raise_file_limit()


# An agent's settings, validated before anything is created.
#
# The bounds are those of the registration: a value that a coordinator would refuse ends the agent
# at once with the name of the option, and no directory with an invalid name is made.

LABEL_MAX = 255
LINK_MBIT_RANGE = (1e-3, 1e9)  # the rates that a plan accepts
MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The settings of one agent; raises InvalidInput."""

    state_dir: Path
    worker_id: str
    host: str = ""  # labels: where the node is
    rack: str = ""
    zone: str = ""
    labels: tuple[str, ...] = ()  # others, each "key=value"
    findings: tuple[str, ...] = ()  # of `paceline doctor`: what needs something here
    inventory: Inventory | None = None
    link_mbit: float | None = None  # the rate that plans expect; None: the profile's
    limit_mbit: float | None = None  # each way; None: link_mbit if [cluster] paced; 0: none
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # the host that peers connect to; "": the listen host, or detected
    die_with_parent: bool = False
    warm: bool = False  # import the S3 client at the start, before the first read

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
        _ = self.other_labels  # raises InvalidInput
        least, most = LINK_MBIT_RANGE
        for option, mbit in (("link-mbit", self.link_mbit), ("limit-mbit", self.limit_mbit)):
            unlimited = option == "limit-mbit" and mbit == 0
            if mbit is not None and not (unlimited or least <= mbit <= most):
                wanted = f"{least:g} to {most:g} Mbit/s"
                raise InvalidInput("not a rate", got=mbit, wanted=wanted, where=f"--{option}")

    @property
    def other_labels(self) -> dict[str, str]:
        """Return ``labels`` by key; raises InvalidInput."""
        found: dict[str, str] = {}
        for each in self.labels:
            key, equals, value = each.partition("=")
            good = re.fullmatch(LABEL_KEY, key) and re.fullmatch(LABEL_VALUE, value)
            if not (equals and good) or key in found or key in PLACES:
                raise InvalidInput(
                    "not a label",
                    got=repr(each)[:200],
                    wanted="key=value, each key once, of letters, digits, '.', '_', '-', '/', and "
                    f"none of {', '.join(PLACES)}, which are options of their own",
                    where="--label",
                )
            found[key] = value
        if len(found) > MOST_LABELS:
            got, wanted = f"{len(found)}", f"at most {MOST_LABELS}"
            raise InvalidInput("too many labels", got=got, wanted=wanted, where="--label")
        return found


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``listen``; raises InvalidInput."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        wanted = f"host:port, a port up to {MAX_PORT} (0: a free one)"
        raise InvalidInput("bad listen address", got=listen, wanted=wanted, where="--listen")
    return host, int(port)


# The advertised address: one that other nodes reach, whatever the peer port listens on.

_ROUTE_PROBE_PORT = 9  # nothing is sent: connecting a datagram socket only selects the route


def advertised_address(listening: str, wanted: str, coordinator_urls: Sequence[str]) -> str:
    """Return ``host:port`` for the peer port that listens at ``listening`` (``host:port``).

    ``wanted`` is a configured host, or "". Without it: the address listened on, or, where that is
    every address of the machine, the one that the route to the coordinator uses. Raises
    InvalidInput where there is none that other nodes could reach.
    """
    host, _, port = listening.rpartition(":")
    chosen = wanted.strip("[]") or host.strip("[]")
    if not _is_unspecified(chosen):
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
        if (found := _local_address_for(url, family)) is not None:
            return _joined(found, port)
    raise InvalidInput(
        "an agent that listens on every address has to say which one others reach it at",
        got=f"{listening}, and no way to {', '.join(filter(None, coordinator_urls)) or 'anybody'}",
        wanted="an address of this machine",
        where="--listen",
        do="Add --advertise HOST, or listen on one address.",
    )


def _local_address_for(url: str, family: socket.AddressFamily) -> str | None:
    """Return this machine's address on the route to ``url``, or None without a route."""
    host = urlsplit(url).hostname
    if not host:
        return None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((host, _ROUTE_PROBE_PORT))
            found = str(sock.getsockname()[0])
    except OSError:
        return None
    return None if _is_unspecified(found) else found


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
