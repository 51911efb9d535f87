"""A serving rank of an asynchronous job: it leads, or follows until it takes over.

The leader reports as rank 0: it saves, evaluates, exports and emits the result. The server that
survives the other continues from the last acknowledged update, with the same files.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import nn

from paceline.config import TrainingSettings
from paceline.errors import CorruptData, PacelineError, PeerLost, TemporaryError
from paceline.training.checkpoint import Checkpointer, TrainState, WholeModel
from paceline.training.loop.evaluating import Evaluator
from paceline.training.loop.event_writer import EventWriter, QuarantineReporter, RankIdentity
from paceline.training.loop.group import Group
from paceline.training.loop.loop import CPU, Progress, StepReport
from paceline.training.loop.optimizer import master_dtype
from paceline.training.loop.rank_process import STOPPED_EXIT, StopFlag
from paceline.training.loop.rank_setup import (
    checkpointer_of,
    evaluator_of,
    exported,
    exporter_of,
    result_of,
    resumed,
    save_last,
    tracer_of,
    uploaded_traces,
)
from paceline.training.loop.starting_state import RankContext
from paceline.training.metrics import BackgroundUpload, Exporter, Tracer
from paceline.training.parallel import parallelise
from paceline.training.parallel.mesh import Mesh, MeshSpec
from paceline.training.reproducibility import current
from paceline.training.strategies.follower import follow
from paceline.training.strategies.learner import Learner, put
from paceline.training.strategies.protocol import ServerTerms
from paceline.training.strategies.rendezvous import RendezvousStore
from paceline.training.strategies.saver import POSITION, JobUpdatePolicy, position_of
from paceline.training.strategies.server import ParameterServer, ServerThread
from paceline.training.strategies.update_ledger import UpdateLedger

log = logging.getLogger(__name__)

Weights = npt.NDArray[Any]


class BackgroundEvaluation:
    """Evaluates held-out loss on a copy of the server's weights, while they continue to change.

    One evaluation runs at a time; one that is due meanwhile is skipped. The last one, of the final
    weights, is waited for. Without an ``evaluator`` nothing is evaluated.
    """

    def __init__(self, evaluator: Evaluator | None, model: nn.Module, its: RankContext) -> None:
        self._evaluator, self._workload, self._settings = evaluator, its.workload, its.job.settings
        self._thread: threading.Thread | None = None
        self._found: dict[str, float] = {}
        self._failed: PacelineError | None = None
        if evaluator is not None:
            scratch = copy.deepcopy(model)
            self._parallel = parallelise(scratch, Mesh(MeshSpec()), self._settings, its.workload)
            self._parameters = [each for each in scratch.parameters() if each.requires_grad]

    def begin(self, step: int, weights: Callable[[], Weights]) -> None:
        """Evaluate ``weights()`` in a thread if ``step`` is due for an evaluation."""
        every = self._settings.evaluate_every_steps
        if self._evaluator is None or not every or step % every or step == self._settings.steps:
            return  # ``last`` evaluates the final weights
        if self._thread is not None:
            return
        put(self._parameters, weights())
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)
        self._thread.start()

    def take(self, progress: Progress) -> dict[str, float]:
        """Return the metrics of an evaluation that ended, once, and store them in ``progress``.

        Raises its error, unless the error is temporary.
        """
        if self._thread is None or self._thread.is_alive():
            return {}
        self._thread.join()
        self._thread = None
        failed, self._failed = self._failed, None
        if isinstance(failed, TemporaryError):
            log.warning("evaluation was left out: %s", failed.one_line())
            return {}
        if failed is not None:
            raise failed
        progress.held_out = self._found
        return self._found

    def last(self, weights: Weights, progress: Progress) -> None:
        """Evaluate the final weights in this thread; the result is in ``progress``."""
        if self._evaluator is None:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        put(self._parameters, weights)
        progress.held_out = self._evaluate()

    def close(self) -> None:
        """Abandon an evaluation that still runs: it changes nothing but its own copy."""
        self._thread = None

    def _run(self) -> None:
        try:
            self._found = self._evaluate()
        except PacelineError as error:
            self._failed = error

    def _evaluate(self) -> dict[str, float]:
        assert self._evaluator is not None
        return self._evaluator.evaluate(self._parallel, self._workload, Group(), CPU).metrics()


MEET_AGAIN_S = 5.0  # plus three silences: for a restarted rank to find the leader


class ServingRank:
    """A rank that serves: it leads, or follows until it takes over."""

    def __init__(
        self,
        its: RankContext,
        place: RankIdentity,
        voice: EventWriter,
        stop: StopFlag,
        meeting: RendezvousStore,
        terms: ServerTerms,
    ) -> None:
        self._its, self._place, self._voice, self._stop = its, place, voice, stop
        self._meeting, self._terms = meeting, terms
        self._job, self._settings = its.job, its.job.settings
        self._model = its.model.to(master_dtype(self._settings))
        self._uploaded = BackgroundUpload(uploaded_traces(its, voice))
        self._tracer = tracer_of(its, CPU, place.rank, self._uploaded)
        self._learner = _Traced(self._model, self._settings, terms.workers, self._tracer)
        self._steward = JobUpdatePolicy(self._settings, terms.workers, len(self._job.skip_batches))
        self._server = ParameterServer(
            self._learner,
            terms,
            meeting.claims,
            f"rank-{place.rank}-{uuid.uuid4().hex}",  # unique: a rank may be restarted
            steward=self._steward,
            ready=False,  # no step before saver and reporter exist
        )
        self._state = TrainState(
            WholeModel(self._model), self._learner.optimizer, Group(), Mesh(MeshSpec())
        )

    def run(self) -> int:
        """Serve to the end of the job; return the exit code."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._uploaded.close)
            serving = stack.enter_context(
                ServerThread(self._server, (self._meeting.host, 0), math.inf)
            )
            self._meeting.publish(self._place.rank, serving.address)
            if not self._begin() and self._follow() == "released":
                return 0
            return self._lead(serving)

    def _begin(self) -> bool:
        """Lead from the last checkpoint if this is rank 0 and no server has led yet."""
        if self._place.rank != 0 or self._meeting.claims.claimed(1):
            return False
        self._voice.enter("resuming")
        self._resume()
        self._server.lead(1)
        return True

    def _follow(self) -> str:
        self._voice.enter("following")
        patience = 3 * self._terms.silence_s + MEET_AGAIN_S
        if not self._meeting.claims.claimed(1):
            patience = self._settings.guard.start_deadline_s  # rank 0 is still loading
        told = False

        def heard() -> None:
            nonlocal told
            if not told:
                told = True
                step = self._steward.progress.step
                self._voice.say("started", step, role="standby", holds_state=True)
            self._voice.enter("step", self._steward.progress.step)

        return follow(self._server, self._meeting.servers, patience, heard)

    def _resume(self) -> None:
        """Restore the newest healthy checkpoint, if there is one."""
        progress, position = resumed(self._its, self._state, self._voice)
        if position is None:
            return
        if position.get("kind") != POSITION:
            raise CorruptData(
                "checkpoint is of a job without a parameter server",
                got=f"step {progress.step}",
                where=self._its.generations.url,
            )
        before, workers = int(position["workers"]), self._terms.workers
        saved = UpdateLedger.from_json(position["ledger"], self._terms.max_staleness)
        ledger = self._server.ledger = saved.of_workers(before, workers)
        if before != workers:
            log.warning(
                "shares are cut anew workers=%d before=%d step=%d before=%d",
                workers, before, ledger.version // workers, progress.step,
            )  # fmt: skip
        progress.step = ledger.version // workers
        self._steward.progress = progress
        self._steward.guard.restore(progress.extra["guard"])
        self._steward.quarantined = set(progress.extra["quarantined"])

    def _lead(self, serving: ServerThread) -> int:
        its, job, settings = self._its, self._job, self._settings
        voice, server, steward = self._voice, self._server, self._steward
        voice.take(dataclasses.replace(self._place, rank=0))
        progress = steward.progress
        environment = current(settings.threads_per_rank).model_dump(mode="json")
        with contextlib.ExitStack() as stack:
            exporter = stack.enter_context(exporter_of(job, 0))
            resumed_from = progress.step
            self._state.extra = progress.extra
            saver = checkpointer_of(its, self._state, environment)
            stack.callback(saver.close)
            beside = BackgroundEvaluation(evaluator_of(its, Mesh(MeshSpec())), self._model, its)
            stack.callback(beside.close)
            telling = _LeaderReporter(voice, saver, steward, exporter, beside, self._learner)
            voice.say(
                "resumed",
                resumed_from,
                position=position_of(server.ledger, self._terms.workers),
                metrics_port=exporter.port,
            )
            steward.led_by(saver, lambda: server.ledger, self._learner.rate, telling)
            server.open()
            self._stop.listening = True
            voice.enter("step", progress.step)
            if not serving.until_done(on_tick=self._tick):
                return self._stopped(serving, saver, telling)
            if progress.step > resumed_from or not saver.kept():
                with voice.phase("evaluating"):
                    beside.last(self._learner.weights(), progress)
                self._save_last(saver, telling)
            with voice.phase("exporting"):
                model = exported(its, self._state, 0)
            done = result_of(
                its,
                steward.progress,
                saver,
                resumed_from=resumed_from,
                quarantined=steward.quarantined,
                environment=environment,
            )
            voice.say("result", steward.progress.step, **model, **done)
            server.release()
        return 0

    def _tick(self) -> bool:
        """Report that the lock is not stuck; return whether a stop is requested."""
        with self._server.changed:
            self._voice.enter("step", self._steward.progress.step)
        return self._stop()

    def _stopped(self, serving: ServerThread, saver: Checkpointer, telling: _LeaderReporter) -> int:
        progress = self._steward.progress
        progress.stopped = True
        with self._server.changed:  # no update from here on
            step, self._server.epoch = progress.step, 0
            unsaved = self._save_last(saver, telling)
        serving.abandon(PeerLost("parameter server was asked to stop"))
        if unsaved:
            return unsaved
        self._voice.say("failed", step, code="Stopped", message="stopped, state saved")
        return STOPPED_EXIT

    def _save_last(self, saver: Checkpointer, telling: _LeaderReporter) -> int:
        """Save the present state; the ledger records the finished part of a step."""
        position = position_of(self._server.ledger, self._terms.workers)
        unsaved = save_last(saver, self._steward.progress, position, self._voice)
        telling.tell_saved()
        return unsaved


class _Traced(Learner):
    """A learner that profiles the first update of each requested step.

    Updates come from several threads, one after another; each begins and ends on its own.
    """

    def __init__(
        self, model: nn.Module, settings: TrainingSettings, workers: int, tracer: Tracer
    ) -> None:
        super().__init__(model, settings, workers)
        self._tracer = tracer

    def apply(self, gradient: npt.NDArray[Any], version: int, norm: float | None = None) -> float:
        """Take the step that makes ``version``; see ``Learner``."""
        step = (version - 1) // self._workers + 1
        self._tracer.begin(step)
        try:
            return super().apply(gradient, version, norm)
        finally:
            self._tracer.end(step)


class _LeaderReporter:
    """Reports each step of the job and starts its evaluations; called under the server's lock."""

    def __init__(
        self,
        voice: EventWriter,
        saver: Checkpointer,
        steward: JobUpdatePolicy,
        exporter: Exporter,
        beside: BackgroundEvaluation,
        learner: Learner,
    ) -> None:
        self._voice, self._saver, self._steward = voice, saver, steward
        self._exporter, self._beside, self._learner = exporter, beside, learner
        self._alerts, self._news = 0, QuarantineReporter()

    def __call__(self, report: StepReport) -> None:
        progress = self._steward.progress
        held_out = self._beside.take(progress)
        report = dataclasses.replace(report, held_out=held_out)
        self._voice.enter("step", report.step)
        self._exporter.take(report, len(self._steward.quarantined), self._saver.expected_s)
        data = report.data() | {
            "waited_s": progress.data_wait_s,
            "stalled_s": progress.stall_s,
            "checkpoints_put_off": self._saver.put_off,
        }
        data |= self._news.of(self._steward.quarantined)
        if raised := self._saver.alerts[self._alerts :]:
            self._alerts += len(raised)
            data["checkpoint_alerts"] = [each.message for each in raised]
        self._voice.say("step", report.step, **data)
        self.tell_saved()
        self._beside.begin(report.step, self._learner.weights)

    def tell_saved(self) -> None:
        """Report the checkpoints committed since the last call."""
        for ref in self._saver.report():
            self._exporter.saved()
            self._voice.say("checkpoint", ref.step, url=ref.url, digest=ref.digest, bytes=ref.bytes)
