"""The fleet's workers and which of them are lost, from registrations, heartbeats and silence.

A worker is lost after a number of missed heartbeats, fewer where a peer reported its loss.
Silence counts only while this process handled heartbeats. No deployments here, and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.errors import Conflict, StaleEpoch
from paceline.schemas import Heartbeat, RegisterWorker, Worker


@dataclass(slots=True)
class Member:
    """One worker: its registration, its last heartbeat, and this process's own bookkeeping."""

    registered: Worker
    last_heartbeat_s: float
    beat_s: float  # the interval that it was given
    last_heartbeat_at: float
    available_storage: int
    alive: bool = True
    bandwidth_in: float = 0.0
    bandwidth_out: float = 0.0
    number: int = 0  # of its newest heartbeat
    suspected: bool = False  # a peer reported its loss, and no heartbeat came since

    @property
    def record(self) -> Worker:
        """Return the worker's current record; built on request, not at each heartbeat."""
        return self.registered.model_copy(
            update={
                "alive": self.alive,
                "last_heartbeat": self.last_heartbeat_at,
                "bandwidth_in": self.bandwidth_in,
                "bandwidth_out": self.bandwidth_out,
                "available_storage": self.available_storage,
            }
        )

    @classmethod
    def of(cls, worker: Worker, now_s: float, beat_s: float) -> Member:
        return cls(
            worker,
            now_s,
            beat_s,
            worker.last_heartbeat,
            worker.available_storage,
            worker.alive,
            worker.bandwidth_in,
            worker.bandwidth_out,
        )


class Membership:
    """All registered workers."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._members: dict[str, Member] = {}
        self._living = 0  # alive
        self._next_scan_s = float("-inf")  # no worker can be lost before this time

    def restore(self, workers: Iterable[Worker], now_s: float) -> None:
        """Load the workers after a restart or a change of leaders.

        Each gets a fresh interval for its next heartbeat, plus the time to find the leader.
        """
        for worker in workers:
            self._add(worker, now_s + self._settings.find_leader_s)

    def workers(self) -> list[Worker]:
        return [member.record for member in self._members.values()]

    def last_heartbeats(self) -> dict[str, float]:
        """Return when each worker's last heartbeat came, in seconds since the Unix epoch."""
        return {worker_id: member.last_heartbeat_at for worker_id, member in self._members.items()}

    def merge_progress(self, beats: Mapping[str, float]) -> None:
        """Fill in stored heartbeat times, for display; liveness does not change."""
        for worker_id, at in beats.items():
            member = self._members.get(worker_id)
            if member is not None:
                member.last_heartbeat_at = max(member.last_heartbeat_at, at)

    def find(self, worker_id: str) -> Worker | None:
        """Return the worker's record, or None where it never registered."""
        member = self._members.get(worker_id)
        return None if member is None else member.record

    def address(self, worker_id: str) -> str:
        """Return the worker's address for peers, empty where it is unknown."""
        member = self._members.get(worker_id)
        return "" if member is None else member.registered.address

    def is_known(self, worker_id: str, incarnation: int) -> bool:
        member = self._members.get(worker_id)
        return member is not None and member.alive and member.registered.incarnation == incarnation

    def alive(self, worker_id: str) -> bool:
        member = self._members.get(worker_id)
        return member is not None and member.alive

    def beat_interval_s(self) -> float:
        """Return the heartbeat interval in seconds; it grows with the number of living workers."""
        return max(self._settings.beat_s, self._living / self._settings.beats_per_second)

    def register(self, call: RegisterWorker, at: float, now_s: float) -> Worker:
        """Add a worker, or its next incarnation; raises StaleEpoch for an older one, Conflict for a
        new one where there are too many.
        """
        known = self.find(call.worker_id)
        if known is not None:
            _refuse_stale(call, known)
        elif len(self._members) >= self._settings.workers_at_most:
            raise Conflict(
                "there are too many workers",
                got=len(self._members),
                wanted=f"fewer than {self._settings.workers_at_most}",
                do="Start agents under the names they had; lost ones are forgotten in the end.",
            )
        places = {"rack": call.labels.rack or call.rack, "host": call.labels.host or call.hostname}
        given = {
            name: getattr(call, name) for name in RegisterWorker.model_fields if name != "rack"
        }
        labels = call.labels.model_copy(update=places)
        worker = Worker.model_validate(given | {"labels": labels, "last_heartbeat": at})
        self._add(worker, now_s)
        return worker

    def is_outdated(self, beat: Heartbeat) -> bool:
        """Return whether this heartbeat, or a newer one of the process, was handled already."""
        member = self._members.get(beat.worker_id)
        return (
            member is not None
            and 0 < beat.number <= member.number
            and member.registered.incarnation == beat.incarnation
        )

    def record_heartbeat(self, beat: Heartbeat, at: float, now_s: float) -> Worker | None:
        """Record a heartbeat and return its sender's registration, or None where the worker must
        register (again) first.
        """
        member = self._members.get(beat.worker_id)
        if member is None or not member.alive:
            return None
        if member.registered.incarnation != beat.incarnation:
            return None
        member.last_heartbeat_s, member.suspected, member.beat_s = (
            now_s,
            False,
            self.beat_interval_s(),
        )
        member.last_heartbeat_at, member.number = at, beat.number
        member.bandwidth_in, member.bandwidth_out = beat.bandwidth_in, beat.bandwidth_out
        member.available_storage = beat.available_storage or member.available_storage
        return member.registered

    def suspect(self, worker_id: str) -> None:
        """Record a peer's report of a lost worker; its next heartbeat refutes the report."""
        member = self._members.get(worker_id)
        if member is not None and member.alive and not member.suspected:
            member.suspected, self._next_scan_s = True, float("-inf")

    def discount_gap(self, gap_s: float, now_s: float) -> None:
        """Discount a gap without heartbeat handling, e.g. while this process was frozen."""
        for member in self._members.values():
            member.last_heartbeat_s = min(now_s, member.last_heartbeat_s + gap_s)

    def mark_lost(self, now_s: float) -> list[Worker]:
        """Mark the workers that were silent for too long as lost and return them."""
        if now_s <= self._next_scan_s:
            return []
        lost, next_s = [], float("inf")
        for member in self._members.values():
            if not member.alive:
                continue
            settings = self._settings
            beats = settings.suspect_beats if member.suspected else settings.lost_after_beats
            until_s = member.last_heartbeat_s + beats * member.beat_s
            if now_s > until_s:
                member.alive, member.bandwidth_in, member.bandwidth_out = False, 0.0, 0.0
                self._living -= 1
                lost.append(member.record)
            else:
                next_s = min(next_s, until_s)
        # A heartbeat only moves these times later; a suspicion makes the next call scan at once.
        self._next_scan_s = next_s
        return lost

    def expired_workers(self, at: float) -> list[str]:
        """Return the workers that were lost so long ago, by wall time, that they may be pruned."""
        latest = at - self._settings.kept_lost_s
        return [
            worker_id
            for worker_id, member in self._members.items()
            if not member.alive and member.last_heartbeat_at < latest
        ]

    def forget(self, worker_id: str) -> None:
        """Delete a lost worker; it may register again as a new one."""
        assert not self._members[worker_id].alive
        del self._members[worker_id]

    def _add(self, worker: Worker, now_s: float) -> None:
        known = self._members.get(worker.worker_id)
        self._living += worker.alive - (known is not None and known.alive)
        self._members[worker.worker_id] = Member.of(worker, now_s, self.beat_interval_s())
        self._next_scan_s = float("-inf")


def _refuse_stale(call: RegisterWorker, known: Worker) -> None:
    mine, theirs = (call.pid, call.address, call.process), (known.pid, known.address, known.process)
    if call.incarnation > known.incarnation:
        return
    if call.incarnation == known.incarnation and mine == theirs:
        return  # its first answer was lost, or the process was frozen and resumed
    raise StaleEpoch(
        "a newer incarnation of this worker is registered",
        got=f"{call.worker_id} incarnation {call.incarnation}",
        wanted=f"more than {known.incarnation}",
        do="Stop the older process, or register with the next incarnation.",
    )
