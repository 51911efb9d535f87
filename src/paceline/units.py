"""Sizes and speeds as people write them: ``500GB``, ``64MiB``, ``10Gbps``, ``100Mbit``, ``2GB/s``.

Decimal prefixes are powers of 1000, ``Ki``, ``Mi``, ``Gi`` powers of 1024. A speed with a capital B
is bytes, with a small b bits, as on disks and switches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from paceline.errors import InvalidInput
from paceline.text import short_digests

MOST_BYTES = 2**63 - 1
MOST_MBIT = 1e12  # limit of the parser; `plan` and `simulate` have lower ones

# Possessive: each character is matched once (without, 128 KB of digits would take minutes).
_NUMBER = re.compile(
    r"\s*+((?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)\s*+([A-Za-z/]*+)\s*+"
)
_PREFIX = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_BITS = re.compile(r"([kmgt]?)(?:bit|bits|bit/s|bps|b/s)?")
_BYTES = re.compile(r"([kKMGT]?i?)B(?:/s|ps)")


def size_bytes(text: str | int) -> int:
    """Return the size ``text`` in bytes; a number that is no text is bytes. Raises InvalidInput.

    A unit is demanded: "500" for 500 GB would be 500 bytes.
    """
    if isinstance(text, int):
        text = f"{text}B"
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower().removesuffix("b") if match and match[2] else "?"
    factor = {**_PREFIX, **_BINARY}.get(unit)
    size = float(match[1]) * factor if match and factor else -1.0
    if not 0 <= size <= MOST_BYTES:
        raise InvalidInput(
            "not a size", got=repr(text), wanted="a number with its unit: 500GB, 64MiB, 512B"
        )
    return round(size)


def link_mbit(text: str | float) -> float:
    """Return the speed ``text`` in Mbit/s; a number that is no text is Mbit/s. Raises InvalidInput.

    A unit is demanded: "10" for 10 Gbit/s would be a thousandth of it.
    """
    match = _NUMBER.fullmatch(text if isinstance(text, str) else f"{text}Mbit")
    if match and not 0 < float(match[1]) <= MOST_MBIT:
        match = None
    if match and (unit_of_bytes := _BYTES.fullmatch(match[2])):
        factor = {**_PREFIX, **_BINARY}.get(unit_of_bytes[1].lower())
        if factor is not None:
            return float(match[1]) * factor * 8 / 1e6
    bits = _BITS.fullmatch(match[2].lower()) if match and match[2] else None
    if match is None or bits is None:
        raise InvalidInput(
            "not a speed", got=repr(text), wanted="a number above 0 with its unit: 10Gbps, 100Mbit"
        )
    return float(match[1]) * _PREFIX[bits[1]] / 1e6


_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds(text: str) -> float:
    """Return a time such as 90s, 15m, 12h or 30d in seconds."""
    try:
        return float(text[:-1]) * _TIMES[text[-1:]]
    except (KeyError, ValueError) as error:
        wanted = "a number and s, m, h or d"
        raise InvalidInput("not a duration", got=repr(text), wanted=wanted) from error


def size(count: float) -> str:
    """Return a count of bytes with a decimal unit, such as 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"


def counted(count: int, what: str) -> str:
    """Return a count with its noun, such as "1 rank" or "2,000 ranks"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return seconds with a unit, such as 9.5 s or 1:30 min."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def moment(seconds: float) -> str:
    """Return a time in seconds since the Unix epoch as a date and time of day in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


_UNIT = re.compile(r"(?:^|_)(bytes_per_second|bytes_s|bytes|seconds|s|at)$")


def humane(name: str, value: object) -> str:
    """Return ``value`` as people read it, in the unit in which ``name`` ends (``bytes``,
    ``bytes_s``, ``seconds``, ``at``): other floats have four digits, digests their first 12."""
    if isinstance(value, Mapping):
        return described(value)
    if isinstance(value, list | tuple):
        return ", ".join(humane(name, each) for each in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return short_digests(value)
    match (found := _UNIT.search(name)) and found[1]:
        case "bytes":
            return size(value)
        case "bytes_s" | "bytes_per_second":
            return f"{size(value)}/s"
        case "seconds" | "s":
            return duration(value)
        case "at":
            return moment(value)
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def described(data: Mapping[str, object]) -> str:
    """Return the fields of an event on one line, each with its ``humane`` value; a unit is said
    with the value only."""
    pairs = [
        (_UNIT.sub("", name) if isinstance(value, int | float) else name, humane(name, value))
        for name, value in data.items()
        if value not in (None, "")
    ]
    return ", ".join(f"{name.replace('_', ' ')} {value}".strip() for name, value in pairs)
