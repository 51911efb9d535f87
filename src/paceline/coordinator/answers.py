"""What an agent hears: the commands that ride on the answers to its beats.

Agents only pull. A command is repeated in every answer until the agent's beats show its effect, so
that none can be lost; where an agent has nothing more to hear of a deployment, that is closed.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.coordinator.book import Book
from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.messages import Answer
from paceline.wire.calls import Command, DeploymentBeat, HeartbeatAnswer
from paceline.wire.records import Deployment, DeploymentStatus, WorkerStatus

CLOSED = (DeploymentStatus.CANCELLED, DeploymentStatus.FAILED)


def answer_to(
    book: Book,
    worker_id: str,
    listed: Mapping[str, DeploymentBeat],
    *,
    epoch: int,
    next_beat_s: float,
    barred: tuple[str, ...],
) -> Answer:
    """Return what a worker should do now; ``listed`` is what its beat said, by deployment."""
    commands = []
    for run in book.open_runs(worker_id):
        if run.unheard:
            run.unheard.discard(worker_id)
        entry = listed.get(run.deployment.deployment_id)
        moving = entry is not None and entry.status is WorkerStatus.RECEIVING
        command = _command_for(book, run, worker_id, moving)
        if command is not None:
            commands.append(command)
    return Answer(
        HeartbeatAnswer(
            epoch=epoch, next_beat_s=next_beat_s, commands=tuple(commands), barred=barred
        )
    )


def register_first(*, epoch: int, next_beat_s: float) -> Answer:
    """Return what has an agent register (again)."""
    stranger = {"continue": False, "epoch": epoch, "next_beat_s": next_beat_s}
    return Answer(HeartbeatAnswer.model_validate(stranger))


def _command_for(book: Book, run: DeploymentRun, worker_id: str, moving: bool) -> Command | None:
    deployment, part = run.deployment, run.parts[worker_id]
    if deployment.status in CLOSED:
        told, part.command_sent = part.command_sent, True
        if part.receipt is None and (moving or not told):
            return _command("cancel", deployment)
        # It beat again after it was told, and does not move: it publishes nothing from here on.
        part.stopped = True
    elif deployment.status is not DeploymentStatus.COMPLETE:
        return _command("fetch_lanes", deployment) if run.behind(worker_id) else None
    elif worker_id in run.calling:
        part.command_sent = True
        return _command("activate", deployment)
    elif worker_id in run.asking:
        # Fetching lanes has an agent look at its disk; its next beat shows what is there.
        return None if part.seen_whole else _command("fetch_lanes", deployment)
    book.close(worker_id, deployment.deployment_id)
    return None


def _command(kind: str, deployment: Deployment) -> Command:
    return Command.model_validate(
        {"kind": kind, "deployment_id": deployment.deployment_id, "epoch": deployment.epoch}
    )
