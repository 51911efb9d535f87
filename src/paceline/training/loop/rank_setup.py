"""Builders for one rank: device, parallel model, data stream, metrics, checkpointer, result.

``rank`` calls each function once and owns the order of the calls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput, PacelineError, SourceMissing
from paceline.schemas.training import TrainJob
from paceline.training.loop.event_writer import EventWriter
from paceline.training.loop.starting_state import RankContext

if TYPE_CHECKING:
    import torch

    from paceline.data import PlannedStream
    from paceline.storage import ObjectStore
    from paceline.training.checkpoint import Checkpointer, TrainState
    from paceline.training.loop.evaluating import Evaluator
    from paceline.training.loop.group import Group
    from paceline.training.loop.loop import Progress
    from paceline.training.metrics import Exporter, StepMetrics, Tracer, TraceUploader
    from paceline.training.parallel import Parallel
    from paceline.training.parallel.mesh import Mesh

TRACE_REQUEST = "trace"  # file in the state directory; touching it profiles the next step


def device_of() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def own_device() -> torch.device:
    """Return ``device_of()``; raises InvalidInput where ranks would share a GPU.

    NCCL cannot connect two ranks on one GPU.
    """
    import torch

    device = device_of()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and here > torch.cuda.device_count():
        raise InvalidInput(
            "more ranks than GPUs on a node",
            got=f"{here} ranks",
            wanted=f"at most {torch.cuda.device_count()}",
            where=os.environ.get("PACELINE_NODE", "this node"),
            do="Lower training.ranks or add nodes; CUDA_VISIBLE_DEVICES= trains on the CPU.",
        )
    return device


def spread(its: RankContext, mesh: Mesh) -> tuple[Parallel, Any]:
    """Return the parallelised model, and a function ``(optimizer, step)`` to call after resuming.

    The function attaches the optimiser to local SGD; otherwise it does nothing.
    """
    from paceline.training.parallel import parallelise

    settings = its.job.settings
    if settings.synchrony.kind == "local-sgd":
        from paceline.training.strategies.local_sgd import local_sgd

        averaged = local_sgd(its.model, mesh, settings, its.workload)
        return averaged, averaged.follow
    return parallelise(its.model, mesh, settings, its.workload), lambda *_: None


def saver_of(saver: Checkpointer, parallel: Parallel) -> Any:
    """Return the loop's saver; for local SGD, one that averages the replicas first."""
    from paceline.training.strategies.local_sgd import AveragingSaver, LocalSgd

    return AveragingSaver(saver, parallel) if isinstance(parallel, LocalSgd) else saver


def stream_of(its: RankContext, mesh: Mesh, position: dict[str, Any] | None) -> PlannedStream:
    """Return this rank's share of the training split, starting at ``position``."""
    from paceline.data import open_stream
    from paceline.data.batching.prefetch import SharedPlans
    from paceline.data.loading.columns import reading
    from paceline.training.identity import stream_seed

    job, settings = its.job, its.job.settings
    outlines = None
    train, readers = its.snapshot.of_split("train"), mesh.data_world
    found = reading(job.data, train, its.context, settings.batch_sequences, readers)
    if found.shares_outlines:
        kept = SharedPlanObjects(its.store, f"{job.checkpoint_url}/{job.job_id}/outlines")
        outlines = SharedPlans(kept, f"{job.snapshot_digest} train", mesh.data_rank, readers)
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
        readers=its.job.data_readers,
        outlines=outlines,
    )


@dataclass(frozen=True)
class SharedPlanObjects:
    """Small objects below a URL; the store of ``data.batching.prefetch``."""

    store: ObjectStore
    url: str

    def get(self, name: str) -> bytes | None:
        """Return an object's content; None where it does not exist."""
        try:
            return self.store.get_bytes(f"{self.url}/{name}")
        except SourceMissing:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        self.store.put_bytes(f"{self.url}/{name}", content)

    def drop(self, name: str) -> None:
        """Delete an object."""
        self.store.delete(f"{self.url}/{name}")


def evaluator_of(
    its: RankContext,
    mesh: Mesh,
    during: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Evaluator | None:
    """Return the evaluator over this rank's held-out share; None where evaluation is off."""
    from paceline.data import open_stream
    from paceline.training.loop.evaluating import Evaluator

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


def numbers_of(
    its: RankContext,
    parallel: Parallel,
    group: Group,
    device: torch.device,
    rank: int,
    voice: EventWriter,
) -> StepMetrics:
    """Return this rank's step metrics, with a profiler (``tracer_of``)."""
    from paceline.data.loading.columns import tokens_seen
    from paceline.training.metrics import StepMetrics

    tracer = tracer_of(its, device, rank, uploaded_traces(its, voice))
    seen = tokens_seen(its.job.data, its.snapshot.of_split("train"), its.context)
    return StepMetrics.of(
        its.job.settings,
        parallel,
        group,
        device,
        config=its.config,
        seen=seen,
        tracer=tracer,
    )


def tracer_of(
    its: RankContext, device: torch.device, rank: int, on_trace: Callable[[int, Path], None]
) -> Tracer:
    """Return a profiler for the job's ``profile_steps``, and for the next step after each touch of
    ``<state>/trace``."""
    from paceline.training.metrics import Tracer

    return Tracer(
        its.job.settings.profile_steps,
        its.work_dir / "traces",
        rank,
        on_trace,
        cuda=device.type == "cuda",
        request=Path(its.job.state_dir) / TRACE_REQUEST,
    )


def uploaded_traces(its: RankContext, voice: EventWriter) -> TraceUploader:
    """Return a callback that uploads traces beside the checkpoints and emits "trace" events."""
    from paceline.storage import join_url
    from paceline.training.metrics import TraceUploader

    url = join_url(its.job.checkpoint_url, its.job.job_id, "traces")
    return TraceUploader(its.store, url, lambda step, where: voice.say("trace", step, url=where))


def exporter_of(job: TrainJob, rank: int) -> Exporter:
    """Return this rank's Prometheus exporter, with its target file below the state directory."""
    from paceline.training.metrics import Exporter

    targets = Path(job.state_dir) / "metrics" / "targets"
    return Exporter(
        {"job_id": job.job_id, "rank": str(rank)},
        targets,
        step_deadline_s=job.settings.guard.step_deadline_s,
    )


def resumed(
    its: RankContext, state: TrainState, voice: EventWriter
) -> tuple[Progress, dict[str, Any] | None]:
    """Restore the newest healthy checkpoint, if any; return progress and data position.

    The position is None for a fresh start.
    """
    from paceline.training.checkpoint import resume_newest_healthy
    from paceline.training.loop.loop import Progress

    restored = resume_newest_healthy(
        its.generations,
        state,
        config_digest=its.config_digest,
        work_dir=its.work_dir,
        on_rejected=lambda step, why: voice.say("checkpoint", step, rejected=True, why=why),
    )
    if restored is None:
        return Progress(), None
    progress = Progress.at(restored.step, restored.metrics)
    progress.extra = restored.extra
    return progress, restored.position or None  # None: an imported state at step 0


def checkpointer_of(
    its: RankContext, state: TrainState, environment: dict[str, Any]
) -> Checkpointer:
    """Return the checkpointer of ``state`` per the job's settings; the caller closes it."""
    from paceline.training.checkpoint import Checkpointer, FailureCount
    from paceline.training.identity import code_version

    job = its.job
    return Checkpointer(
        its.generations,
        state,
        job.settings.checkpoints,
        job_id=job.job_id,
        config_digest=its.config_digest,
        code_version=code_version(),
        environment=environment,
        failures=FailureCount(job.failures, job.running_s),
        deadline_s=job.settings.guard.checkpoint_deadline_s,
    )


def save_last(saver: Any, progress: Progress, position: dict[str, Any], voice: EventWriter) -> int:
    """Save the final state; return 0, or the error's exit code where a stop was requested.

    That code is never 143, which means "state saved". Without a stop request the error is raised.
    """
    with voice.phase("saving"):
        try:
            saver.save_last(progress.step, position, progress.metrics())
        except PacelineError as error:
            if not progress.stopped:
                raise
            lost = "stopped as asked, but the steps since the last checkpoint are lost"
            message = f"{lost}: {error.one_line()}"
            voice.say("failed", progress.step, code=error.code, message=message, stopped=True)
            sys.stderr.write(f"{message}\n")  # the launcher keeps the end of standard error
            return error.exit_code
    return 0


def exported(its: RankContext, state: TrainState, rank: int) -> dict[str, Any]:
    """Export the whole model (a collective call); return URL and digest on rank 0, {} elsewhere."""
    from paceline.training.checkpoint import export

    directory = its.work_dir / "export"
    shutil.rmtree(directory, ignore_errors=True)
    export(state, its.config, directory)
    return upload(its, directory) if rank == 0 else {}


def result_of(
    its: RankContext,
    progress: Progress,
    saver: Checkpointer,
    *,
    resumed_from: int,
    quarantined: Iterable[str],
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Return the data of rank 0's "result" event, except the export's URL and digest."""
    from paceline.training.identity import code_version

    return {
        "steps": progress.step,
        "resumed_from_step": resumed_from,
        "first_loss": progress.first_loss,
        "final_loss": progress.loss,
        "held_out": progress.held_out,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        "data_wait_share": progress.share(progress.data_wait_s),
        "checkpoint_stall_share": progress.share(progress.stall_s),
        "checkpoints": [each.model_dump() for each in saver.kept()],
        "checkpoints_put_off": saver.put_off,
        "quarantined_shards": sorted(quarantined),
        "config_digest": its.config_digest,
        "code_version": code_version(),
        "environment": environment,
    }


def upload(its: RankContext, directory: Any) -> dict[str, Any]:
    """Upload the exported model and delete the directory; return URL and weights digest."""
    from paceline.models import weights_digest
    from paceline.storage import join_url

    url = join_url(its.job.checkpoint_url, its.job.job_id, "export")
    for path in sorted(directory.iterdir()):
        its.store.upload_file(path, join_url(url, path.name))
    digest = weights_digest(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return {"export_url": url, "weights_digest": digest}
