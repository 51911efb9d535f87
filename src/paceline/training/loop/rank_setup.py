"""Builders for one rank: device, parallel model, data stream, metrics, checkpointer, result.

``rank`` calls each function once and owns the order of the calls.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loading import tokens_seen
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.models import (
    Adapters,
    Pretrained,
    SavedTransformer,
    base_name,
    not_finite,
    set_magnitudes,
    without_adapters,
)
from paceline.storage import join_url
from paceline.training.checkpoint import (
    Checkpointer,
    Commit,
    Generations,
    TrainState,
    box_of,
    clean,
    local_of,
    resume_newest_healthy,
)
from paceline.training.deadlines import Deadlines
from paceline.training.identity import code_version
from paceline.training.interval import FailureCount
from paceline.training.loop.event_writer import EventWriter
from paceline.training.loop.group import Group
from paceline.training.loop.loop import Evaluator, Progress
from paceline.training.loop.model_export import require_exportable
from paceline.training.loop.optimizer import WeightAverage, new_optimizer
from paceline.training.loop.preferences import Preferences
from paceline.training.loop.starting_state import RankContext
from paceline.training.loop.workload import Inputs
from paceline.training.metrics import Exporter, StepMetrics, Tracer, TraceUploader
from paceline.training.parallel import Mesh, Parallel, parallelise

TRACE_REQUEST = "trace"  # file in the state directory; touching it profiles the next step


def device_of() -> torch.device:
    """Return this rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def exclusive_device() -> torch.device:
    """Return ``device_of()``; raises InvalidInput where ranks would share a GPU.

    NCCL cannot connect two ranks on one GPU.
    """
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


def parallelise_model(rank_context: RankContext, mesh: Mesh) -> tuple[Parallel, Any]:
    """Return the parallelised model, and a function ``(optimizer, step)`` to call after resuming.

    The function attaches the optimiser to local SGD; otherwise it does nothing.
    """
    settings = rank_context.job.settings
    if mesh.rank == 0:
        require_exportable(rank_context)
    if settings.synchrony.kind == "local-sgd":
        from paceline.training.strategies.local_sgd import local_sgd

        averaged = local_sgd(rank_context.model, mesh, settings, rank_context.workload)
        return averaged, averaged.follow
    # before the model is consumed; without values, or a user's own
    base = (
        copy.deepcopy(rank_context.model)
        if settings.dpo and rank_context.adapters is None
        else None
    )
    parallel = parallelise(rank_context.model, mesh, settings, rank_context.workload)
    if rank_context.saved is not None:
        load_weights(rank_context.saved, parallel, rank_context.adapters)
    if isinstance(rank_context.workload, Preferences):
        rank_context.workload.reference = _reference(rank_context, parallel, base, mesh)
    return parallel, lambda *_: None


def optimizer_of(
    rank_context: RankContext, parallel: Parallel
) -> tuple[torch.optim.Optimizer, WeightAverage]:
    """Return the optimiser, and the moving average of the weights, empty where it is off."""
    settings = rank_context.job.settings
    optimizer = new_optimizer(parallel.modules, settings, rank_context.make_optimizer)
    return optimizer, WeightAverage(optimizer, settings.ema)


def _reference(
    rank_context: RankContext, parallel: Parallel, base: nn.Module | None, mesh: Mesh
) -> Callable[[Inputs], Tensor]:
    """Return the function that gives rows their log-probabilities under ``base``, which is spread
    as the model is; None: under the model without its adapters."""
    if base is None:
        (module,) = parallel.modules

        def without(inputs: Inputs) -> Tensor:
            with without_adapters(module):
                return parallel.evaluate(inputs).loss

        return without
    base.requires_grad_(False)
    frozen = parallelise(
        base, mesh, rank_context.job.settings, rank_context.workload, is_frozen=True
    )
    if rank_context.saved is not None:
        load_weights(rank_context.saved, frozen)
    return lambda inputs: frozen.evaluate(inputs).loss


def load_weights(
    saved: Pretrained | SavedTransformer, parallel: Parallel, adapters: Adapters | None = None
) -> int:
    """Fill this rank's parts of the model from the files; return the number of bytes read.

    Raises InvalidInput where one is not finite. Parts of ``adapters`` get their initial values.
    """
    read = 0
    for module in parallel.modules:
        saved.restore_buffers(module)
        parts = {
            clean(name): (local_of(each.detach()), box_of(each.detach())[0])
            for name, each in module.state_dict().items()
        }
        if adapters is not None:
            for name, whole in adapters.initial.items():
                into, offsets = parts.pop(name)
                box = zip(offsets, into.shape, strict=True)
                into.copy_(whole[tuple(slice(start, start + size) for start, size in box)])
            parts = {base_name(name): part for name, part in parts.items()}
        read += saved.fill(parts)
        for name, (part, _) in parts.items():
            if not part.isfinite().all():  # no rank reads all weights: each checks its own
                raise not_finite(name, saved.directory)
        if adapters is not None:
            set_magnitudes(module)
    return read


def evaluator_of(
    rank_context: RankContext,
    mesh: Mesh,
    during: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    averaged: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Evaluator | None:
    """Return the evaluator over this rank's held-out share; None where evaluation is off."""
    settings = rank_context.job.settings
    if not settings.evaluate_every_steps:
        return None
    held_out = rank_context.snapshot.of_split("held-out")
    tokens = sum(each.tokens for each in held_out)
    text_bytes = sum(each.text_bytes for each in held_out)
    return Evaluator(
        lambda: rank_context.held_out_stream(mesh.data_rank, mesh.data_world),
        settings.evaluate_sequences,
        settings.accumulation,
        text_bytes / tokens if tokens and text_bytes and not settings.dpo else None,
        during,
        averaged,
    )


def metrics_of(
    rank_context: RankContext,
    parallel: Parallel,
    group: Group,
    device: torch.device,
    rank: int,
    events: EventWriter,
) -> StepMetrics:
    """Return this rank's step metrics, with a profiler (``tracer_of``)."""
    tracer = tracer_of(rank_context, device, rank, uploaded_traces(rank_context, events))
    seen = tokens_seen(
        rank_context.job.data, rank_context.snapshot.of_split("train"), rank_context.context
    )
    return StepMetrics.of(
        rank_context.job.settings,
        parallel,
        group,
        device,
        config=rank_context.config,
        seen=seen,
        tracer=tracer,
    )


def tracer_of(
    rank_context: RankContext,
    device: torch.device,
    rank: int,
    on_trace: Callable[[int, Path], None],
) -> Tracer:
    """Return a profiler for the job's ``profile_steps``, and for the next step after each touch of
    ``<state>/trace``."""
    return Tracer(
        rank_context.job.settings.profile_steps,
        rank_context.work_dir / "traces",
        rank,
        on_trace,
        cuda=device.type == "cuda",
        request=rank_context.runtime.state_dir / TRACE_REQUEST,
    )


def uploaded_traces(rank_context: RankContext, events: EventWriter) -> TraceUploader:
    """Return a callback that uploads traces beside the checkpoints and emits "trace" events."""
    url = join_url(rank_context.job.checkpoint_url, rank_context.job.job_id, "traces")
    return TraceUploader(
        rank_context.store, url, lambda step, where: events.emit("trace", step, url=where)
    )


def exporter_of(rank_context: RankContext, rank: int) -> Exporter:
    """Return this rank's Prometheus exporter, with its target file below the state directory."""
    job, targets = rank_context.job, rank_context.runtime.state_dir / "metrics" / "targets"
    return Exporter(
        {"job_id": job.job_id, "rank": str(rank)},
        targets,
        step_deadline_s=job.settings.guard.step_deadline_s,
    )


def restore_checkpoint(
    rank_context: RankContext, state: TrainState, events: EventWriter
) -> tuple[Progress, dict[str, Any] | None]:
    """Restore the newest healthy checkpoint, if any; return progress and data position.

    The position is None for a fresh start.
    """

    def restored_from(generations: Generations, digest: str) -> Commit | None:
        return resume_newest_healthy(
            generations,
            state,
            config_digest=digest,
            work_dir=rank_context.work_dir,
            on_rejected=lambda step, why: events.emit("checkpoint", step, rejected=True, why=why),
        )

    restored = restored_from(rank_context.generations, rank_context.config_digest)
    if restored is None and (begun := rank_context.job.continues) is not None:
        earlier = Generations(
            rank_context.store, join_url(rank_context.job.checkpoint_url, begun.job_id)
        )
        restored = restored_from(earlier, begun.config_digest)
        if restored is None or restored.step != begun.step:
            raise TrainingFailed(
                "the checkpoint that this job continues is not there any more",
                got=f"step {restored.step}" if restored else "none",
                wanted=f"step {begun.step}",
                where=earlier.url,
            )
    if restored is None:
        return Progress(), None
    progress = Progress.at(restored.step, restored.metrics)
    progress.extra = dict(restored.extra)
    return progress, restored.position or None  # None: an imported state at step 0


def checkpointer_of(
    rank_context: RankContext, state: TrainState, environment: dict[str, Any]
) -> Checkpointer:
    """Return the checkpointer of ``state`` per the job's settings; the caller closes it."""
    job = rank_context.job
    return Checkpointer(
        rank_context.generations,
        state,
        job.settings.checkpoints,
        job_id=job.job_id,
        config_digest=rank_context.config_digest,
        code_version=code_version(),
        environment=environment,
        failures=FailureCount(job.failures, job.running_s),
        deadline_s=Deadlines.of_job(job).checkpoint_s,
    )


def save_last(saver: Any, progress: Progress, position: dict[str, Any], events: EventWriter) -> int:
    """Save the final state; return 0, or the error's exit code where a stop was requested.

    That code is never 143, which means "state saved". Without a stop request the error is raised.
    """
    with events.phase("saving"):
        try:
            saver.save_last(progress.step, position, progress.metrics())
        except PacelineError as error:
            if not progress.stopped:
                raise
            lost = "stopped as asked, but the steps since the last checkpoint are lost"
            message = f"{lost}: {error.one_line()}"
            events.emit("failed", progress.step, code=error.code, message=message, stopped=True)
            sys.stderr.write(f"{message}\n")  # the launcher keeps the end of standard error
            return error.exit_code
    return 0


def result_of(
    rank_context: RankContext,
    progress: Progress,
    saver: Checkpointer,
    *,
    resumed_from: int,
    quarantined: Iterable[str],
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Return the data of rank 0's "result" event, except the export's URL and digest."""
    steps = progress.step - resumed_from
    shards = rank_context.snapshot.of_split("train")
    return {
        "steps": progress.step,
        "resumed_from_step": resumed_from,
        "tokens_per_step": progress.tokens / steps if steps > 0 else None,
        "epoch_tokens": sum(each.tokens for each in shards) or None,
        "epoch_bytes": sum(each.text_bytes for each in shards) or None,
        "epoch_documents": sum(each.documents for each in shards),
        "first_loss": progress.first_loss,
        "final_loss": progress.loss,
        "held_out": progress.held_out,
        "stopped_early": progress.stopped_early or None,
        "ema_decay": None
        if rank_context.job.settings.ema is None
        else rank_context.job.settings.ema.decay,
        "deterministic": None if torch.are_deterministic_algorithms_enabled() else False,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        "data_wait_share": progress.share(progress.data_wait_s),
        "checkpoint_stall_share": progress.share(progress.stall_s),
        "checkpoints": [each.model_dump() for each in saver.kept()],
        "checkpoints_put_off": saver.postponed,
        "quarantined_shards": sorted(quarantined),
        "config_digest": rank_context.config_digest,
        "code_version": code_version(),
        "environment": environment,
    }
