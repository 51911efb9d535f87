"""Replicas that do not wait for each other at every step: local SGD, and a parameter server.

``averaging`` lets each rank take some steps alone and then averages weights: a ``Parallel`` like
any other. ``server`` and ``worker`` share versioned weights: workers pull them and push gradients,
stale by no more than a bound (``ledger`` is the rule of it, without any I/O); a standby holds every
update that was acknowledged and takes over.
"""

from __future__ import annotations

from paceline.errors import InvalidInput
from paceline.profile import TrainingSettings


def require_gang(settings: TrainingSettings) -> None:
    """Raise InvalidInput for a way to synchronise that a gang of ranks does not offer.

    A gang ends as a whole when a rank dies; an asynchronous job's ranks outlive each other, so they
    are started by ``paceline.training.relaxed.ranks`` and not as a gang.
    """
    if settings.synchrony.kind == "parameter-server":
        raise InvalidInput(
            "a parameter server is no job of a gang",
            got="training.synchrony.kind parameter-server",
            wanted="every-step or local-sgd",
            do="Run it with paceline.training.relaxed.ranks (see docs/architecture.md).",
        )
