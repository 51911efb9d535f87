"""Threads that work on one publish: the first error ends all of them, and so does whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from paceline.errors import Cancelled

T = TypeVar("T")


def results(
    pool: ThreadPoolExecutor, running: Sequence[Future[T]], stopping: threading.Event
) -> list[T]:
    """Return what each of ``running`` gave, or raise the first error as soon as there is one.

    Then ``stopping`` is set, and they have ended; they raise Cancelled where somebody else set it.
    """
    try:
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        errors = [error for each in ended if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, Cancelled)):
            raise error
    except BaseException:
        stopping.set()  # else Ctrl-C, or who failed, would wait for files of a hundred gigabytes
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    return [each.result() for each in running]
