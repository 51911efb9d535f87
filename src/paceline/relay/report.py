"""What an agent tells at each beat: where its deployments stand, and what moved since it last told.

Counts of edges are cumulative, so that a beat that is lost loses nothing; only those that changed
are sent, because a node that served fifty peers need not list them all for the rest of the day.
"""

from __future__ import annotations

from paceline.relay.driver import RelayDriver
from paceline.relay.wires.pacing import RateMeter
from paceline.wire.calls import DeploymentBeat, EdgeTally, Heartbeat
from paceline.wire.records import WorkerStatus

ENDED = (WorkerStatus.COMPLETE, WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)


class Report:
    """Writes the beats of one agent; used by one thread."""

    def __init__(self, worker_id: str, driver: RelayDriver) -> None:
        self._worker_id = worker_id
        self._driver = driver
        self._meters = RateMeter(), RateMeter()
        self._number = 0
        self._told: dict[tuple[str, str, str], EdgeTally] = {}
        self._telling: dict[tuple[str, str, str], EdgeTally] = {}

    def beat(self, available_storage: int) -> Heartbeat:
        """Return what to say now."""
        beats = self._driver.beats()
        receiving = next((b for b in beats if b.status is WorkerStatus.RECEIVING), None)
        newest = receiving or (beats[-1] if beats else None)
        into, out = self._meters
        self._telling = {}
        self._number += 1
        return Heartbeat(
            worker_id=self._worker_id,
            status=newest.status if newest else WorkerStatus.IDLE,
            chunks_received=newest.chunks_received if newest else (),
            bandwidth_in=into.look(self._driver.nic_in.total_bytes),
            bandwidth_out=out.look(self._driver.nic_out.total_bytes),
            incarnation=self._driver.incarnation,
            number=self._number,
            available_storage=available_storage,
            deployments=tuple(self._moved(each) for each in beats),
        )

    def was_heard(self) -> None:
        """Take note that the last beat was answered."""
        self._told |= self._telling
        self._telling = {}

    def forget(self) -> None:
        """Tell everything again: whoever listens now may be another, who knows nothing."""
        self._told.clear()

    def _moved(self, beat: DeploymentBeat) -> DeploymentBeat:
        edges = []
        for edge in beat.edges:
            key = (beat.deployment_id, edge.source, edge.reader)
            if self._told.get(key) != edge:
                edges.append(edge)
                self._telling[key] = edge
        return beat.model_copy(update={"edges": tuple(edges)})
