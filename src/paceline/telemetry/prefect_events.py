"""Events of jobs for Prefect, whose automations act on them: ``paceline.job.STATE``.

They leave from a bounded queue on a thread of its own, so that nothing waits for Prefect. While it
is away a batch is sent again for two minutes; then it is dropped, as is what the queue cannot hold,
and the count is in the log. The audit history has every change all the same.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from paceline.errors import InvalidInput, PacelineError
from paceline.schemas import TrainingJob

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
AT_ONCE = 100  # in one call
RETRY_S = 15.0
ATTEMPTS = 8
LAST_S = 5.0  # for a call in progress when the process ends
NAMES = uuid.UUID("9c0d37f6-8a57-4a55-a1f5-0e4f41fcb3d2")  # one change is one event, sent twice too


class JobEvents:
    """Sends each job that is taken in as an event of its state."""

    def __init__(
        self, send: Callable[[Sequence[dict[str, Any]]], None], retry_s: float = RETRY_S
    ) -> None:
        self._send, self._retry_s = send, retry_s
        self._waiting: deque[dict[str, Any]] = deque()
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._send_on, name="job-events", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send once more what waits, for at most LAST_S."""
        self._over.set()
        self._news.set()
        self._thread.join(timeout=LAST_S)

    def take(self, job: TrainingJob) -> None:
        """Take in a job that was stored in another state; never waits."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1)
            return
        self._waiting.append(event_of(job))
        self._news.set()

    def _send_on(self) -> None:
        while not self._over.is_set():
            self._news.wait()
            self._news.clear()
            while self._waiting:
                self._send_batch(list(islice(self._waiting, AT_ONCE)))

    def _send_batch(self, batch: Sequence[dict[str, Any]]) -> None:
        for _ in range(ATTEMPTS):
            try:
                self._send(batch)
                break
            except InvalidInput as error:
                log.warning("Prefect refuses events: %s", error)
                if len(batch) == 1:
                    self._drop(1)
                    break
                for each in batch:  # the others reach it
                    self._send_batch([each])
                return
            except PacelineError as error:
                log.warning("%d events wait for Prefect: %s", len(self._waiting), error)
                if self._over.wait(self._retry_s):
                    self._drop(len(batch))
                    break
        else:
            self._drop(len(batch))
        for _ in batch:
            self._waiting.popleft()

    def _drop(self, count: int) -> None:
        self.dropped += count
        log.warning("%d events of jobs were not sent to Prefect since the start", self.dropped)


def event_of(job: TrainingJob) -> dict[str, Any]:
    """Return the event of the job's last change, as Prefect's REST API takes it."""
    spec, own = job.spec, f"paceline.job.{job.job_id}"
    flow_run = {
        "prefect.resource.id": f"prefect.flow-run.{job.flow_run_id}",
        "prefect.resource.role": "flow-run",
    }
    return {
        "id": str(uuid.uuid5(NAMES, f"{own} {job.state} {job.updated_at!r}")),
        "occurred": datetime.fromtimestamp(job.updated_at, UTC).isoformat(),
        "event": f"paceline.job.{job.state}",
        # automations select by the labels of a resource
        "resource": {
            "prefect.resource.id": own,
            "prefect.resource.name": spec.name or job.job_id,
            "paceline.team": spec.team,
            "paceline.project": spec.project,
            "paceline.model": spec.model_id,
        },
        "related": [flow_run] if job.flow_run_id else [],
        "payload": {
            "job_id": job.job_id,
            "name": spec.name,
            "state": job.state,
            "reason": job.reason,
            "team": spec.team,
            "project": spec.project,
            "model_id": spec.model_id,
            "version": spec.version,
            "submitted_by": job.submitted_by,
            "run_id": job.run_id,
        },
    }
