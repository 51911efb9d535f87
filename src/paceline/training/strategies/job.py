"""One rank of a training job with a parameter server: server, standby or worker, to its end.

Ranks 0 and 1 serve (``leader``): one leads, the other holds every acknowledged update; a restarted
rank follows the present leader. Workers hold no state that cannot be computed again. Ranks join no
process group, so the failure of one is no failure of another (``launcher.independent_restart``).

Exit code 76: no server holds the state any more; the job resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from paceline.data import PlannedStream, open_stream
from paceline.errors import CorruptData
from paceline.training.identity import stream_seed
from paceline.training.loop.event_writer import (
    FOLLOWER_BEAT_S,
    EventWriter,
    QuarantineReporter,
    RankIdentity,
)
from paceline.training.loop.loop import StepReport
from paceline.training.loop.rank_process import StopFlag
from paceline.training.loop.rank_setup import device_of, exporter_of, tracer_of, uploaded_traces
from paceline.training.loop.starting_state import RankContext
from paceline.training.metrics import BackgroundUpload, Exporter, Tracer
from paceline.training.strategies import SERVING, require_ranks
from paceline.training.strategies.leader import ServingRank
from paceline.training.strategies.protocol import BatchReport, ServerTerms
from paceline.training.strategies.rendezvous import RendezvousStore
from paceline.training.strategies.worker import BatchTask, GradientComputer, Worker


def run_part(its: RankContext, place: RankIdentity, voice: EventWriter, stop: StopFlag) -> int:
    """Run the role of ``place`` in an asynchronous job; return the exit code."""
    settings = its.job.settings
    workers = require_ranks(settings, place.world_size)
    voice.enter("joining")
    meeting = RendezvousStore(place)
    terms = ServerTerms(meeting.key, workers, settings.steps, settings.synchrony.max_staleness)
    if place.rank < SERVING:
        return ServingRank(its, place, voice, stop, meeting, terms).run()
    return _work(its, place, voice, meeting, terms)


def _work(
    its: RankContext,
    place: RankIdentity,
    voice: EventWriter,
    meeting: RendezvousStore,
    terms: ServerTerms,
) -> int:
    job, workers = its.job, terms.workers

    def opened(task: BatchTask) -> PlannedStream:
        if task.sequence > 1 and task.position is None:
            raise CorruptData("share has no position to go on from", got=f"batch {task.sequence}")
        return open_stream(
            its.snapshot,
            "train",
            its.cache,
            job.data,
            context=its.context,
            global_batch=job.settings.batch_sequences,
            seed=stream_seed("job", job.settings.seed),
            rank=task.worker,
            world_size=workers,
            position=task.position,
            skip=frozenset(job.skip_batches),
            readers=job.data_readers,
        )

    with contextlib.ExitStack() as stack:
        exporter = stack.enter_context(exporter_of(job, place.rank))
        device = device_of()
        compute = GradientComputer(its.model, its.workload, job.settings, workers, opened, device)
        stack.callback(compute.close)
        uploaded = BackgroundUpload(uploaded_traces(its, voice))
        stack.callback(uploaded.close)
        tracer = tracer_of(its, device, place.rank, uploaded)
        stack.callback(tracer.close)
        telling = _WorkerReporter(voice, exporter, compute, its.cache.quarantined, tracer)
        worker = Worker(
            place.rank - SERVING,
            meeting.servers,
            terms,
            compute.count,
            compute.dtype,
            rank=place.rank,
            away_s=job.settings.guard.start_deadline_s,
            on_word=telling.heard,
        )
        voice.enter("first step")  # fetches shards; the server may still be loading
        worker.run(telling.compute, telling)
    return 0


class _WorkerReporter:
    """Reports a worker's pushes at intervals and its contact with the server; traces steps."""

    def __init__(
        self,
        voice: EventWriter,
        exporter: Exporter,
        compute: GradientComputer,
        quarantined: Mapping[str, str],
        tracer: Tracer,
    ) -> None:
        self._voice, self._exporter, self._compute = voice, exporter, compute
        self._tracer = tracer
        self._quarantined, self._news = quarantined, QuarantineReporter()
        self._said_at = 0.0
        self._pushed_at = time.perf_counter()
        self._stepping = False

    def heard(self) -> None:
        """Record a frame from a server: a live server resets the deadline of the step."""
        if self._stepping:
            self._voice.enter("step")

    def compute(
        self, task: BatchTask, weights: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], BatchReport]:
        """Return gradient and note of the task; its trace continues until they are applied."""
        self._tracer.begin(task.sequence)
        return self._compute(task, weights)

    def __call__(self, task: BatchTask) -> None:
        """Record that the task's gradient is applied."""
        self._tracer.end(task.sequence)
        self._stepping = True
        self._voice.enter("step", task.sequence)
        now = time.perf_counter()
        seconds, self._pushed_at = now - self._pushed_at, now
        note = self._compute.note
        report = StepReport(
            step=task.sequence,
            loss=note.loss,
            grad_norm=math.nan,
            learning_rate=math.nan,
            seconds=seconds,
            tokens_per_second=note.tokens / seconds if seconds else 0.0,
            data_wait_s=note.waited_s,
            figures={"step_seconds": seconds, "data_wait_s": note.waited_s},
        )
        self._exporter.take(report, len(note.quarantined))
        if now - self._said_at < FOLLOWER_BEAT_S and not self._news.any_in(self._quarantined):
            return
        self._said_at = now
        data: dict[str, Any] = {"loss": note.loss, "share": task.worker, **report.figures}
        data |= self._news.of(self._quarantined)
        self._voice.say("step", task.sequence, **data)
