"""State that something keeps beside model and optimiser, and that a checkpoint must have too.

A recurrent task's rows (``recurrent.Carried``), what a compressing hook has not sent yet
(``parallel.compression``). Both change while a batch is computed, and a state is saved in the
middle of the next batch: the loop calls ``settle`` between two batches, and what is saved is what
was settled last. Knows no files and no loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class Kept(Protocol):
    """One thing that keeps state of its own on each rank; names are unique in a job."""

    def settle(self) -> None:
        """What is held now belongs to the state between two batches."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what was settled, by name; several ranks may hold the same under one name."""

    def wants(self, name: str) -> bool:
        """Return whether this rank, on whatever layout, needs what was saved as ``name``."""

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """Take over what was saved of what was wanted; all of it is there, or nothing."""


@runtime_checkable
class Spoilable(Protocol):
    """A ``Kept`` that a bad batch may spoil for all batches after it."""

    def let_go(self) -> None:
        """The batch since the last ``settle`` was not learned from: drop what it spoiled."""


def keeps_of(*owners: object) -> list[Kept]:
    """Return what ``owners`` keep: their ``keeps``, and those of a workload that they wrap."""
    found: list[Kept] = []
    for each in owners:
        its: Sequence[Kept] = getattr(each, "keeps", ())
        found += its
        if not its and (inner := getattr(each, "workload", None)) is not None:
            found += keeps_of(inner)
    return found


def settle(keeps: Sequence[Kept]) -> None:
    """Settle all of them."""
    for each in keeps:
        each.settle()


def let_go(keeps: Sequence[Kept]) -> None:
    """Have those that can drop what the batch since the last ``settle`` spoiled."""
    for each in keeps:
        if isinstance(each, Spoilable):
            each.let_go()
