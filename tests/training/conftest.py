"""A camp: a state directory, a small snapshot in real S3, a tiny base model on two nodes' disks."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.config import (
    CheckpointSettings,
    DataSettings,
    Endpoints,
    GuardSettings,
    Profile,
    Runtime,
    Secrets,
    SecuritySettings,
    TrainingSettings,
    save_runtime,
)
from paceline.data import Snapshot, build_snapshot
from paceline.manifest import build_manifest, write_manifest
from paceline.models import config_for, load_model, new_model, save_model, weights_digest
from paceline.schemas import RankEvent, TrainJob, TrainResult
from paceline.storage import ObjectStore
from paceline.training import LocalLauncher, run_job
from paceline.training.loop import EventWriter, RankIdentity, StopFlag, run_rank
from tests.support.carried_state import SOURCE
from tests.support.rclone import RcloneS3
from tests.training.warm import warm_node

__all__ = ["warm_node"]  # a fixture

PARAMETERS, CONTEXT, BATCH = 50_000, 32, 6
BUCKET = "training"
SETTINGS = TrainingSettings(
    ranks=1,
    steps=24,
    batch_sequences=BATCH,
    learning_rate=3e-3,
    warmup_steps=3,
    # Steps of a few ms: how much a save stalls them is not what these tests are about.
    checkpoints=CheckpointSettings(every_steps=4, keep=3, max_stall_share=0.99),
    guard=GuardSettings(max_restarts=3, start_deadline_s=60, step_deadline_s=60),
)


@pytest.fixture(autouse=True)
def no_module_of_an_earlier_test() -> Iterator[None]:
    """Forget the example that a test loaded here: a process takes a module from one directory."""

    def forget() -> None:  # also what a fixture of a whole module loaded
        sys.modules.pop("byte_gru", None)
        sys.path[:] = [each for each in sys.path if not Path(each, "byte_gru.py").is_file()]

    forget()
    yield
    forget()


class Listener(EventWriter):
    """Keeps what a rank says."""

    def __init__(self) -> None:
        self.events: list[RankEvent] = []

    def emit(self, event, step=0, **data):
        self.events.append(RankEvent(event=event, rank=0, attempt=1, step=step, data=data))

    def of(self, kind: str) -> list[RankEvent]:
        return [each for each in self.events if each.event == kind]

    @property
    def losses(self) -> list[float]:
        return [each.data["loss"] for each in self.of("step")]


@dataclass
class Camp:
    runtime: Runtime
    store: ObjectStore
    snapshot: Snapshot
    manifest_digest: str
    base_digest: str
    nodes: tuple[str, ...] = ("node-0", "node-1")
    purpose: str = "tests"
    finished: dict[str, Listener] = field(default_factory=dict)

    def job(self, job_id: str, **changes: object) -> TrainJob:
        settings = SETTINGS.model_dump()
        for key in set(changes) & set(settings):
            change = changes.pop(key)
            settings[key] = settings[key] | change if isinstance(change, dict) else change
        fields = {
            "job_id": job_id,
            "run_id": "run-20260101-000000-abcdef",
            "state_dir": str(self.runtime.state_dir),
            "model_id": "tiny",
            "version": "v1",
            "manifest_digest": self.manifest_digest,
            "snapshot_url": self.snapshot.url,
            "snapshot_digest": self.snapshot.digest,
            "purpose": self.purpose,
            "checkpoint_url": f"s3://{BUCKET}/checkpoints",
            "settings": settings,
        }
        return TrainJob.model_validate(fields | changes)

    @contextlib.contextmanager
    def trusting(self, *sources: str) -> Iterator[None]:
        """Ranks may run code from ``sources`` meanwhile."""
        security = SecuritySettings(code_sources=sources)
        profile = self.runtime.profile.model_copy(update={"security": security})
        save_runtime(self.runtime.model_copy(update={"profile": profile}))
        try:
            yield
        finally:
            save_runtime(self.runtime)

    def run_alone(self, job: TrainJob, stop: StopFlag | None = None) -> tuple[int, Listener]:
        """One rank in this process: no launch, so cheap."""
        listener = Listener()
        place = RankIdentity(0, 1, "127.0.0.1", 0, 1, "node-0")
        code = run_rank(job, place, listener, stop or StopFlag())
        return code, listener


@pytest.fixture(scope="session")
def camp(s3: RcloneS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Camp]:
    root = tmp_path_factory.mktemp("camp")
    store = s3.store()
    store.ensure_bucket(BUCKET)
    runtime = Runtime(
        profile=Profile(security=SecuritySettings(code_sources=(SOURCE,))),
        state_dir=root,
        endpoints=Endpoints(s3_url=s3.endpoint_url),
        secrets=Secrets(s3_access_key=s3.access_key, s3_secret_key=s3.secret_key),
    )
    save_runtime(runtime)
    texts = root / "texts"
    texts.mkdir()
    for number in range(30):
        body = "".join(f"line {n} of file {number} is {n * number}\n" for n in range(30))
        (texts / f"{number}.txt").write_text(body)
    snapshot = build_snapshot(
        str(texts),
        f"s3://{BUCKET}/data",
        DataSettings(shard_bytes=4096, purpose="tests", held_out_share=0.2),
        store,
    )
    directory = runtime.node_dir("node-0") / "store" / "models" / "tiny" / "v1"
    config = config_for(PARAMETERS, CONTEXT)
    save_model(new_model(config, 0), config, directory)
    manifest = build_manifest(directory, model_id="tiny", version="v1", link_mbit=100)
    write_manifest(directory, manifest)
    shutil.copytree(runtime.node_dir("node-0"), runtime.node_dir("node-1"))
    assert load_model(directory)[1] == config
    yield Camp(runtime, store, snapshot, manifest.digest, weights_digest(directory))


@pytest.fixture(scope="session")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of files that change what the tasks of ``poisoned`` do."""
    return tmp_path_factory.mktemp("troubles")


@pytest.fixture(scope="session")
def launcher(troubles: Path) -> Iterator[LocalLauncher]:
    """Nodes whose launchers stay warm; its tests are of the xdist group "gangs"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_TEST_TROUBLES", str(troubles))
        with LocalLauncher() as kept:
            yield kept


@dataclass
class Story:
    """What the ranks of a job sent, and its result."""

    result: TrainResult | None = None
    events: list[RankEvent] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        """Losses by step; of a step that ran twice, the last."""
        return {e.step: e.data["loss"] for e in self.events if e.event == "step" and e.rank == 0}


def run(
    camp: Camp,
    launcher: LocalLauncher,
    job: TrainJob,
    hook: Callable[[RankEvent, Story], None] = lambda *_: None,
    cancel: threading.Event | None = None,
    story: Story | None = None,
) -> Story:
    """Run ``job``; ``hook`` gets each event."""
    story = story or Story()

    def on_event(event: RankEvent) -> None:
        story.events.append(event)
        hook(event, story)

    story.result = run_job(job, camp.nodes, launcher, on_event=on_event, cancel=cancel)
    return story


@pytest.fixture(scope="session")
def pair(camp: Camp, launcher: LocalLauncher) -> Story:
    """Two ranks on two nodes, undisturbed."""
    return run(camp, launcher, camp.job("dp2", ranks=2, checkpoints={"keep": 10}))


@pytest.fixture
def base_dir(camp: Camp) -> Path:
    return camp.runtime.node_dir("node-0") / "store" / "models" / "tiny" / "v1"
