"""Who works on which share of the batches: each rank on its own, until somebody falls out.

A share whose rank is gone waits for that rank to come back; after ``vacant_s`` whoever has finished
its own takes it, so that a worker that is left out costs time and no data. Pure: no I/O, the clock
is the caller's. A rank has one share at a time; its newest connection counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Holder:
    """A rank at work on a share; ``line`` is its connection, whatever that is."""

    rank: int
    line: Any


class Seats:
    """The shares and their holders."""

    def __init__(self, shares: int, vacant_s: float, now: float) -> None:
        self._vacant_s = vacant_s
        self._holders: dict[int, Holder] = {}
        self._free_since = dict.fromkeys(range(shares), now)

    def take(
        self, rank: int, wanted: int, line: Any, unfinished: Collection[int], now: float
    ) -> tuple[int | None, Any]:
        """Return the share that ``rank`` works on from now, and the older line to be cut.

        None for a share: there is nothing to do now; ask again when something changed.
        """
        for share in (wanted, *(each for each in sorted(unfinished) if each != wanted)):
            if share not in unfinished:
                continue
            holder = self._holders.get(share)
            mine = holder is not None and holder.rank == rank
            waited = now - self._free_since[share] >= self._vacant_s
            if mine or (holder is None and (share == wanted or waited)):
                self._holders[share] = Holder(rank, line)
                return (
                    share,
                    holder.line if holder is not None and holder.line is not line else None,
                )
        return None, None

    def leave(self, share: int, line: Any, now: float) -> None:
        """The connection ``line`` broke or finished; the share is free unless another has it."""
        holder = self._holders.get(share)
        if holder is not None and holder.line is line:
            del self._holders[share]
            self._free_since[share] = now
