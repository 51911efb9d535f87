"""One rank of a training job: ``python -m paceline.training.rank``.

Reads one line of JSON, a TrainJob, on standard input, and RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, PACELINE_ATTEMPT and PACELINE_WORKER_ID from its environment; writes RankEvent lines on
standard output. The base model is the one on this node's own disk, checked byte by byte.

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
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput, PacelineError, PeerLost
from paceline.profile import DataSettings
from paceline.training.watch import STOPPED_EXIT, StopFlag, die_with_parent, share_cores
from paceline.wire.training import RankEvent, TrainJob

if TYPE_CHECKING:
    from paceline.data import Snapshot
    from paceline.models import ModelConfig, Transformer
    from paceline.objects import ObjectStore
    from paceline.training.checkpoint import Checkpointer, Generations, TrainState
    from paceline.training.loop import Progress

PULSE_S = 0.5
FOLLOWER_BEAT_S = 0.5  # ranks other than 0 speak this often, so that a hang is noticed on any


@dataclass(frozen=True)
class Place:
    """Who this process is, as its launcher said."""

    rank: int
    world_size: int
    master_host: str
    master_port: int
    attempt: int
    worker_id: str

    @classmethod
    def from_environment(cls) -> Place:
        """Return the place in the environment; raises InvalidInput where a variable is missing."""
        if "PACELINE_SPARE" in os.environ:  # its place comes later
            os.environ.setdefault("RANK", "0")
            os.environ.setdefault("WORLD_SIZE", "1")
        try:
            return cls(
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                master_host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
                master_port=int(os.environ.get("MASTER_PORT", "0")),
                attempt=int(os.environ.get("PACELINE_ATTEMPT", "1")),
                worker_id=os.environ["PACELINE_WORKER_ID"],
            )
        except (KeyError, ValueError) as error:
            raise InvalidInput(
                "rank was started without its environment",
                got=repr(error),
                wanted="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PACELINE_WORKER_ID",
            ) from error


class Voice:
    """Writes this rank's events, one line each, and its pulse: phase, step, and since when.

    The pulse is a thread, so that a process that is frozen falls silent, while one whose main
    thread hangs goes on beating with a step that does not: the launcher tells them apart.
    """

    _phase, _step, _since = "loading", 0, 0.0

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._since = time.monotonic()

    def beat(self) -> None:
        """Start the pulse."""
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def take(self, place: Place) -> None:
        """Speak as ``place`` from now on (a spare that was given one)."""
        self._place = place

    def say(self, event: Any, step: int = 0, **data: object) -> None:
        """Write one event."""
        place = self._place
        record = RankEvent(
            event=event, rank=place.rank, attempt=place.attempt, step=step, data=data
        )
        self._write(record.model_dump_json())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Be in ``phase`` from now on; with "step", a step has just been made."""
        self._phase, self._since = phase, time.monotonic()
        if step is not None:
            self._step = step

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in phase ``name`` for the time of the ``with``, then back in the one before."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def _pulse(self) -> None:
        while True:
            since = time.monotonic() - self._since
            line = {"event": "beat", "phase": self._phase, "step": self._step, "since_s": since}
            self._write(json.dumps(line, separators=(",", ":")))
            time.sleep(PULSE_S)

    def _write(self, line: str) -> None:
        with self._lock:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def main() -> int:
    """Run this rank and return its exit code."""
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
    import paceline.objects
    import paceline.training.checkpoint.resuming
    import paceline.training.checkpoint.saver
    import paceline.training.group
    import paceline.training.loop  # noqa: F401

    torch.set_num_threads(1)


def wait_for_place(job: TrainJob, voice: Voice) -> tuple[Place, TrainJob]:
    """Load what can be loaded without a place in the gang, then wait for one."""
    place = Place.from_environment()
    load(job, place)  # verified, and in this node's caches
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


@dataclass
class Loaded:
    """All that a rank has before it meets the others."""

    job: TrainJob
    place: Place
    node: Path
    work_dir: Path
    store: ObjectStore
    model: Transformer
    config: ModelConfig
    snapshot: Snapshot
    optimizer: Any
    generations: Generations
    config_digest: str


def run_rank(job: TrainJob, place: Place, voice: Voice, stop: StopFlag) -> int:
    """Train as ``place`` in ``job``: load, resume, train, save, export."""
    from paceline.data import ShardCache, open_stream
    from paceline.training.checkpoint import Checkpointer, TrainState, WholeModel
    from paceline.training.group import join_group
    from paceline.training.identity import code_version, stream_seed
    from paceline.training.loop import train_model as train

    settings = job.settings
    with contextlib.ExitStack() as stack:
        its = load(job, place)
        group = stack.enter_context(
            join_group(
                place.rank,
                place.world_size,
                place.master_host,
                place.master_port,
                place.attempt,
                settings.guard.step_deadline_s,
                serve=False,
            )
        )
        state = TrainState(WholeModel(its.model), its.optimizer, group)
        progress, position = resume(its, state, voice)
        resumed_from = progress.step
        voice.say("resumed", progress.step, position=position)
        saver = Checkpointer(
            its.generations,
            state,
            settings.checkpoints,
            job_id=job.job_id,
            config_digest=its.config_digest,
            code_version=code_version(),
            deadline_s=settings.guard.checkpoint_deadline_s,
        )
        stream = open_stream(
            its.snapshot,
            "train",
            ShardCache(its.snapshot, its.store, its.node / "cache"),
            DataSettings(),
            context=its.config.context,
            global_batch=settings.batch_sequences,
            seed=stream_seed("job", settings.seed),
            rank=place.rank,
            world_size=place.world_size,
            position=position,
        )
        stop.listening = True
        voice.enter("first step", progress.step)  # lays out buckets, fetches shards
        with stream:
            train(
                its.model,
                its.optimizer,
                stream,
                settings,
                group,
                progress=progress,
                labels=job.labels,
                saver=saver,
                on_step=_Teller(voice, saver, progress, place.rank, stream.quarantined),
                should_stop=stop,
            )
        if progress.step > resumed_from:
            with voice.phase("saving"):
                saver.save_last(progress.step, stream.position, progress.metrics())
            if place.rank == 0:
                _tell_saved(voice, saver)
        if progress.stopped:
            voice.say("failed", progress.step, code="Stopped", message="stopped, state saved")
            return STOPPED_EXIT

    if place.rank == 0:
        with voice.phase("exporting"):
            result = export(its)
        voice.say(
            "result",
            progress.step,
            **result,
            steps=progress.step,
            resumed_from_step=resumed_from,
            first_loss=progress.first_loss,
            final_loss=progress.loss,
            tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
            data_wait_share=progress.share(progress.data_wait_s),
            checkpoint_stall_share=progress.share(progress.stall_s),
            checkpoints=[each.model_dump() for each in saver.kept()],
            checkpoints_put_off=saver.put_off,
            quarantined_shards=sorted(stream.quarantined),
            config_digest=its.config_digest,
            code_version=code_version(),
        )
    return 0


def load(job: TrainJob, place: Place) -> Loaded:
    """Return base model, snapshot and optimiser, each checked against what the job names."""
    import torch

    from paceline.data import load_snapshot, require_purpose
    from paceline.objects import ObjectStore, join_url
    from paceline.profile import load_runtime
    from paceline.training.checkpoint import Generations
    from paceline.training.identity import config_digest
    from paceline.training.recipe import new_optimizer

    torch.set_num_threads(job.settings.threads_per_rank)
    torch.use_deterministic_algorithms(job.deterministic)
    runtime = load_runtime(job.state_dir)
    node = runtime.node_dir(place.worker_id)
    work_dir = node / "work" / job.job_id / f"rank-{place.rank}"
    work_dir.mkdir(parents=True, exist_ok=True)
    store = ObjectStore.from_runtime(runtime)
    snapshot = load_snapshot(job.snapshot_url, store)
    if snapshot.digest != job.snapshot_digest:
        raise InvalidInput(
            "another snapshot than the job's",
            got=snapshot.digest,
            wanted=job.snapshot_digest,
            where=job.snapshot_url,
        )
    require_purpose(snapshot, job.purpose)
    model, config = load_base(node, job)
    return Loaded(
        job=job,
        place=place,
        node=node,
        work_dir=work_dir,
        store=store,
        model=model,
        config=config,
        snapshot=snapshot,
        optimizer=new_optimizer(model, job.settings),
        generations=Generations(store, join_url(job.checkpoint_url, job.job_id)),
        config_digest=config_digest(job),
    )


def resume(its: Loaded, state: TrainState, voice: Voice) -> tuple[Progress, dict[str, Any] | None]:
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
        step=restored.step, first_loss=metrics.get("first_loss"), loss=metrics.get("loss")
    )
    return progress, restored.position


def load_base(node: Path, job: TrainJob) -> tuple[Transformer, ModelConfig]:
    """Return the base model from this node's own store, after checking every byte of it."""
    from paceline.manifest import MANIFEST_FILE, parse_manifest, verify_directory
    from paceline.models import load_model

    directory = node / "store" / "models" / job.model_id / job.version
    try:
        manifest = parse_manifest((directory / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise InvalidInput(
            "base model is not on this node",
            got=error.strerror,
            wanted=f"{job.model_id} {job.version}",
            where=directory,
            do="Distribute it first: `paceline distribute`.",
        ) from error
    if manifest.digest != job.manifest_digest:
        raise InvalidInput(
            "another model than the job's is on this node",
            got=manifest.digest,
            wanted=job.manifest_digest,
            where=directory,
        )
    verify_directory(directory, manifest)
    return load_model(directory)


def export(its: Loaded) -> dict[str, Any]:
    """Upload the trained model as safetensors and config, and return its URL and digest."""
    from paceline.models import save_model, weights_digest
    from paceline.objects import join_url

    directory = its.work_dir / "export"
    shutil.rmtree(directory, ignore_errors=True)
    save_model(its.model, its.config, directory)
    url = join_url(its.job.checkpoint_url, its.job.job_id, "export")
    for path in sorted(directory.iterdir()):
        its.store.upload_file(path, join_url(url, path.name))
    digest = weights_digest(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return {"export_url": url, "weights_digest": digest}


class _Teller:
    """Says each step of rank 0, and enough of the others' to show that they live."""

    def __init__(
        self,
        voice: Voice,
        saver: Checkpointer,
        progress: Progress,
        rank: int,
        quarantined: dict[str, str],
    ) -> None:
        self._voice = voice
        self._saver = saver
        self._progress = progress
        self._rank = rank
        self._quarantined = quarantined
        self._said_at = 0.0

    def __call__(self, report: Any) -> None:
        self._voice.enter("step", report.step)
        now = time.monotonic()
        if self._rank != 0 and now - self._said_at < FOLLOWER_BEAT_S:
            return
        self._said_at = now
        progress = self._progress
        more: dict[str, object] = {}
        if self._quarantined:
            more["quarantined_shards"] = sorted(self._quarantined)
        self._voice.say(
            "step",
            report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.learning_rate,
            step_seconds=report.seconds,
            tokens_per_second=report.tokens_per_second,
            data_wait_share=progress.share(progress.data_wait_s),
            checkpoint_stall_share=progress.share(progress.stall_s),
            checkpoints_put_off=self._saver.put_off,
            **more,
        )
        if self._rank == 0:
            _tell_saved(self._voice, self._saver)


def _tell_saved(voice: Voice, saver: Checkpointer) -> None:
    for ref in saver.report():
        voice.say("checkpoint", ref.step, url=ref.url, digest=ref.digest, bytes=ref.bytes)


if __name__ == "__main__":
    # Not through interpreter shutdown: a collective with a dead peer may never return its thread.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
