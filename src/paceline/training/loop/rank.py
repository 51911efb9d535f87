"""Entry point of one rank: load, join the group, parallelise the model, resume, train, export.

A node's launcher forks ``main``; ``python -m paceline.training.loop.rank`` runs the same. It reads
a TrainJob (one line of JSON) from standard input and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
PACELINE_ATTEMPT and PACELINE_WORKER_ID from the environment, and writes RankEvent lines to standard
output. A spare (PACELINE_SPARE) loads, then waits for two more lines: its environment variables and
the current job.

Exit codes: 0 done; 143 stopped on request, state saved; 70 the parent died; otherwise the error's
own code (75: temporary, 1: permanent).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput, PacelineError, PeerLost
from paceline.schemas import TrainJob
from paceline.text import log_to_stderr
from paceline.training.checkpoint import stateful_of
from paceline.training.deadlines import Deadlines
from paceline.training.loop.event_writer import LOOPBACK, EventWriter, RankIdentity, StepReporter
from paceline.training.loop.rank_process import (
    STOPPED_EXIT,
    StopFlag,
    die_with_parent,
    use_passive_waiting,
)
from paceline.training.loop.starting_state import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.training.loop.group import Group


def main() -> int:
    """Train as this process's rank; return its exit code."""
    return as_rank(_train)


def as_rank(work: Callable[[RankIdentity, EventWriter, StopFlag], int]) -> int:
    """Run ``work`` as this process's rank, with its input on standard input; return the exit code.

    Every failure is reported by a "failed" event.
    """
    log_to_stderr(logging.WARNING, "%(name)s: %(message)s")
    stop = StopFlag()
    stop.install()
    die_with_parent()
    use_passive_waiting()
    place = RankIdentity.from_environment()
    events = EventWriter(place)
    events.capture_stdout()
    events.start_heartbeats()
    try:
        return work(place, events, stop)
    except PacelineError as error:
        traceback.print_exc()
        events.emit("failed", code=error.code, message=error.one_line())
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - report every failure before exit
        traceback.print_exc()
        if type(error).__name__ == "OutOfMemoryError":  # torch's; the CPU has no such error
            named = _does_not_fit(error)
            events.emit("failed", code=named.code, message=named.one_line())
            return named.exit_code
        # A collective inside the backward pass raises a bare RuntimeError from gloo.
        lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        code = PeerLost.__name__ if lost else type(error).__name__
        events.emit("failed", code=code, message=str(error)[:2000])
        return PeerLost.exit_code if lost else 1


def _train(place: RankIdentity, events: EventWriter, stop: StopFlag) -> int:
    from paceline.training.loop.step_guard import BadStep

    job = TrainJob.model_validate_json(sys.stdin.readline())
    if "PACELINE_SPARE" in os.environ:
        place, job = wait_for_assignment(job, events)
    events.emit("started", worker_id=place.worker_id, pid=os.getpid())
    try:
        return run_rank(job, place, events, stop)
    except BadStep as error:
        events.emit(
            "failed",
            error.step,
            code="BadStep",
            message=error.one_line(),
            bad_step=error.step,
            bad_batch=error.batch,
        )
        return error.exit_code


def _does_not_fit(error: Exception) -> InvalidInput:
    """Return the error of a job that needs more GPU memory; the same job needs it again."""
    return InvalidInput(
        "this job does not fit the GPU's memory",
        got=str(error).splitlines()[0][:300],
        do="Lower training.batch_sequences or model.context, raise training.accumulation, set "
        "training.activation_checkpointing, or cut the model (training.mesh.shard) or its rows "
        "(training.mesh.cp) over more GPUs.",
    )


def preload() -> None:
    """Import a rank's dependencies before ranks are forked; starts no thread.

    What is not imported here is imported by every rank again: 1.4 s of CPU time each.
    """
    import torch
    import torch.distributed
    import torch.nn.parallel

    import paceline.system.http
    import paceline.training.strategies.job
    import paceline.training.strategies.local_sgd  # noqa: F401
    from paceline.training.reproducibility import current_environment

    torch.set_num_threads(1)
    current_environment()  # caches the git calls, once per launcher


def wait_for_assignment(job: TrainJob, events: EventWriter) -> tuple[RankIdentity, TrainJob]:
    """Preload as a spare, then block until a rank is assigned; return identity and job."""
    place = RankIdentity.from_environment()
    load(job, place.worker_id, place.rank).cache.close()  # verifies and fills this node's caches
    events.set_phase("spare")
    os.environ.update(json.loads(_line()))
    place = RankIdentity.from_environment()
    events.take(place)
    events.set_phase("loading")
    return place, TrainJob.model_validate_json(_line())


def _line() -> str:
    line = sys.stdin.readline()
    if not line:  # the spare is not needed any more
        sys.stdout.flush()
        os._exit(0)
    return line


def run_rank(job: TrainJob, place: RankIdentity, events: EventWriter, stop: StopFlag) -> int:
    """Train as rank ``place`` of ``job``; return the exit code."""
    from paceline.training.checkpoint import TrainState
    from paceline.training.loop import model_export, rank_setup as setup
    from paceline.training.loop.loop import average_replicas, train
    from paceline.training.loop.step_guard import StepGuard
    from paceline.training.parallel import MeshSpec, is_asynchronous, open_mesh
    from paceline.training.reproducibility import current_environment

    settings = job.settings
    environment = current_environment(settings.threads_per_rank)
    with contextlib.ExitStack() as stack:
        rank_context = load(job, place.worker_id, place.rank)
        stack.enter_context(rank_context.cache)
        if is_asynchronous(settings):
            from paceline.training.strategies import run_role

            return run_role(rank_context, place, events, stop)
        events.set_phase("joining")
        # Longer than any step: the launcher detects and names a hung rank first, and a rank that
        # verifies a checkpoint more slowly than the others does not time out.
        limit_s = sum(map(Deadlines.of_job(job).of, ("first step", "step")))
        group = stack.enter_context(join_gang(place, limit_s))
        device = setup.exclusive_device()
        mesh = open_mesh(MeshSpec.of(settings.mesh, place.world_size), device.type)
        parallel, follow = setup.parallelise_model(rank_context, mesh)
        optimizer, average = setup.optimizer_of(rank_context, parallel)

        state = TrainState(
            parallel.modules,
            optimizer,
            group,
            mesh,
            keeps=stateful_of(parallel, rank_context.workload),
            averages=average.values,
            without_frozen=rank_context.adapters is not None,
        )
        events.set_phase("resuming")
        progress, position = setup.restore_checkpoint(rank_context, state, events)
        state.extra = progress.extra
        if state.without_frozen:
            state.extra["base_manifest_digest"] = job.manifest_digest
        resumed_from = progress.step
        follow(optimizer, progress.step)
        exporter = stack.enter_context(setup.exporter_of(rank_context, place.rank))
        events.emit(
            "resumed",
            progress.step,
            position=position,
            metrics_port=exporter.port,
            read_bytes=rank_context.store.read_bytes,
        )

        checkpointer = setup.checkpointer_of(rank_context, state, environment)
        stack.callback(checkpointer.close)
        stream = stack.enter_context(rank_context.stream(mesh.data_rank, mesh.data_world, position))
        step_reporter = StepReporter(
            events, checkpointer, progress, place.rank, stream, exporter, rank_context.store
        )
        stop.listening = True
        events.set_phase(
            "first step", progress.step
        )  # slower: it builds buckets and fetches shards
        train(
            parallel,
            rank_context.workload,
            optimizer,
            stream,
            settings,
            group,
            progress=progress,
            device=device,
            saver=checkpointer,
            evaluator=setup.evaluator_of(
                rank_context, mesh, lambda: events.phase("evaluating"), average.applied
            ),
            guard=StepGuard(settings.guard, bad=len(job.skip_batches)),
            step_metrics=setup.metrics_of(
                rank_context, parallel, group, device, place.rank, events
            ),
            on_step=step_reporter,
            should_stop=stop,
        )
        if progress.step > resumed_from:
            average_replicas(parallel)
            unsaved = setup.save_last(checkpointer, progress, stream.position, events)
            step_reporter.report_saved()
            if unsaved:
                return unsaved
        if progress.stopped:
            events.emit("failed", progress.step, code="Stopped", message="stopped, state saved")
            return STOPPED_EXIT

        with events.phase("exporting"):
            exported = model_export.export_trained(
                rank_context, state, progress, place.rank, average.applied
            )
        if place.rank == 0:
            done = setup.result_of(
                rank_context,
                progress,
                checkpointer,
                resumed_from=resumed_from,
                quarantined=stream.quarantined,
                environment=environment,
            )
            events.emit("result", progress.step, **exported, **done)
    return 0


def join_gang(place: RankIdentity, timeout_s: float) -> contextlib.AbstractContextManager[Group]:
    """Join the group of a launcher's ranks; see ``join_group``."""
    from paceline.training.loop.group import join_group

    return join_group(
        place.rank,
        place.world_size,
        place.master_host,
        place.master_port,
        place.attempt,
        timeout_s,
        serve=False,
        # Loopback also means that an older driver did not set the host.
        own="" if place.host == LOOPBACK else place.host,
    )


if __name__ == "__main__":
    # Skip interpreter shutdown: a thread in a collective with a dead peer may never return.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
