"""Calls that are repeated while no coordinator answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import TemporaryError

POLL_S = 1.0
AWAY_S = 60.0  # how long no coordinator may answer while a flow or a deployment is followed

Answer = TypeVar("Answer")
OnLine = Callable[[str], None]


def drop(_line: str) -> None:
    """Drop a line."""


def retry(call: Callable[[], Answer], away_s: float, on_notice: OnLine = drop) -> Answer:
    """Return what ``call`` returns, repeated while a server is away for at most ``away_s``.

    ``on_notice`` receives why it is repeated, each reason once.
    """
    until_s, said = time.monotonic() + away_s, ""
    while True:
        try:
            return call()
        except TemporaryError as error:
            if time.monotonic() > until_s:
                raise
            if said != error.one_line():  # once, not every second
                said = error.one_line()
                on_notice(f"trying again: {said}")
            time.sleep(POLL_S)
