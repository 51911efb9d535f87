"""Timeouts, intervals and limits of the coordinator's state machine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import Profile
from paceline.schemas import Topology


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Intervals and limits; durations are seconds of the monotonic clock."""

    beat_s: float = 0.5
    lost_after_beats: int = 6
    suspect_beats: float = 2.0  # missed heartbeats that confirm a peer's report of a loss
    find_leader_s: float = 5.0  # in which agents find a new leader: one round of dead endpoints
    return_grace_s: float = 60.0  # in which a lost target may return
    deadline_s: float = 600.0  # of one whole deployment
    beats_per_second: float = 1000.0  # above this, the interval grows with the fleet
    link_mbit: float = 80.0  # of a target that has yet to register, for the estimate only
    external_mbit: float | None = None  # of the origin; None: as fast as the slowest worker
    oversubscription: float = 1.0  # of the racks' uplinks
    deadline_factor: float = 3.0  # times the predicted time, where that is longer than deadline_s
    replan_s: float = 0.25  # between two plans of one deployment: a burst of losses makes one,
    replanned_per_second: float = 1000.0  # and longer in a large fleet, where a plan takes longer
    return_gap_pieces: int = 8  # a worker that returns with a larger gap is moved to the tail
    slow_look_s: float = 0.45  # measuring interval of an edge; a little less than a heartbeat
    slow_s: float = 0.9  # of consecutive slow intervals; twice that where it is only a little slow
    slow_ratio: float = 0.5  # of the planned rate, and of what other edges carry
    most_demoted: float = 0.1  # of a fleet may be judged slow, and as many corrupting; at least one
    corrupt_pieces: int = 4  # of one sender beyond chance; a reader leaves a stream at four
    corrupt_share: float = 0.02  # of what it sent; one in a hundred may be the network's doing
    corrupt_factor: float = 5.0  # times the median share of the others
    prepare_s: float = 3.0  # that a switch waits for the rest once a quorum is ready
    switch_s: float = 30.0  # to find a ready quorum, and then for it to switch
    kept_closed: int = 100  # newest closed deployments that are kept, with their idempotency keys
    kept_closed_s: float = 24 * 3600.0  # and those that closed within this time
    kept_at_most: int = 1_000  # closed deployments, whatever their age
    open_at_most: int = 1_000  # deployments in progress
    kept_bytes_at_most: int = 2**31  # of all kept deployments; closed ones take at most half
    workers_at_most: int = 50_000  # including lost ones
    kept_lost_s: float = 30 * 86_400.0  # lost workers that no kept deployment names
    kept_audit_events: int = 1_000_000  # the newest in the audit store
    topology: Topology = Topology.AUTO  # of a deployment whose caller names none
    max_failed: float = 0.05  # the same
    starts_flows: bool = False  # for callers without a flow run, see api/flow_starter

    @property
    def lost_s(self) -> float:
        return self.lost_after_beats * self.beat_s

    def deadline_of(self, predicted_s: float) -> float:
        return max(self.deadline_s, self.deadline_factor * predicted_s)

    def replan_interval_s(self, workers: int) -> float:
        """Return the shortest interval in seconds between two plans for so many workers."""
        return max(self.replan_s, workers / self.replanned_per_second)

    @classmethod
    def of(cls, profile: Profile) -> CoordinatorSettings:
        relay = profile.relay
        return cls(
            beat_s=relay.beat_s,
            lost_after_beats=relay.lost_after_beats,
            deadline_s=relay.deadline_s,
            link_mbit=profile.cluster.link_mbit,
            external_mbit=profile.cluster.external_mbit,
            oversubscription=profile.cluster.oversubscription,
            topology=Topology(relay.topology),
            max_failed=relay.max_failed,
            starts_flows=profile.control.flow_starter == "prefect",
        )
