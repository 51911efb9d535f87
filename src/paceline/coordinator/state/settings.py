"""The few numbers that decide when the coordinator loses patience."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import Profile


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Intervals and limits, all in seconds of the monotonic clock unless they say otherwise."""

    beat_s: float = 0.5
    lost_after_beats: int = 6
    suspect_beats: float = 2.0  # silence that confirms a peer's word that a worker is gone
    find_leader_s: float = 5.0  # what agents may need to find a new one: a round of dead endpoints
    return_grace_s: float = 60.0  # how long a dead target may take to come back
    deadline_s: float = 600.0  # one whole deployment
    beats_per_second: float = 1000.0  # beyond this the interval grows with the fleet
    link_mbit: float = 80.0  # of a target that has not registered yet, for the estimate only
    external_mbit: float | None = None  # of the origin; None: as fast as the slowest worker
    oversubscription: float = 1.0  # of the racks' uplinks
    deadline_factor: float = 3.0  # of the predicted time, where that is longer than the deadline
    replan_s: float = 0.25  # between two plans of one deployment, so that a burst makes one,
    replanned_per_second: float = 1000.0  # and longer in a large fleet, where a plan takes longer
    return_gap_pieces: int = 8  # who comes back with a larger gap than this goes to the tail
    slow_look_s: float = 0.45  # over how long an edge is looked at; a beat and a little less
    slow_s: float = 0.9  # of looks in a row that find it far too slow, or twice that a little
    slow_ratio: float = 0.5  # of the rate that the plan expects, and of what others' edges carry
    most_demoted: float = 0.1  # of a fleet may be called slow, and as many corrupting, but one may
    corrupt_pieces: int = 4  # of one sender beyond chance; a reader leaves a stream at four
    corrupt_share: float = 0.02  # of what it sent; one in a hundred may be the network's doing
    corrupt_factor: float = 5.0  # times the others' median share
    prepare_s: float = 3.0  # that a switch waits for the rest once a quorum is ready
    switch_s: float = 30.0  # to find a quorum that is ready, and then for it to switch
    kept_closed: int = 100  # closed deployments that are kept, the newest; keys live as long
    kept_closed_s: float = 24 * 3600.0  # and those that closed since
    kept_at_most: int = 1_000  # whatever their age
    open_at_most: int = 1_000  # deployments under way
    kept_bytes_at_most: int = 2**31  # of all deployments that are kept, and closed ones half of it
    workers_at_most: int = 50_000  # that are known, the lost ones too
    kept_lost_s: float = 30 * 86_400.0  # lost workers, of no deployment that is kept
    kept_audit_events: int = 1_000_000  # in the audit history, the newest
    starts_flows: bool = False  # who asks without a flow run gets one, see service/flow_starter

    @property
    def lost_s(self) -> float:
        """Return how long a loss may go unnoticed."""
        return self.lost_after_beats * self.beat_s

    def deadline_of(self, predicted_s: float) -> float:
        """Return how long a deployment may take that should take ``predicted_s``."""
        return max(self.deadline_s, self.deadline_factor * predicted_s)

    def replan_interval_s(self, workers: int) -> float:
        """Return how long a plan for so many workers stands at least."""
        return max(self.replan_s, workers / self.replanned_per_second)

    @classmethod
    def of(cls, profile: Profile) -> Patience:
        """Return what ``profile`` asks for."""
        relay = profile.relay
        return cls(
            beat_s=relay.beat_s,
            lost_after_beats=relay.lost_after_beats,
            deadline_s=relay.deadline_s,
            link_mbit=profile.cluster.link_mbit,
            external_mbit=profile.cluster.external_mbit,
            oversubscription=profile.cluster.oversubscription,
            starts_flows=profile.control.flow_starter == "prefect",
        )
