"""What a rank makes of what it loaded once it has a place: device, model spread, stream, figures.

Each function makes one thing that ``rank`` asks for. Knows no order of events.
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
from paceline.training.loop.event_writer import Voice
from paceline.training.loop.starting_state import Loaded

if TYPE_CHECKING:
    import torch

    from paceline.data import PlannedStream
    from paceline.storage import ObjectStore
    from paceline.training.checkpoint import Checkpointer, TrainState
    from paceline.training.loop.evaluating import Evaluator
    from paceline.training.loop.group import Group
    from paceline.training.loop.loop import Progress
    from paceline.training.metrics import Exporter, Numbers, Tracer, Uploaded
    from paceline.training.parallel import Parallel
    from paceline.training.parallel.mesh import Mesh

TRACE_REQUEST = "trace"  # in the state directory: touched, the next step is profiled


def device_of() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def own_device() -> torch.device:
    """Return ``device_of()``, a GPU of this rank's own; raises InvalidInput where ranks would share
    one: NCCL connects no two ranks of a GPU.
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


def spread(its: Loaded, mesh: Mesh) -> tuple[Parallel, Any]:
    """Return the model spread over the mesh, and what ties an optimiser to it once resumed."""
    from paceline.training.parallel import parallelise

    settings = its.job.settings
    if settings.synchrony.kind == "local-sgd":
        from paceline.training.strategies.local_sgd import local_sgd

        averaged = local_sgd(its.model, mesh, settings, its.workload)
        return averaged, averaged.follow
    return parallelise(its.model, mesh, settings, its.workload), lambda *_: None


def saver_of(saver: Checkpointer, parallel: Parallel) -> Any:
    """Return what the loop saves with: where replicas step alone, one that averages first."""
    from paceline.training.strategies.local_sgd import Averaged, AveragingSaver

    return AveragingSaver(saver, parallel) if isinstance(parallel, Averaged) else saver


def stream_of(its: Loaded, mesh: Mesh, position: dict[str, Any] | None) -> PlannedStream:
    """Return this rank's share of the training split from ``position`` on."""
    from paceline.data import open_stream
    from paceline.data.batching.prefetch import Outlines
    from paceline.data.loading.columns import reading
    from paceline.training.identity import stream_seed

    job, settings = its.job, its.job.settings
    outlines = None
    train, readers = its.snapshot.of_split("train"), mesh.data_world
    found = reading(job.data, train, its.context, settings.batch_sequences, readers)
    if found.shares_outlines:
        kept = KeptObjects(its.store, f"{job.checkpoint_url}/{job.job_id}/outlines")
        outlines = Outlines(kept, f"{job.snapshot_digest} train", mesh.data_rank, readers)
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
class KeptObjects:
    """Small objects below a URL (``data.batching.outlines.Kept``)."""

    store: ObjectStore
    url: str

    def get(self, name: str) -> bytes | None:
        """Return an object's content; None where there is none."""
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
    its: Loaded,
    mesh: Mesh,
    during: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Evaluator | None:
    """Return what measures this rank's share of the held-out split, if the job asks for it."""
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
    its: Loaded, parallel: Parallel, group: Group, device: torch.device, rank: int, voice: Voice
) -> Numbers:
    """Return this rank's figures, with a profiler (``tracer_of``)."""
    from paceline.data.loading.columns import tokens_seen
    from paceline.training.metrics import Numbers

    tracer = tracer_of(its, device, rank, uploaded_traces(its, voice))
    seen = tokens_seen(its.job.data, its.snapshot.of_split("train"), its.context)
    return Numbers.of(
        its.job.settings,
        parallel,
        group,
        device,
        config=its.config,
        seen=seen,
        tracer=tracer,
    )


def tracer_of(
    its: Loaded, device: torch.device, rank: int, on_trace: Callable[[int, Path], None]
) -> Tracer:
    """Return a profiler for the steps that the job asks for, and for the next one whenever
    ``<state>/trace`` is touched."""
    from paceline.training.metrics import Tracer

    return Tracer(
        its.job.settings.profile_steps,
        its.work_dir / "traces",
        rank,
        on_trace,
        cuda=device.type == "cuda",
        request=Path(its.job.state_dir) / TRACE_REQUEST,
    )


def uploaded_traces(its: Loaded, voice: Voice) -> Uploaded:
    """Return what uploads traces beside the checkpoints, and says so."""
    from paceline.storage import join_url
    from paceline.training.metrics import Uploaded

    url = join_url(its.job.checkpoint_url, its.job.job_id, "traces")
    return Uploaded(its.store, url, lambda step, where: voice.say("trace", step, url=where))


def exporter_of(job: TrainJob, rank: int) -> Exporter:
    """Return the page of figures that Prometheus finds this rank at."""
    from paceline.training.metrics import Exporter

    targets = Path(job.state_dir) / "metrics" / "targets"
    return Exporter(
        {"job_id": job.job_id, "rank": str(rank)},
        targets,
        step_deadline_s=job.settings.guard.step_deadline_s,
    )


def resumed(its: Loaded, state: TrainState, voice: Voice) -> tuple[Progress, dict[str, Any] | None]:
    """Restore the newest healthy checkpoint, if any; return progress and data position."""
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
    return progress, restored.position or None  # None: of a state that was imported, step 0


def checkpointer_of(its: Loaded, state: TrainState, environment: dict[str, Any]) -> Checkpointer:
    """Return what saves ``state`` as the job's checkpoints say; whoever asks closes it."""
    from paceline.training.checkpoint import Checkpointer, Failures
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
        failures=Failures(job.failures, job.running_s),
        deadline_s=job.settings.guard.checkpoint_deadline_s,
    )


def save_last(saver: Any, progress: Progress, position: dict[str, Any], voice: Voice) -> int:
    """Save the state that training ends with; return 0, or a rank's exit code where that failed and
    it was asked to stop (never 143: nothing is saved). Raises what failed where it was not.
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
            sys.stderr.write(f"{message}\n")  # its launcher keeps a rank's last words
            return error.exit_code
    return 0


def exported(its: Loaded, state: TrainState, rank: int) -> dict[str, Any]:
    """Export the whole model (every rank has a part in it); return where rank 0 uploaded it."""
    from paceline.training.checkpoint import export

    directory = its.work_dir / "export"
    shutil.rmtree(directory, ignore_errors=True)
    export(state, its.config, directory)
    return upload(its, directory) if rank == 0 else {}


def result_of(
    its: Loaded,
    progress: Progress,
    saver: Checkpointer,
    *,
    resumed_from: int,
    quarantined: Iterable[str],
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Return what rank 0 says of a job that is done, beside where its model is."""
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


def upload(its: Loaded, directory: Any) -> dict[str, Any]:
    """Upload the exported model, and return its URL and digest."""
    from paceline.models import weights_digest
    from paceline.storage import join_url

    url = join_url(its.job.checkpoint_url, its.job.job_id, "export")
    for path in sorted(directory.iterdir()):
        its.store.upload_file(path, join_url(url, path.name))
    digest = weights_digest(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return {"export_url": url, "weights_digest": digest}
