"""What `paceline reproduce` says: what differs, and whether the same bits came out."""

from __future__ import annotations

from typing import Literal

from paceline.wire.base import Name, Record


class Differs(Record):
    """One thing that is not as it was when the run was made."""

    what: str
    then: str
    now: str
    decisive: bool  # it may change bits: nothing is trained unless asked to anyway
    where: str = ""
    do: str = ""  # what would make it the same


class Reproduction(Record):
    """A training job that was run again, beside the first one.

    ``checked`` compares without running anything.
    """

    run_id: str
    job_id: Name
    again_job_id: Name | None  # None where nothing was run
    status: Literal["identical", "different", "checked"]
    differences: tuple[Differs, ...]
    steps: int  # losses compared
    first_different_step: int | None = None
    loss_then: float | None = None  # at that step
    loss_now: float | None = None
    weights_then: str = ""
    weights_now: str = ""
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """Return whether losses and weights are the same, bit for bit."""
        return self.status == "identical"
