"""A client whose jobs follow known loss curves, for sweeps; each look at a job makes steps."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.config import Endpoints, PriceSettings, Profile, Runtime, Secrets, load_profile
from paceline.errors import Conflict, InvalidProfile
from paceline.schemas import (
    JobReport,
    JobState,
    JobUsage,
    JobView,
    SubmitJob,
    TrainingCosts,
    TrainingJob,
    new_run_id,
)

STEPS = 320
SPACE = """
[space."training.learning_rate"]
kind = "float"
low = 1e-5
high = 1e-1
log = true
[space."training.weight_decay"]
kind = "float"
low = 0.0
high = 0.5
"""


def final_loss(given: dict[str, Any]) -> float:
    """The known function: its lowest is 1.0, at a learning rate of 1e-3 without decay."""
    rate, decay = given["training.learning_rate"], given["training.weight_decay"]
    return 1.0 + 0.5 * (math.log10(rate) + 3) ** 2 + 0.1 * decay


class Queue:
    """A client whose jobs make ``a_look`` steps whenever they are looked at."""

    a_look = STEPS // 2

    def __init__(self) -> None:
        self._runtime = Runtime(
            profile=Profile(), state_dir=Path(), endpoints=Endpoints(), is_login=True,
            secrets=Secrets(),
        )  # fmt: skip
        self.coordinator, self.jobs = self, dict[str, TrainingJob]()
        self.keys: list[str] = []
        self.failing: set[str] = set()
        self.refused: set[str] = set()
        self.looks_left = math.inf
        self.most_open = 0
        self.prices = PriceSettings()
        self.trial_price: float | None = None  # of a whole one

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None: ...

    def installation(self) -> Any:
        return SimpleNamespace(profile=load_profile("embedded").model_dump(mode="json"))

    def submit(self, model: str, version: str, url: str, *, key: str, **more: Any) -> TrainingJob:
        if key in self.refused:
            raise InvalidProfile("these settings do not go together")
        self.keys.append(key)
        job_id = f"tj-{abs(hash(key)) % 16**12:012x}"
        spec = SubmitJob.model_validate(
            {"model_id": model, "version": version, "data_snapshot": url, **more}
        )
        if job_id not in self.jobs:
            self.jobs[job_id] = TrainingJob(
                job_id=job_id, submission_id="0" * 64, spec=spec, run_id=new_run_id(),
                state=JobState.QUEUED, created_at=0.0, updated_at=0.0,
            )  # fmt: skip
        if self.jobs[job_id].spec != spec:
            raise Conflict("the idempotency key belongs to another submission")
        self.most_open = max(self.most_open, sum(not e.state.is_final for e in self.jobs.values()))
        return self.jobs[job_id]

    def job(self, job_id: str) -> TrainingJob:
        self.looks_left -= 1
        if self.looks_left < 0:
            raise KeyboardInterrupt
        job = self.jobs[job_id]
        if job.state.is_final:
            return job
        step = min(STEPS, (job.report.step if job.report else 0) + self.a_look)
        final, left = final_loss(job.spec.parameters), 1 - step / STEPS
        loss = final + 3 * left**3 + 0.2 * left * math.sin(7 * final)  # the curves cross
        report = JobReport(at=0.0, step=step, steps=STEPS, metrics={"loss": loss, "score": -loss})
        state, reason = JobState.SUCCEEDED if step == STEPS else JobState.RUNNING, ""
        if job.spec.name in self.failing and step > STEPS / 2:
            state, reason = JobState.FAILED, "a rank was killed"
        new = {"state": state, "report": report, "reason": reason}
        self.jobs[job_id] = job.model_copy(update=new)
        return self.jobs[job_id]

    def job_view(self, job_id: str) -> JobView:
        job, steps = self.jobs[job_id], getattr(self.jobs[job_id].report, "step", 0)
        price = self.trial_price and self.trial_price * steps / STEPS
        held = JobUsage(attempt=1, accelerators={"h100": 1}, since=0.0)
        job = job.model_copy(update={"usage": (held,) if steps else ()})
        return JobView(job=job, spent=price, currency="EUR")

    def training_costs(self) -> TrainingCosts:
        return TrainingCosts(prices=self.prices, usages=())

    def change_job(self, job_id: str, what: str) -> None:
        assert what == "cancel"
        if self.jobs[job_id].state.is_final:
            raise Conflict("it has ended")
        self.jobs[job_id] = self.jobs[job_id].model_copy(update={"state": JobState.CANCELLED})

    @property
    def steps_made(self) -> int:
        return sum(each.report.step for each in self.jobs.values() if each.report)
