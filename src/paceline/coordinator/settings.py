"""The few numbers that decide when the coordinator loses patience."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Intervals and limits, all in seconds of the monotonic clock unless they say otherwise."""

    beat_s: float = 0.5
    lost_after_beats: int = 6
    suspect_beats: float = 2.0  # silence that confirms a peer's word that a worker is gone
    return_grace_s: float = 60.0  # how long a dead target may take to come back
    deadline_s: float = 600.0  # one whole deployment
    beats_per_second: float = 250.0  # beyond this the interval grows with the fleet
    link_mbit: float = 80.0  # of a target that has not registered yet, for the estimate only

    @property
    def lost_s(self) -> float:
        """Return how long a loss may go unnoticed."""
        return self.lost_after_beats * self.beat_s

    @classmethod
    def of(cls, profile: Profile) -> Patience:
        """Return what ``profile`` asks for."""
        relay = profile.relay
        return cls(
            beat_s=relay.beat_s,
            lost_after_beats=relay.lost_after_beats,
            deadline_s=relay.deadline_s,
            link_mbit=profile.cluster.link_mbit,
        )
