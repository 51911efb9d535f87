"""One rank of a training job, from its first line to its last: load, join, lay out, resume, train.

``main`` is what a node's launcher forks (``python -m paceline.training.rank`` does the same). It
reads one line of JSON, a TrainJob, on standard input, and RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, PACELINE_ATTEMPT and PACELINE_WORKER_ID from its environment; writes RankEvent lines on
standard output. A spare (PACELINE_SPARE) loads, then waits for a place: two more lines, of
variables and of the job as it is by then.

Exit codes: 0 done; 143 stopped as asked, state saved; 70 the parent died; else the error's own (75:
try again, 1: it will not work).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, PeerLost
from paceline.training.keeping import keeps_of
from paceline.training.loading import Loaded, load
from paceline.training.relaxed import is_asynchronous
from paceline.training.voice import Place, Voice
from paceline.training.watch import STOPPED_EXIT, StopFlag, die_with_parent, share_cores
from paceline.wire.training import TrainJob

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from paceline.data import PlannedStream
    from paceline.profile import GuardSettings
    from paceline.training.checkpoint import Checkpointer, TrainState
    from paceline.training.evaluating import Evaluator
    from paceline.training.group import Group
    from paceline.training.loop import Progress, StepReport
    from paceline.training.mesh import Mesh
    from paceline.training.numbers import Exporter, Numbers
    from paceline.training.parallel import Parallel

FOLLOWER_BEAT_S = 0.5  # ranks other than 0 tell their steps this often


def main() -> int:
    """Run this rank and return its exit code."""
    from paceline.training.guard import BadStep

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    stop = StopFlag()
    stop.install()
    die_with_parent()
    share_cores()
    place = Place.from_environment()
    voice = Voice(place)
    voice.beat()
    try:
        job = TrainJob.model_validate_json(sys.stdin.readline())
        if "PACELINE_SPARE" in os.environ:
            place, job = wait_for_place(job, voice)
        voice.say("started", worker_id=place.worker_id, pid=os.getpid())
        return run_rank(job, place, voice, stop)
    except BadStep as error:
        voice.say(
            "failed",
            error.step,
            code="BadStep",
            message=error.one_line(),
            bad_step=error.step,
            bad_batch=error.batch,
        )
        return error.exit_code
    except PacelineError as error:
        traceback.print_exc()
        voice.say("failed", code=error.code, message=error.one_line())
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - a process's last word
        traceback.print_exc()
        # A collective inside the backward pass fails as a bare RuntimeError of gloo's.
        lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        code = PeerLost.__name__ if lost else type(error).__name__
        voice.say("failed", code=code, message=str(error)[:2000])
        return PeerLost.exit_code if lost else 1


def preload() -> None:
    """Import what a rank needs, before ranks are forked; starts no thread."""
    import torch
    import torch.distributed
    import torch.nn.parallel

    import paceline.data
    import paceline.models
    import paceline.training.checkpoint.exporting
    import paceline.training.checkpoint.resuming
    import paceline.training.checkpoint.saver
    import paceline.training.evaluating
    import paceline.training.loop
    import paceline.training.numbers
    import paceline.training.parallel
    import paceline.training.relaxed.averaging
    import paceline.training.relaxed.job  # noqa: F401
    from paceline.training.environment import current

    torch.set_num_threads(1)
    current()  # asks git, once a launcher


def wait_for_place(job: TrainJob, voice: Voice) -> tuple[Place, TrainJob]:
    """Load what can be loaded without a place in the gang, then wait for one."""
    place = Place.from_environment()
    load(job, place.worker_id, place.rank).cache.close()  # verified, and in this node's caches
    voice.enter("spare")
    os.environ.update(json.loads(_line()))
    place = Place.from_environment()
    voice.take(place)
    voice.enter("loading")
    return place, TrainJob.model_validate_json(_line())


def _line() -> str:
    line = sys.stdin.readline()
    if not line:  # no longer wanted
        sys.stdout.flush()
        os._exit(0)
    return line


def run_rank(job: TrainJob, place: Place, voice: Voice, stop: StopFlag) -> int:
    """Train as ``place`` in ``job``; return the exit code."""
    from paceline.training.checkpoint import Checkpointer, Failures, TrainState, export
    from paceline.training.environment import current
    from paceline.training.guard import Guard
    from paceline.training.identity import code_version
    from paceline.training.loop import train
    from paceline.training.mesh import MeshSpec, open_mesh
    from paceline.training.recipe import new_optimizer

    settings = job.settings
    environment = current(settings.threads_per_rank).model_dump(mode="json")
    with contextlib.ExitStack() as stack:
        its = load(job, place.worker_id, place.rank)
        stack.enter_context(its.cache)
        if is_asynchronous(settings):
            from paceline.training.relaxed.job import run_part

            return run_part(its, place, voice, stop)
        voice.enter("joining")
        group = stack.enter_context(_join(place, settings.guard))
        device = device_of()
        mesh = open_mesh(MeshSpec.of(settings.mesh, place.world_size), device.type)
        parallel, follow = _parallelise(its, mesh)
        optimizer = new_optimizer(parallel.modules, settings)

        state = TrainState(parallel, optimizer, group, mesh, keeps=keeps_of(parallel, its.workload))
        voice.enter("resuming")
        progress, position = _resume(its, state, voice)
        state.extra = progress.extra
        resumed_from = progress.step
        follow(optimizer, progress.step)
        exporter = stack.enter_context(exporter_of(job, place.rank))
        voice.say("resumed", progress.step, position=position, metrics_port=exporter.port)

        checkpointer = Checkpointer(
            its.generations,
            state,
            settings.checkpoints,
            job_id=job.job_id,
            config_digest=its.config_digest,
            code_version=code_version(),
            environment=environment,
            failures=Failures(job.failures, job.running_s),
            deadline_s=settings.guard.checkpoint_deadline_s,
        )
        stack.callback(checkpointer.close)
        saver = _averaging(checkpointer, parallel)
        stream = stack.enter_context(_stream(its, mesh, position))
        teller = _Teller(voice, checkpointer, progress, place.rank, stream, exporter)
        stop.listening = True
        voice.enter("first step", progress.step)  # lays out buckets, fetches shards
        train(
            parallel,
            its.workload,
            optimizer,
            stream,
            settings,
            group,
            progress=progress,
            device=device,
            saver=saver,
            evaluator=evaluator_of(its, mesh, lambda: voice.phase("evaluating")),
            guard=Guard.of(settings.guard, bad_before=len(job.skip_batches)),
            numbers=_numbers(its, parallel, group, device, place.rank),
            on_step=teller,
            should_stop=stop,
        )
        if progress.step > resumed_from:
            with voice.phase("saving"):
                saver.save_last(progress.step, stream.position, progress.metrics())
            teller.tell_saved()
        if progress.stopped:
            voice.say("failed", progress.step, code="Stopped", message="stopped, state saved")
            return STOPPED_EXIT

        with voice.phase("exporting"):
            directory = its.work_dir / "export"
            shutil.rmtree(directory, ignore_errors=True)
            export(state, its.config, directory)
            exported = upload(its, directory) if place.rank == 0 else {}
        if place.rank == 0:
            voice.say(
                "result",
                progress.step,
                **exported,
                steps=progress.step,
                resumed_from_step=resumed_from,
                first_loss=progress.first_loss,
                final_loss=progress.loss,
                held_out=progress.held_out,
                tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
                data_wait_share=progress.share(progress.data_wait_s),
                checkpoint_stall_share=progress.share(progress.stall_s),
                checkpoints=[each.model_dump() for each in checkpointer.kept()],
                checkpoints_put_off=checkpointer.put_off,
                quarantined_shards=sorted(stream.quarantined),
                config_digest=its.config_digest,
                code_version=code_version(),
                environment=environment,
            )
    return 0


def _join(place: Place, guard: GuardSettings) -> contextlib.AbstractContextManager[Group]:
    from paceline.training.group import join_group

    return join_group(
        place.rank,
        place.world_size,
        place.master_host,
        place.master_port,
        place.attempt,
        # Longer than any step: the launcher finds who hangs, and names it, while ranks that take
        # longer than others to check a checkpoint are not lost for it.
        guard.step_deadline_s + guard.start_deadline_s,
        serve=False,
    )


def device_of() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _parallelise(its: Loaded, mesh: Mesh) -> tuple[Parallel, Any]:
    """Return the model spread over the mesh, and what ties an optimiser to it once resumed."""
    from paceline.training.parallel import parallelise

    settings = its.job.settings
    if settings.synchrony.kind == "local-sgd":
        from paceline.training.relaxed.averaging import local_sgd

        averaged = local_sgd(its.model, mesh, settings, its.workload)
        return averaged, averaged.follow
    return parallelise(its.model, mesh, settings, its.workload), lambda *_: None


def _averaging(saver: Checkpointer, parallel: Parallel) -> Any:
    from paceline.training.relaxed.averaging import Averaged, AveragingSaver

    return AveragingSaver(saver, parallel) if isinstance(parallel, Averaged) else saver


def _stream(its: Loaded, mesh: Mesh, position: dict[str, Any] | None) -> PlannedStream:
    from paceline.data import open_stream
    from paceline.training.identity import stream_seed

    settings = its.job.settings
    return open_stream(
        its.snapshot,
        "train",
        its.cache,
        its.job.data,
        context=its.context,
        global_batch=settings.batch_sequences,
        seed=stream_seed("job", settings.seed),
        rank=mesh.data_rank,
        world_size=mesh.data_world,
        position=position,
        skip=frozenset(its.job.skip_batches),
    )


def evaluator_of(
    its: Loaded,
    mesh: Mesh,
    during: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Evaluator | None:
    """Return what measures this rank's share of the held-out split, if the job asks for it."""
    from paceline.data import open_stream
    from paceline.training.evaluating import Evaluator

    settings = its.job.settings
    if not settings.evaluate_every_steps:
        return None
    held_out = its.snapshot.of_split("held-out")
    tokens = sum(each.tokens for each in held_out)
    text_bytes = sum(each.text_bytes for each in held_out)
    return Evaluator(
        lambda: open_stream(
            its.snapshot,
            "held-out",
            its.cache,
            its.job.data,
            context=its.context,
            global_batch=settings.batch_sequences,
            seed=0,
            rank=mesh.data_rank,
            world_size=mesh.data_world,
        ),
        settings.evaluate_sequences,
        settings.accumulation,
        text_bytes / tokens if tokens and text_bytes else None,
        during,
    )


def _numbers(
    its: Loaded, parallel: Parallel, group: Group, device: torch.device, rank: int
) -> Numbers:
    from paceline.objects import join_url
    from paceline.training.numbers import Numbers, Tracer, Uploaded

    settings, tracer = its.job.settings, None
    if settings.profile_steps:
        tracer = Tracer(
            settings.profile_steps,
            its.work_dir / "traces",
            rank,
            Uploaded(its.store, join_url(its.job.checkpoint_url, its.job.job_id, "traces")),
            cuda=device.type == "cuda",
        )
    return Numbers.of(settings, parallel, group, device, config=its.config, tracer=tracer)


def exporter_of(job: TrainJob, rank: int) -> Exporter:
    """Return the page of figures that Prometheus finds this rank at."""
    from paceline.training.numbers import Exporter

    targets = Path(job.state_dir) / "metrics" / "targets"
    return Exporter(
        {"job_id": job.job_id, "rank": str(rank)},
        targets,
        step_deadline_s=job.settings.guard.step_deadline_s,
    )


def _resume(its: Loaded, state: TrainState, voice: Voice) -> tuple[Progress, dict[str, Any] | None]:
    """Restore the newest healthy checkpoint, if any; return progress and data position."""
    from paceline.training.checkpoint import resume_newest_healthy
    from paceline.training.loop import Progress

    restored = resume_newest_healthy(
        its.generations,
        state,
        config_digest=its.config_digest,
        work_dir=its.work_dir,
        on_rejected=lambda step, why: voice.say("checkpoint", step, rejected=True, why=why),
    )
    if restored is None:
        return Progress(), None
    metrics = restored.metrics
    progress = Progress(
        step=restored.step,
        first_loss=metrics.get("first_loss"),
        loss=metrics.get("loss"),
        held_out={name: found for name, found in metrics.items() if name.startswith("held_out")},
        extra=restored.extra,
    )
    return progress, restored.position


def upload(its: Loaded, directory: Any) -> dict[str, Any]:
    """Upload the exported model, and return its URL and digest."""
    from paceline.models import weights_digest
    from paceline.objects import join_url

    url = join_url(its.job.checkpoint_url, its.job.job_id, "export")
    for path in sorted(directory.iterdir()):
        its.store.upload_file(path, join_url(url, path.name))
    digest = weights_digest(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return {"export_url": url, "weights_digest": digest}


class _Teller:
    """Says each step of rank 0, and enough of the others' to show how they do."""

    def __init__(
        self,
        voice: Voice,
        saver: Checkpointer,
        progress: Progress,
        rank: int,
        stream: PlannedStream,
        exporter: Exporter,
    ) -> None:
        self._exporter = exporter
        self._voice = voice
        self._saver = saver
        self._progress = progress
        self._rank = rank
        self._stream = stream
        self._said_at = 0.0
        self._alerts = 0

    def __call__(self, report: StepReport) -> None:
        self._voice.enter("step", report.step)
        self._exporter.take(report, len(self._stream.quarantined))
        now = time.monotonic()
        if self._rank != 0 and now - self._said_at < FOLLOWER_BEAT_S and not report.alerts:
            return
        self._said_at = now
        data = report.data() | {
            "waited_s": self._progress.data_wait_s,
            "stalled_s": self._progress.stall_s,
            "checkpoints_put_off": self._saver.put_off,
        }
        if self._stream.quarantined:
            data["quarantined_shards"] = sorted(self._stream.quarantined)
        if raised := self._saver.alerts[self._alerts :]:
            self._alerts += len(raised)
            data["checkpoint_alerts"] = [each.message for each in raised]
        self._voice.say("step", report.step, **data)
        self.tell_saved()

    def tell_saved(self) -> None:
        """Say which checkpoints are committed by now (rank 0 does)."""
        for ref in self._saver.report() if self._rank == 0 else ():
            self._voice.say("checkpoint", ref.step, url=ref.url, digest=ref.digest, bytes=ref.bytes)


if __name__ == "__main__":
    # Not through interpreter shutdown: a collective with a dead peer may never return its thread.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
