"""Which address other nodes are told: one that they reach, whatever the peer port listens on."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from paceline.errors import InvalidInput

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
