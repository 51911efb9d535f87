"""What every coordination backend refuses with, said the same way."""

from __future__ import annotations

from paceline.coordinator.stores.contracts import OUTBOX_EVENTS, Term
from paceline.errors import ServiceUnavailable, StaleEpoch


def stale(term: Term, newest: int, where: object) -> StaleEpoch:
    """Return the refusal of a write by a term that has ended."""
    ended = newest == term.epoch
    return StaleEpoch(
        "this term has ended" if ended else "a newer coordinator leads",
        got=f"epoch {term.epoch}",
        wanted="a new campaign" if ended else f"epoch {newest}",
        where=where,
        do="Stop deciding; campaign again or stop this process.",
    )


def load_first(where: object) -> ServiceUnavailable:
    """Return the refusal of a write that follows one whose outcome is unknown."""
    return ServiceUnavailable(
        "an earlier write failed, and nobody knows whether it was kept",
        wanted="load() before the next write",
        where=where,
        do="Ask again.",
    )


def outbox_is_full(waiting: int) -> ServiceUnavailable:
    """Return the refusal of a write whose events would have nowhere to go."""
    return ServiceUnavailable(
        "too many events wait for the audit store",
        got=f"{waiting} events",
        wanted=f"fewer than {OUTBOX_EVENTS}",
        do="Bring the audit store back; the events are then shipped and writes go on.",
    )
