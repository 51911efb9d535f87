"""Handles what agents send: registrations, heartbeats and lane requests, and their answers.

It records facts and returns commands; what the facts mean for a deployment is decided on ticks
(``lifecycle``). Pure like the rest of the state machine. A refused event raises a PacelineError
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.coordinator.state.deployment import DeploymentState
from paceline.coordinator.state.deployment_index import DeploymentIndex
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.messages import (
    Answer,
    AwaitCommands,
    Effect,
    EmitEvent,
    FetchLanes,
    HeartbeatReceived,
    Register,
    Save,
)
from paceline.coordinator.state.targets import validate_heartbeat
from paceline.coordinator.tokens import TokenRegistry
from paceline.errors import Cancelled, DeploymentFailed, NotFound
from paceline.schemas import (
    Command,
    DeploymentBeat,
    DeploymentStatus,
    EventName,
    Heartbeat,
    HeartbeatAnswer,
    Registered,
    WorkerStatus,
)

# Agents only pull: commands are part of the answers to heartbeats. A command is repeated in every
# answer until the agent's heartbeats show its effect, so that none is lost; a deployment with no
# more commands for an agent is closed for that agent.

CLOSED = (DeploymentStatus.CANCELLED, DeploymentStatus.FAILED)


def _command_for(
    index: DeploymentIndex, state: DeploymentState, worker_id: str, moving: bool
) -> Command | None:
    deployment, part = state.deployment, state.parts[worker_id]
    kind: Literal["fetch_lanes", "activate", "cancel"] | None = None
    if deployment.status in CLOSED:
        sent, part.command_sent = part.command_sent, True
        if part.receipt is None and (moving or not sent):
            kind = "cancel"
        else:  # a heartbeat after the command reports no transfer: nothing more is published
            part.stopped = True
            index.close(worker_id, deployment.deployment_id)
    elif deployment.status is not DeploymentStatus.COMPLETE:
        kind = "fetch_lanes" if state.behind(worker_id) else None
    elif worker_id in state.activating:
        part.command_sent, kind = True, "activate"
    elif worker_id in state.asking:
        # Fetching lanes makes an agent check its disk; its next heartbeat reports the result.
        kind = None if part.reported_complete else "fetch_lanes"
    else:
        index.close(worker_id, deployment.deployment_id)
    identity, epoch = deployment.deployment_id, deployment.epoch
    return kind and Command(kind=kind, deployment_id=identity, epoch=epoch)


class AgentHandlers:
    """Handles the events of a fleet's agents, for the leader of ``epoch``."""

    def __init__(
        self, index: DeploymentIndex, fleet: Membership, tokens: TokenRegistry, epoch: int
    ) -> None:
        self._index, self._fleet, self._tokens, self._epoch = index, fleet, tokens, epoch
        self.beats = self.beats_refused = 0  # accepted; and those whose sender must register first

    def register(self, event: Register, now_s: float) -> list[Effect]:
        """Add a worker, or its next incarnation; raises StaleEpoch for an older one."""
        call = event.call
        old = self._fleet.find(call.worker_id)
        worker = self._fleet.register(call, event.at, now_s)
        answer = Answer(Registered(worker_id=call.worker_id, incarnation=call.incarnation))
        if old is not None and old.alive and old.incarnation == call.incarnation:
            return [Save(worker), answer]
        for state in self._index.runs_for(call.worker_id):
            state.returned(call.worker_id, call.incarnation)
        name = EventName.WORKER_REGISTERED if old is None else EventName.WORKER_RETURNED
        data: dict[str, object] = {"incarnation": call.incarnation, "address": call.address}
        return [Save(worker), EmitEvent(name, event.at, None, call.worker_id, data), answer]

    def beat(self, event: HeartbeatReceived, now_s: float) -> list[Effect]:
        """Record a heartbeat and return the worker's commands; raises InvalidInput for impossible
        values.
        """
        beat = event.beat
        if self._fleet.is_outdated(beat):
            # A duplicate or late heartbeat: its content is outdated.
            return [self._plain_answer()]
        for each in beat.deployments:
            state = self._index.find(each.deployment_id)
            if state is not None and (part := state.parts.get(beat.worker_id)) is not None:
                validate_heartbeat(state.deployment, state.parts, part, each)
        worker = self._fleet.record_heartbeat(beat, event.at, now_s)
        if worker is None:
            self.beats_refused += 1
            return [self._register_first()]
        self.beats += 1
        effects: list[Effect] = []
        listed = {each.deployment_id: each for each in beat.deployments}
        for deployment_id, each in listed.items():
            state = self._index.find(deployment_id)
            if state is None or beat.worker_id not in state.parts:
                continue
            if state.deployment.status in CLOSED and each.status is WorkerStatus.RECEIVING:
                # A new leader announced only the newest of the closed deployments.
                self._index.announce(state, (beat.worker_id,))
            effects += state.report(worker, each, now_s, event.at)
            for key in each.lost_sources:
                self._fleet.suspect(key)
        return [*effects, self._answer(beat.worker_id, listed)]

    def await_commands(self, event: AwaitCommands) -> list[Effect]:
        """Return the commands for a worker whose heartbeat was answered and that still waits."""
        if not self._fleet.is_known(event.worker_id, event.incarnation):
            return [self._register_first()]
        return [self._answer(event.worker_id, {})]

    def _answer(self, worker_id: str, listed: Mapping[str, DeploymentBeat]) -> Answer:
        """Return the commands for a worker; ``listed`` is its heartbeat, by deployment."""
        commands = []
        for state in self._index.runs_for(worker_id):
            state.unconfirmed.discard(worker_id)
            entry = listed.get(state.deployment.deployment_id)
            moving = entry is not None and entry.status is WorkerStatus.RECEIVING
            command = _command_for(self._index, state, worker_id, moving)
            if command is not None:
                commands.append(command)
        return self._plain_answer(*commands)

    def _plain_answer(self, *commands: Command) -> Answer:
        return Answer(
            HeartbeatAnswer(
                epoch=self._epoch,
                next_beat_s=self._fleet.beat_interval_s(),
                commands=commands,
                barred=self._tokens.barred(),
            )
        )

    def _register_first(self) -> Answer:
        """Return the answer that makes an agent register (again)."""
        interval_s = self._fleet.beat_interval_s()
        fields = {"continue": False, "epoch": self._epoch, "next_beat_s": interval_s}
        return Answer(HeartbeatAnswer.model_validate(fields))

    def fetch_lanes(self, event: FetchLanes, now_s: float) -> list[Effect]:
        """Return a worker's lanes in the newest plan, which also acknowledges the manifest; raises
        NotFound where there are none, Cancelled or DeploymentFailed where the deployment ended.
        """
        state = self._index.deployment_state(event.deployment_id)
        deployment = state.deployment
        where = f"{event.worker_id} of {event.deployment_id}"
        if deployment.status is DeploymentStatus.CANCELLED:
            raise Cancelled("the deployment was cancelled", where=where)
        if deployment.status is DeploymentStatus.FAILED:
            raise DeploymentFailed("the deployment has failed", where=where)
        lanes = state.lanes_of(event.worker_id)
        member = self._fleet.find(event.worker_id)
        if lanes is None or member is None:
            raise NotFound(
                "no lanes for this worker",
                where=where,
                wanted="a registered target once its deployment is planned",
                do="Ask again when a beat's answer says fetch_lanes.",
            )
        state.record_lanes(event.worker_id, member.incarnation, now_s)
        return [Answer(lanes)]

    def needs_no_commit(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat certainly leaves nothing to commit: it reports progress only.

        False is conservative: there may be nothing to commit either.
        """
        for each in beat.deployments:
            state = self._index.find(each.deployment_id)
            part = None if state is None else state.parts.get(beat.worker_id)
            if state is None or part is None or state.final:
                continue
            if each.lost_sources or each.corrupt_sources:
                return False
            moving = each.status is WorkerStatus.RECEIVING and each.receipt is None
            if part.receipt is None and not moving:
                return False  # it finished or failed
        return True
