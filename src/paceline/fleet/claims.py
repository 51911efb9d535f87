"""Claims: a gang's nodes are its own, all of them or none, for as long as it lasts.

Nodes are claimed in one order and kept while the next is waited for, so gangs neither interleave
nor deadlock; a claim whose gang is gone lapses by itself (the lease, see remote.py). Knows nothing
of what runs there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.errors import Cancelled, Conflict
from paceline.fleet import remote

CLAIM_RETRY_S = 0.2
CLAIM_DEADLINE_S = 10.0


@contextlib.contextmanager
def claimed(
    fleet: Any,
    gang_id: str,
    addresses: Mapping[str, str],
    deadline_s: float,
    cancel: threading.Event | None,
    *,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the nodes (by worker id, with their addresses) for the time of the ``with``.

    Others that hold them are waited for, in one order, and named to ``on_wait``. Raises Conflict
    after ``deadline_s``, Cancelled.
    """
    told: str | None = None
    nodes = dict(sorted(addresses.items()))
    deadline = time.monotonic() + deadline_s
    held: list[str] = []
    try:
        while len(held) < len(nodes):
            # Always in the same order, keeping what is held: so gangs cannot wait in a circle.
            for worker_id in [*held, *[each for each in nodes if each not in held]]:
                holder = call(fleet, worker_id, nodes[worker_id], remote.claim, gang_id)
                if holder is not None:
                    break
                if worker_id not in held:
                    held.append(worker_id)
            else:
                break
            check_cancel(cancel, gang_id)
            if time.monotonic() > deadline:
                raise Conflict(
                    "the node is taken by another gang",
                    got=holder,
                    wanted=f"free within {deadline_s:.0f} s",
                    where=worker_id,
                    do="Wait for the other job to end, or cancel it.",
                )
            if on_wait is not None and holder != told:
                told = holder
                on_wait(
                    f"waiting for {worker_id}: it is held by {holder} (at most {deadline_s:.0f} s)"
                )
            time.sleep(CLAIM_RETRY_S)
        yield
    finally:
        calls = fleet._calls(slot=False)
        for worker_id, address in nodes.items():
            calls.submit(worker_id, address, remote.release, gang_id)
        with contextlib.suppress(Exception):  # a claim lapses by itself
            calls.gather(CLAIM_DEADLINE_S)


def call(
    fleet: Any,
    worker_id: str,
    address: str,
    fn: Callable[..., Any],
    *args: Any,
    deadline_s: float = CLAIM_DEADLINE_S,
) -> Any:
    """Return ``fn(*args)`` as run on the node, outside of its slots; raises its own error."""
    calls = fleet._calls(slot=False)
    calls.submit(worker_id, address, fn, *args)
    answer = calls.gather(deadline_s)[worker_id]
    if isinstance(answer, BaseException):
        raise answer
    return answer


def check_cancel(cancel: threading.Event | None, where: str) -> None:
    """Raise Cancelled where the caller asked for it."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("cancelled by the caller", where=where)
