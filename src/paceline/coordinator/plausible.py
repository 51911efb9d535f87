"""Whether what a worker says of its part can be so at all.

Asked before anything of a beat is taken: one worker's absurd number would otherwise be everybody's
trouble, in plans, figures and metrics. What is possible is believed. Pure, and cheap: it is asked
of each beat, so the list of chunks is looked through only where it changed.

Edges are no part of it: who reads at a worker says its own name, so a stranger's must not cost that
worker its beat. They are passed over (``has_part``).
"""

from __future__ import annotations

from collections.abc import Container

from paceline.coordinator.parts import Part
from paceline.errors import InvalidInput
from paceline.wire.calls import DeploymentBeat
from paceline.wire.records import Deployment


def require_possible(
    deployment: Deployment, targets: Container[str], part: Part, beat: DeploymentBeat
) -> None:
    """Raise InvalidInput where ``beat`` says more than there is, or names who has no part in it."""
    if beat.pieces_held > deployment.total_pieces:
        raise _impossible(deployment, "pieces", beat.pieces_held, deployment.total_pieces)
    if beat.bytes_held > deployment.total_bytes:
        raise _impossible(deployment, "bytes", beat.bytes_held, deployment.total_bytes)
    chunks = beat.chunks_received
    if chunks and chunks != part.chunks:
        last = deployment.total_chunks - 1
        if min(chunks) < 0 or max(chunks) > last or len(set(chunks)) < len(chunks):
            raise InvalidInput(
                "there are no such chunks",
                got=f"{len(chunks)} from {min(chunks)} to {max(chunks)}",
                wanted=f"each once, from 0 to {last}",
                where=deployment.deployment_id,
            )
    for key in (*beat.lost_sources, *beat.corrupt_sources):
        if not has_part(deployment, targets, key):
            raise InvalidInput(
                "it has no part in this deployment",
                got=key[:200],
                wanted="a target worker, or the origin",
                where=deployment.deployment_id,
            )


def has_part(deployment: Deployment, targets: Container[str], key: str) -> bool:
    """Return whether ``key`` is a source or a reader that a deployment to ``targets`` can have."""
    return key in targets or key == f"origin:{deployment.source_url}"


def _impossible(deployment: Deployment, what: str, got: int, total: int) -> InvalidInput:
    return InvalidInput(
        f"nobody can hold so many {what} of it",
        got=got,
        wanted=f"at most {total}",
        where=deployment.deployment_id,
    )
