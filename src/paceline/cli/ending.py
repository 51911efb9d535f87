"""How a command that moves bytes ends early: SIGTERM and SIGHUP as Ctrl-C, so that what is open is
closed and what is verified is kept; and what the relay logs stays out of a terminal.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.text import OneLine

LAST = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """This process was told to end."""


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise ``Terminated``; one that is ignored stays ignored."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in LAST:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_only_defects() -> None:
    """Log nothing but tracebacks: what else there is to say, the command's result or error says."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    handler.addFilter(lambda record: bool(record.exc_info))
    logging.getLogger("paceline").addHandler(handler)
