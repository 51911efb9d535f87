"""The engine of an installation without Slurm or Kubernetes: ``jobs.admission`` as an
``Engine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import Profile
from paceline.jobs.admission import Quota, decide, why_never
from paceline.jobs.engines.contract import Request, Standing
from paceline.jobs.placement import Host
from paceline.jobs.preemption import Reservation


def quotas_of(profile: Profile) -> dict[str, Quota]:
    """Return the quotas of ``profile``'s teams."""
    quotas = profile.jobs.quotas
    return {team: Quota(slots=each.slots, borrow=each.borrow) for team, each in quotas.items()}


class OwnAdmission:
    """Decides by ``admission.decide``. It keeps nothing: a reservation is the job's placement."""

    has_own_queue = False

    def __init__(self, profile: Profile) -> None:
        self._quotas = quotas_of(profile)
        self._reasons: Mapping[str, str] = {}

    def why_never(self, request: Request, hosts: Sequence[Host]) -> str:
        """Return why no state of these hosts could hold the gang, or ""."""
        return why_never(hosts, request.gang, self._quotas)

    def submit(self, request: Request) -> None:
        """Do nothing: ``status`` gets the waiting requests of each round."""

    def status(
        self,
        hosts: Sequence[Host],
        waiting: Sequence[Request],
        running: Sequence[Reservation],
        now: float,
    ) -> Mapping[str, Standing]:
        """Return which gangs start and which are preempted in this round."""
        made = decide(hosts, [each.gang for each in waiting], running, self._quotas, now)
        self._reasons = made.reasons
        granted = {
            job_id: Standing(phase="granted", placement=placed)
            for job_id, placed in made.admitted.items()
        }
        taken = {
            job_id: Standing(phase="revoked", reason=why) for job_id, why in made.preempted.items()
        }
        return granted | taken

    def reasons(self) -> Mapping[str, str]:
        """Return why the gangs of the last round wait."""
        return self._reasons

    def cancel(self, job_id: str) -> None:
        """Do nothing: what a job holds ends with its state."""
