"""Who is in the fleet and who is lost, from registrations, beats and silence.

A worker is lost after a number of missed beats, or sooner when a peer lost it and a beat is missed
too. Silence counts only while somebody listened. It knows no deployments and has no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.coordinator.settings import Patience
from paceline.errors import StaleEpoch
from paceline.wire.calls import Heartbeat, RegisterWorker
from paceline.wire.records import Worker


@dataclass(slots=True)
class Member:
    """One worker's record, and what only this process knows of it."""

    record: Worker
    heard_s: float
    beat_s: float  # the interval it was told
    suspected: bool = False  # a peer lost it, and it has not been heard since


class Membership:
    """The fleet."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._members: dict[str, Member] = {}
        self._offences: Counter[str] = Counter()

    def restore(self, workers: Iterable[Worker], now_s: float) -> None:
        """Take the workers back after a restart; everybody gets a fresh interval to be heard."""
        for worker in workers:
            self._members[worker.worker_id] = Member(worker, now_s, self.beat_interval_s())

    def workers(self) -> list[Worker]:
        """Return everyone who ever registered."""
        return [member.record for member in self._members.values()]

    def find(self, worker_id: str) -> Worker | None:
        """Return the worker's record, or None where it never registered."""
        member = self._members.get(worker_id)
        return None if member is None else member.record

    def alive(self, worker_id: str) -> bool:
        """Return whether the worker is registered and heard of."""
        member = self._members.get(worker_id)
        return member is not None and member.record.alive

    def beat_interval_s(self) -> float:
        """Return how often workers should beat: slower, the larger the fleet."""
        return max(self._patience.beat_s, len(self._members) / self._patience.beats_per_second)

    def register(self, call: RegisterWorker, at: float, now_s: float) -> Worker:
        """Enter a worker, or its next incarnation; raises StaleEpoch for an older one."""
        known = self.find(call.worker_id)
        if known is not None:
            _refuse_stale(call, known)
        places = {
            "rack": call.labels.rack or call.rack,
            "host": call.labels.host or call.hostname,
        }
        worker = Worker(
            worker_id=call.worker_id,
            hostname=call.hostname,
            labels=call.labels.model_copy(update=places),
            address=call.address,
            available_storage=call.available_storage,
            link_mbit=call.link_mbit,
            incarnation=call.incarnation,
            last_heartbeat=at,
            pid=call.pid,
        )
        self._members[call.worker_id] = Member(worker, now_s, self.beat_interval_s())
        return worker

    def hear(self, beat: Heartbeat, at: float, now_s: float) -> Worker | None:
        """Take a beat and return its sender, or None where that must register (again) first."""
        member = self._members.get(beat.worker_id)
        if member is None or not member.record.alive:
            return None
        if member.record.incarnation != beat.incarnation:
            return None
        member.heard_s, member.suspected, member.beat_s = now_s, False, self.beat_interval_s()
        member.record = member.record.model_copy(
            update={
                "last_heartbeat": at,
                "bandwidth_in": beat.bandwidth_in,
                "bandwidth_out": beat.bandwidth_out,
                "available_storage": beat.available_storage or member.record.available_storage,
            }
        )
        return member.record

    def suspect(self, worker_id: str) -> None:
        """Take a peer's word that it lost this worker: a beat refutes it, silence confirms it."""
        member = self._members.get(worker_id)
        if member is not None:
            member.suspected = True

    def offend(self, worker_id: str) -> int:
        """Count that a deployment found the worker slow or corrupting; return how many did, since
        this process began.
        """
        self._offences[worker_id] += 1
        return self._offences[worker_id]

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Discount a time in which nobody listened, e.g. while this process was frozen."""
        for member in self._members.values():
            member.heard_s = min(now_s, member.heard_s + gap_s)

    def lose_silent(self, now_s: float) -> list[Worker]:
        """Mark those who were silent for too long and return them."""
        lost = []
        for member in self._members.values():
            beats = (
                self._patience.suspect_beats
                if member.suspected
                else self._patience.lost_after_beats
            )
            if member.record.alive and now_s - member.heard_s > beats * member.beat_s:
                gone = {"alive": False, "bandwidth_in": 0.0, "bandwidth_out": 0.0}
                member.record = member.record.model_copy(update=gone)
                lost.append(member.record)
        return lost


def _refuse_stale(call: RegisterWorker, known: Worker) -> None:
    same_process = (call.pid, call.address) == (known.pid, known.address)
    if call.incarnation > known.incarnation:
        return
    if call.incarnation == known.incarnation and same_process:
        return  # its first answer was lost on the way, or it was frozen and thawed
    raise StaleEpoch(
        "a newer incarnation of this worker is registered",
        got=f"{call.worker_id} incarnation {call.incarnation}",
        wanted=f"more than {known.incarnation}",
        do="Stop the older process, or register with the next incarnation.",
    )
