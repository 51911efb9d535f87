"""One rank of a training job with a parameter server: server, standby or worker, to its end.

Ranks 0 and 1 serve: one leads, the other holds every acknowledged update and takes over. The leader
reports as rank 0: it saves, evaluates, exports and emits the result. Workers hold no state that
cannot be computed again. Ranks join no process group, so the loss of the leader ends no other rank
(``launcher.served_attempt``).

``JobPolicy`` guards updates, counts steps, saves between steps and reports. A step is ``workers``
versions. As in the loop, a state is saved only after the next gradient has shown that its loss is
sane, and before that gradient changes the weights. The standby counts the same updates, but neither
judges, saves nor reports: it gets the guard's state with each update.

Exit code 76: no server holds the state any more; the job resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from paceline.config import TrainingSettings
from paceline.data import PlannedStream
from paceline.errors import CorruptData, PeerLost, TemporaryError
from paceline.training.checkpoint import Checkpointer, TrainState
from paceline.training.deadlines import Deadlines
from paceline.training.loop import (
    CPU,
    FOLLOWER_REPORT_S,
    STOPPED_EXIT,
    EventWriter,
    Group,
    Progress,
    QuarantineReporter,
    RankContext,
    RankIdentity,
    StepDecision,
    StepGuard,
    StepReport,
    StepReporter,
    StopFlag,
    checkpointer_of,
    device_of,
    evaluator_of,
    export_model,
    exporter_of,
    master_dtype,
    restore_checkpoint,
    result_of,
    save_last,
    tracer_of,
    uploaded_traces,
)
from paceline.training.metrics import BackgroundUpload
from paceline.training.parallel import SERVING, Mesh, MeshSpec, parallelise, require_ranks
from paceline.training.reproducibility import current_environment
from paceline.training.strategies.learner import Learner, copy_into
from paceline.training.strategies.port import (
    Array,
    BatchReport,
    Task,
    Terms,
    Update,
    UpdateLedger,
)
from paceline.training.strategies.rendezvous import Rendezvous
from paceline.training.strategies.server import ParameterServer
from paceline.training.strategies.worker import GradientComputer, Worker

POSITION = "parameter-server"  # kind of a checkpoint's position


class JobPolicy:
    """Judges, counts and saves; ``progress`` is the progress of the job."""

    def __init__(self, settings: TrainingSettings, workers: int, bad_before: int) -> None:
        self.settings, self.workers = settings, workers
        self.progress = Progress()
        self.quarantined: set[str] = set()
        self.guard = StepGuard(settings.guard, bad_before)
        self._saver: Checkpointer | None = None
        self._on_step: Callable[[StepReport], None] = lambda _: None
        self._due = False  # a save, at the next sane gradient
        self._sums = _no_sums()

    def attach(
        self,
        saver: Checkpointer,
        ledger: UpdateLedger,
        rate: Callable[[int], float],
        on_step: Callable[[StepReport], None],
    ) -> None:
        """Save and report from now on: this server leads."""
        self._saver, self._ledger, self._rate, self._on_step = saver, ledger, rate, on_step
        self._stepped_at = self._began = time.perf_counter()
        self.progress.tokens, self.progress.data_wait_s = 0, 0.0  # counted by this leader
        self.progress.extra.update(self._extra())

    def judge(self, report: BatchReport, norm: float) -> bool:
        """Return whether to apply the gradient; write a due save before it changes anything."""
        if not report.tokens:  # every sample of it is in quarantine
            return False
        loss, step = report.loss if math.isfinite(norm) else math.nan, self.progress.step
        decision = self.guard.decide(step=step, batch=report.batch, loss=loss, norm=norm)
        if decision is not StepDecision.APPLY:
            return False
        if self._due and self._saver is not None:
            position = position_of(self._ledger, self.workers)
            self._saver.save(step, position, self.progress.metrics())
            self.progress.stall_s, self._due = self._saver.stall_s, False
        return True

    def applied(self, update: Update) -> None:
        """Count the update; at the end of a step report it, and check whether a save is due."""
        report, sums, progress = update.report, self._sums, self.progress
        self.quarantined.update(report.quarantined)
        sums["waited_s"] += report.waited_s
        sums["staleness"].append(update.staleness)
        progress.tokens += int(report.tokens)
        if update.taken:
            sums["taken"] += 1
            sums["nats"] += report.loss * report.tokens
            sums["tokens"] += report.tokens
            sums["norm"] = max(sums["norm"], update.norm)
            if progress.first_loss is None:
                progress.first_loss = report.loss
        if update.version % self.workers == 0:
            self._sums = _no_sums()
            self._end_step(update.version, sums)

    def state(self) -> dict[str, Any]:
        """Return the JSON state for the standby."""
        return {
            "step": self.progress.step,
            "metrics": self.progress.metrics(),
            "skipped": self.progress.bad_steps,
            "sums": self._sums,
            **self._extra(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load what ``state`` returned."""
        self.progress = Progress.at(int(state["step"]), state["metrics"])
        self.progress.bad_steps = int(state["skipped"])
        self._sums = _no_sums() | state["sums"]
        self.resume(state)

    def resume(self, extra: dict[str, Any]) -> None:
        """Load guard and quarantine, of a checkpoint's ``extra`` or of ``state``."""
        self.guard.restore(extra["guard"])
        self.quarantined = set(extra["quarantined"])

    def _extra(self) -> dict[str, Any]:
        return {"guard": self.guard.state, "quarantined": sorted(self.quarantined)}

    def _end_step(self, version: int, sums: dict[str, Any]) -> None:
        progress, taken, tokens = self.progress, sums["taken"], sums["tokens"]
        progress.step = version // self.workers
        progress.bad_steps += taken < self.workers
        if tokens:
            progress.loss = sums["nats"] / tokens
        if self._saver is None:
            return
        now, waited_s = time.perf_counter(), sums["waited_s"] / self.workers
        progress.data_wait_s += waited_s
        progress.seconds = now - self._began
        seconds, self._stepped_at = now - self._stepped_at, now
        progress.extra.update(self._extra())
        if self._saver.due(progress.step, self.settings.steps):
            self._due = True
        figures = {
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "data_wait_s": waited_s,
            "staleness": sum(sums["staleness"]) / max(1, len(sums["staleness"])),
            "staleness_most": float(max(sums["staleness"], default=0)),
        }
        self._on_step(
            StepReport(
                step=progress.step,
                loss=progress.loss if progress.loss is not None else math.nan,
                grad_norm=sums["norm"] if taken else math.nan,
                learning_rate=self._rate(version),
                applied=taken > 0,
                figures=figures,
            )
        )


def _no_sums() -> dict[str, Any]:
    """Return the sums over the updates of a step, as JSON values."""
    return {
        "nats": 0.0, "tokens": 0.0, "norm": 0.0, "staleness": [], "waited_s": 0.0, "taken": 0
    }  # fmt: skip


def position_of(ledger: UpdateLedger, workers: int) -> dict[str, Any]:
    """Return the position for a checkpoint: the number of workers, and the ledger."""
    return {"kind": POSITION, "workers": workers, "ledger": ledger.to_json()}


log = logging.getLogger(__name__)


def run_role(
    rank_context: RankContext, place: RankIdentity, events: EventWriter, stop: StopFlag
) -> int:
    """Run the role of ``place`` in an asynchronous job; return the exit code."""
    settings = rank_context.job.settings
    workers = require_ranks(settings, place.world_size)
    events.set_phase("joining")
    meeting = Rendezvous.of(place)
    terms = Terms(place.gang_key, workers, settings.steps, settings.synchrony.max_staleness)
    if place.rank >= SERVING:
        return _work(rank_context, place, events, meeting, terms)
    with BackgroundUpload(uploaded_traces(rank_context, events)) as uploaded:
        policy = JobPolicy(settings, workers, len(rank_context.job.skip_batches))
        model = rank_context.model.to(master_dtype(settings))
        learner = Learner(
            model, settings, workers, tracer_of(rank_context, CPU, place.rank, uploaded)
        )
        server = ParameterServer(learner, terms, meeting, policy)
        with server.listening(place.host) as address:
            meeting.publish(place.rank, address)
            return _ServingRank(rank_context, place, events, stop, server, policy).run(meeting)


class _ServingRank:
    """A rank that serves: it leads, or follows until it takes over."""

    def __init__(
        self,
        rank_context: RankContext,
        place: RankIdentity,
        events: EventWriter,
        stop: StopFlag,
        server: ParameterServer,
        policy: JobPolicy,
    ) -> None:
        self._rank_context, self._place, self._events, self._stop = (
            rank_context,
            place,
            events,
            stop,
        )
        self._server, self._policy, self._workers = server, policy, server.terms.workers
        model, optimizer = server.learner.model, server.learner.optimizer
        self._state = TrainState([model], optimizer, Group(), Mesh(MeshSpec()))

    def run(self, meeting: Rendezvous) -> int:
        """Serve to the end of the job; return the exit code."""
        if self._place.rank == 0:
            self._events.set_phase("resuming")
            self._resume()
            self._server.lead(1)
        elif self._follow(meeting) == "released":
            return 0
        return self._lead()

    def _follow(self, meeting: Rendezvous) -> str:
        self._events.set_phase("following")
        deadline_s = Deadlines.of_job(self._rank_context.job).start_s  # rank 0 is still loading
        reported = False

        def on_frame() -> None:
            nonlocal reported
            step = self._policy.progress.step
            if not reported:
                reported = True
                self._events.emit("started", step, role="standby")
            self._events.set_phase("step", step)

        return self._server.follow(meeting.servers, deadline_s, on_frame)

    def _resume(self) -> None:
        """Restore the newest healthy checkpoint, if there is one."""
        progress, position = restore_checkpoint(self._rank_context, self._state, self._events)
        if position is None:
            return
        if position.get("kind") != POSITION:
            raise CorruptData(
                "checkpoint is of a job without a parameter server",
                got=f"step {progress.step}",
                where=self._rank_context.generations.url,
            )
        before, workers, server = int(position["workers"]), self._workers, self._server
        saved = UpdateLedger.from_json(position["ledger"], server.terms.max_staleness)
        server.ledger = saved.of_workers(before, workers)
        if before != workers:
            log.warning("shares are cut anew workers=%d before=%d", workers, before)
        progress.step = server.ledger.version // workers
        self._policy.progress = progress
        self._policy.resume(progress.extra)

    def _lead(self) -> int:
        rank_context, events, server, policy = (
            self._rank_context,
            self._events,
            self._server,
            self._policy,
        )
        events.take(dataclasses.replace(self._place, rank=0))
        progress, learner = policy.progress, server.learner
        environment = current_environment(rank_context.job.settings.threads_per_rank)
        with contextlib.ExitStack() as stack:
            exporter = stack.enter_context(exporter_of(rank_context, 0))
            resumed_from = progress.step
            self._state.extra = progress.extra
            saver = checkpointer_of(rank_context, self._state, environment)
            stack.callback(saver.close)
            evaluation, held_out = _Evaluation(rank_context, server, events), dict[str, float]()
            reporter = StepReporter(
                events, saver, progress, 0, policy, exporter, rank_context.store
            )

            def on_step(report: StepReport) -> None:
                nonlocal held_out
                found, held_out = held_out, {}
                progress.held_out = found or progress.held_out
                reporter(dataclasses.replace(report, held_out=found))
                evaluation.ask(report.step)

            def on_tick() -> bool:
                nonlocal held_out
                with server.changed:  # the lock is not stuck
                    events.set_phase("step", progress.step)
                held_out = evaluation.run_asked() or held_out
                return self._stop()

            position = position_of(server.ledger, self._workers)
            port, read_bytes = exporter.port, rank_context.store.read_bytes
            events.emit(
                "resumed", resumed_from, position=position, metrics_port=port, read_bytes=read_bytes
            )
            policy.attach(saver, server.ledger, learner.rate, on_step)
            server.open()
            self._stop.listening = True
            events.set_phase("step", progress.step)
            if not server.until_done(on_tick=on_tick):
                with server.changed:  # no update from here on
                    server.end(PeerLost("parameter server was asked to stop"))
                    progress.stopped = True
                    unsaved = self._save_last(saver, reporter)
                if not unsaved:
                    message = "stopped, state saved"
                    events.emit("failed", progress.step, code="Stopped", message=message)
                return unsaved or STOPPED_EXIT
            if progress.step > resumed_from or not saver.kept():
                progress.held_out = evaluation.run() or progress.held_out
                self._save_last(saver, reporter)
            with events.phase("exporting"):
                model = export_model(rank_context, self._state, 0, progress.step)
            done = result_of(
                rank_context,
                progress,
                saver,
                resumed_from=resumed_from,
                quarantined=policy.quarantined,
                environment=environment,
            )
            events.emit("result", progress.step, **model, **done)
        return 0

    def _save_last(self, saver: Any, reporter: StepReporter) -> int:
        """Save the present state; the ledger records the finished part of a step."""
        position = position_of(self._server.ledger, self._workers)
        unsaved = save_last(saver, self._policy.progress, position, self._events)
        reporter.report_saved()
        return unsaved


class _Evaluation:
    """Evaluates held-out loss on a copy of the server's weights, while they continue to change."""

    def __init__(
        self, rank_context: RankContext, server: ParameterServer, events: EventWriter
    ) -> None:
        during = functools.partial(events.phase, "evaluating")
        self._evaluator = evaluator_of(rank_context, Mesh(MeshSpec()), during)
        self._rank_context, self._server, self._asked = rank_context, server, False
        if self._evaluator is not None:
            model, settings = copy.deepcopy(server.learner.model), rank_context.job.settings
            self._parallel = parallelise(model, Mesh(MeshSpec()), settings, rank_context.workload)
            self._parameters = [each for each in model.parameters() if each.requires_grad]

    def ask(self, step: int) -> None:
        """Have ``run_asked`` evaluate soon if ``step`` is due for an evaluation."""
        every = self._rank_context.job.settings.evaluate_every_steps
        self._asked |= bool(every) and step % every == 0

    def run_asked(self) -> dict[str, float]:
        """Return the metrics of an evaluation that was asked for, else {}."""
        asked, self._asked = self._asked, False
        try:
            return self.run() if asked else {}
        except TemporaryError as error:
            log.warning("evaluation was left out: %s", error.one_line())
            return {}

    def run(self) -> dict[str, float]:
        """Return the metrics of the present weights; {} where evaluation is off."""
        if self._evaluator is None:
            return {}
        with self._server.changed:
            copy_into(self._parameters, self._server.learner.weights())
        return self._evaluator.evaluate(self._parallel, self._rank_context.workload, Group(), CPU)


def _work(
    rank_context: RankContext,
    place: RankIdentity,
    events: EventWriter,
    meeting: Rendezvous,
    terms: Terms,
) -> int:
    """Compute gradients of one share until it is complete."""
    settings = rank_context.job.settings

    def open_share(task: Task) -> PlannedStream:
        if task.sequence > 1 and task.position is None:
            raise CorruptData("share has no position to go on from", got=f"batch {task.sequence}")
        return rank_context.stream(task.worker, terms.workers, task.position)

    device, share = device_of(), place.rank - SERVING
    compute = GradientComputer(
        rank_context.model, rank_context.workload, settings, terms.workers, open_share, device
    )
    with contextlib.ExitStack() as stack:
        exporter = stack.enter_context(exporter_of(rank_context, place.rank))
        stack.callback(compute.close)
        uploaded = stack.enter_context(BackgroundUpload(uploaded_traces(rank_context, events)))
        tracer = tracer_of(rank_context, device, place.rank, uploaded)
        stack.callback(tracer.close)
        quarantine = QuarantineReporter()
        pushed_at, reported_at = time.perf_counter(), 0.0

        def traced(task: Task, weights: Array) -> tuple[Array, BatchReport]:
            tracer.begin(task.sequence)  # until the gradient is applied
            return compute(task, weights)

        def on_push(task: Task) -> None:
            nonlocal pushed_at, reported_at
            tracer.end(task.sequence)
            events.set_phase("step", task.sequence)
            now, report = time.perf_counter(), compute.report
            seconds, pushed_at = now - pushed_at, now
            figures = {"step_seconds": seconds, "data_wait_s": report.waited_s}
            nan = math.nan
            step = StepReport(task.sequence, report.loss, nan, nan, figures=figures)
            exporter.take(step, len(report.quarantined))
            bad = rank_context.cache.quarantined
            if now - reported_at >= FOLLOWER_REPORT_S or quarantine.has_new(bad):
                reported_at = now
                data = {"loss": report.loss, "share": share, **figures, **quarantine.new_in(bad)}
                events.emit("step", task.sequence, **data, read_bytes=rank_context.store.read_bytes)

        def on_frame() -> None:  # a live server resets the deadline of the step
            if worker.staleness:
                events.set_phase("step")

        away_s = Deadlines.of_job(rank_context.job).start_s
        worker = Worker(
            share, meeting.servers, terms, compute, away_s=away_s, on_frame=on_frame
        )  # fmt: skip
        events.set_phase("first step")  # fetches shards; the server may still be loading
        worker.run(traced, on_push)
    return 0
