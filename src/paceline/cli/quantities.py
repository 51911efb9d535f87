"""Sizes and speeds as people write them: ``500GB``, ``64MiB``, ``10Gbps``, ``100Mbit``, ``2GB/s``.

Decimal prefixes are powers of 1000, ``Ki``, ``Mi``, ``Gi`` powers of 1024; a plain number is bytes,
or Mbit/s. A speed with a capital B is bytes, with a small b bits, as on disks and switches.
Use as ``click.option("--link", **LINK)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline.errors import InvalidInput
from paceline.wire.base import COUNT_MAX

T = TypeVar("T")

# Possessive: each character is looked at once (plain, 128 KB of digits would take minutes).
_NUMBER = re.compile(
    r"\s*+((?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)\s*+([A-Za-z/]*+)\s*+"
)
MOST_MBIT = 1e12  # as a number; what is too fast to plan with is refused there
_PREFIX = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_BITS = re.compile(r"([kmgt]?)(?:bit|bits|bit/s|bps|b/s)?")
_BYTES = re.compile(r"([kKMGT]?i?)B(?:/s|ps)")


def size_bytes(text: str) -> int:
    """Return the bytes that ``text`` says; raises InvalidInput."""
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower().removesuffix("b") if match else "?"
    factor = {**_PREFIX, **_BINARY}.get(unit)
    size = float(match[1]) * factor if match and factor else -1.0
    if not 0 <= size <= COUNT_MAX:
        raise InvalidInput("not a size", got=repr(text), wanted="500GB, 64MiB or a number of bytes")
    return round(size)


def link_mbit(text: str) -> float:
    """Return the Mbit/s that ``text`` says; raises InvalidInput."""
    match = _NUMBER.fullmatch(text)
    if match and not 0 < float(match[1]) <= MOST_MBIT:
        match = None
    if match and (unit_of_bytes := _BYTES.fullmatch(match[2])):
        factor = {**_PREFIX, **_BINARY}.get(unit_of_bytes[1].lower())
        if factor is not None:
            return float(match[1]) * factor * 8 / 1e6
    unit = match[2].lower() if match else "?"
    bits = _BITS.fullmatch(unit)
    if match is None or bits is None:
        raise InvalidInput(
            "not a speed", got=repr(text), wanted="10Gbps, 100Mbit or a number of Mbit/s above 0"
        )
    return float(match[1]) * (_PREFIX[bits[1]] / 1e6 if unit else 1.0)


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T | None]:
    """Return a callback for click's options: ``parse`` of what is given, None where nothing is."""

    def callback(_: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(value)
        except InvalidInput as error:
            option = parameter.opts[0]
            raise InvalidInput(
                error.what, got=error.got, wanted=error.wanted, where=option
            ) from error

    return callback


SIZE: dict[str, Any] = {"metavar": "SIZE", "callback": parsed(size_bytes)}
LINK: dict[str, Any] = {"metavar": "SPEED", "callback": parsed(link_mbit)}


_FLEET = (
    click.option("--link", **LINK, required=True, help="Each worker's link, e.g. 10Gbps."),
    click.option("--external", **LINK, help="The link to the source (default: as fast as --link)."),
    click.option(
        "--racks", type=int, default=0, help="Racks of equal size (default: 32 workers each)."
    ),
    click.option(
        "--oversubscription",
        type=float,
        default=1.0,
        show_default=True,
        help="A rack's links together / its uplink.",
    ),
    click.option(
        "--disk", **LINK, help="What a worker's disk writes, e.g. 2GB/s (default: no bound)."
    ),
    click.option("--piece", **SIZE, help="Piece size (default: as publish would choose)."),
    click.option("--chunk", **SIZE, help="Chunk size (default: 0.8 s of the link)."),
)


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``command`` with the options of `plan` and `simulate` that describe a fleet."""
    for option in reversed(_FLEET):
        command = option(command)
    return command
