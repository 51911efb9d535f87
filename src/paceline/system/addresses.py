"""Recognise loopback addresses."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is loopback; of names, only ``localhost`` is accepted."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
