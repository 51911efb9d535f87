"""Checkpoints: whole or not there, damage of any kind found, one save in flight."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load, load_file

from paceline.config import EXPORT_FILE_BYTES, CheckpointSettings, TrainingSettings
from paceline.errors import (
    AccessDenied,
    CorruptData,
    InvalidInput,
    NotSaved,
    ServiceUnavailable,
    StorageFull,
    TrainingFailed,
)
from paceline.models import config_for, load_model, new_model, save_model
from paceline.storage import DiskStore, ObjectStore
from paceline.training.checkpoint import (
    MAX_TEMPORARY_FAILURES,
    Checkpointer,
    Generation,
    Generations,
    TrainState,
    export,
    resume_newest_healthy,
)
from paceline.training.loop import Group, new_optimizer
from tests.support.holdup import HoldUp
from tests.support.rclone import RcloneS3

CONFIG = config_for(50_000, 32)
DIGEST = "c" * 64
BUCKET = "checkpoint-units"
PART = "rank-00000-of-00001.safetensors"
FILES = (PART, "index.json", "commit.json")


class State:
    """A model and an optimiser that has taken a few steps."""

    def __init__(self, steps: int) -> None:
        self.model = new_model(CONFIG, 0)
        self.optimizer = new_optimizer(self.model, TrainingSettings())
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        tokens_BT = torch.arange(32)[None]
        torch.autograd.backward(self.model(tokens_BT).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        tensors = self.train_state().tensors()
        return [tensors[name].numpy().tobytes() for name in sorted(tensors)]

    def train_state(self) -> TrainState:
        return TrainState([self.model], self.optimizer, Group())

    def saver(self, generations: Generations, **changes: object) -> Checkpointer:
        return saver_of(generations, self.train_state(), **changes)


def saver_of(generations: Generations, state: TrainState, **changes: object) -> Checkpointer:
    values: dict[str, object] = {"every_steps": 1, "keep": 2, "max_stall_share": 0.99}
    return Checkpointer(
        generations,
        state,
        CheckpointSettings.model_validate(values | changes),
        job_id="job",
        config_digest=DIGEST,
        code_version="test",
        environment={"torch": "2.13.0"},
    )


ON_BOTH = pytest.mark.parametrize("generations", ["disk", "s3"], indirect=True)


@pytest.fixture
def generations(request: pytest.FixtureRequest, tmp_path: Path) -> Generations:
    """An empty place on a disk or, with ``ON_BOTH``, also in S3."""
    if getattr(request, "param", "disk") == "disk":
        return Generations(DiskStore(), DiskStore.url_of(tmp_path / "checkpoints"))
    s3: RcloneS3 = request.getfixturevalue("s3")
    store = s3.store()
    store.ensure_bucket(BUCKET)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Generations(store, f"s3://{BUCKET}/{name}")


@pytest.fixture
def two(generations: Generations, tmp_path: Path) -> State:
    """State whose steps 1 and 2 are saved."""
    state = State(0)
    saver = state.saver(generations)
    for step in (1, 2):
        state.step()
        saver.save(step, {"batch": 6 * step}, {"loss": 1.0 / step}, wait=True)
        saver.finish()
    return state


def url_of(generations: Generations, step: int) -> str:
    """Return the URL of the committed generation of ``step``."""
    (found,) = [each for each in generations.find().committed if each.step == step]
    return generations.url_of(found)


def resume(
    generations: Generations, work_dir: Path, rejected: list[int] | None = None
) -> tuple[State, int]:
    state = State(0)
    found = resume_newest_healthy(
        generations,
        state.train_state(),
        config_digest=DIGEST,
        work_dir=work_dir,
        on_rejected=lambda step, why: rejected.append(step) if rejected is not None else None,
    )
    return state, -1 if found is None else found.step


@ON_BOTH
def test_state_comes_back_bit_for_bit_and_trains_on_alike(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    restored, step = resume(generations, tmp_path, [])
    assert step == 2
    assert restored.bits() == two.bits()
    two.step()
    restored.step()
    assert restored.bits() == two.bits()


@pytest.mark.parametrize(
    ("generations", "file", "kind"),
    [
        *(("disk", PART, kind) for kind in ("flip", "truncate", "missing", "grow")),
        *(("disk", file, kind) for file in FILES[1:] for kind in ("empty", "missing")),
        ("s3", PART, "flip"),
        ("s3", FILES[1], "missing"),
    ],
    indirect=["generations"],
)
def test_any_damage_is_found_and_the_generation_before_is_used(
    two: State, generations: Generations, tmp_path: Path, file: str, kind: str
) -> None:
    url = f"{url_of(generations, 2)}/{file}"
    data = generations.store.get_bytes(url)
    if kind == "missing":
        generations.store.delete(url)
    else:
        changed = {
            "flip": data[:9] + bytes([data[9] ^ 4]) + data[10:],
            "truncate": data[:-3],
            "empty": b"",
            "grow": data + b" ",
        }[kind]
        generations.store.put_bytes(url, changed)
    rejected: list[int] = []
    _, step = resume(generations, tmp_path, rejected)
    assert step == 1
    if (file, kind) != ("commit.json", "missing"):  # then it never was a generation
        assert rejected == [2]
    assert generations.steps() == [1], "what was rejected is not offered again"
    generations.store.put_bytes(f"{url_of(generations, 1)}/{PART}", b"x")
    fresh, step = resume(generations, tmp_path, rejected)
    assert (step, rejected[-1]) == (-1, 1) and not fresh.optimizer.state


@given(
    position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(FILES)
)
@settings(max_examples=30, deadline=None)
def test_no_single_bit_flip_gets_through(
    one_on_disk: Generations, position: float, bit: int, file: str
) -> None:
    (generation,) = one_on_disk.find().committed
    path = DiskStore.path_of(one_on_disk.url_of(generation)) / file
    good = path.read_bytes()
    bad = bytearray(good)
    bad[int(position * len(good))] ^= 1 << bit
    path.write_bytes(bytes(bad))
    try:
        with pytest.raises(CorruptData):
            one_on_disk.verify(generation, path.parent)
    finally:
        path.write_bytes(good)
    one_on_disk.verify(generation, path.parent)


@pytest.fixture(scope="module")
def one_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Generations:
    root = tmp_path_factory.mktemp("flips")
    generations = Generations(DiskStore(), DiskStore.url_of(root))
    saver = State(1).saver(generations)
    saver.save_last(1, {"batch": 6}, {})
    return generations


def test_the_newest_and_the_best_are_kept(generations: Generations) -> None:
    state = State(0)
    saver = state.saver(generations, keep=2, keep_best=1)
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.2), start=1):
        state.step()
        saver.save(step, {"batch": step}, {"held_out_loss": loss}, wait=True)
    saver.finish()
    assert generations.steps() == [5, 4, 2]
    assert [each.step for each in saver.kept()] == [2, 4, 5]
    left = {info.url.split("/")[-2][:13] for info in generations.store.list(generations.url)}
    assert left == {"step-00000005", "step-00000004", "step-00000002"}
    again = Generations(generations.store, generations.url)  # another process, who saved none
    other = State(6)
    other.saver(again, keep=1, keep_best=1).save_last(6, {}, {"held_out_loss": 1.5})
    assert again.steps() == [6, 2]


@ON_BOTH
def test_what_a_dead_save_left_is_collected_and_the_rejected_are_listed(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    left = Generation(2, 0xDEAD)
    generations.store.put_bytes(f"{generations.url_of(left)}/{PART}", b"half")
    assert generations.find().unfinished == (left,)
    rotten = generations.find().committed[0]
    generations.store.put_bytes(f"{generations.url_of(rotten)}/{PART}", b"rot")
    assert resume(generations, tmp_path)[1] == 1
    assert generations.find().rejected == (rotten,)
    assert "another size" in generations.why_rejected(rotten)
    two.saver(generations).save_last(3, {}, {})
    assert generations.find().unfinished == ()
    assert generations.steps() == [3, 1]


def test_a_step_that_is_saved_again_never_touches_the_one_before(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    before = generations.find().committed[0]
    with pytest.raises(ServiceUnavailable):
        two.saver(failing(generations, "upload_file", AWAY)).save_last(2, {}, {})
    generations.verify(before, tmp_path)
    two.saver(generations).save_last(2, {}, {})
    assert generations.steps() == [2, 1]
    after = generations.find().committed[0]
    assert after != before
    generations.verify(after, tmp_path)


class Instead:
    """A store one of whose methods is replaced."""

    def __init__(self, store: ObjectStore, **methods: Any) -> None:
        self._store = store
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self._store, name)


def failing(generations: Generations, method: str, error: Exception) -> Generations:
    """Return ``generations`` in a store whose ``method`` raises ``error``."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return Generations(Instead(generations.store, **{method: fail}), generations.url)  # type: ignore[arg-type]


AWAY = ServiceUnavailable("S3 does not answer")


def test_one_save_is_in_flight_and_a_slow_store_only_puts_the_next_off(
    generations: Generations, tmp_path: Path
) -> None:
    go = threading.Event()

    def upload_file(*arguments: Any) -> Any:
        assert go.wait(30)
        return generations.store.upload_file(*arguments)

    slow = Instead(generations.store, upload_file=upload_file)
    held = Generations(slow, generations.url)  # type: ignore[arg-type]
    state = State(1)
    saver = state.saver(held, every_steps=10)
    within = {"item": 1}
    assert saver.save(10, {"batch": 10, "within": within}, {})
    within["item"] = 2
    saved = state.bits()
    state.step()  # training goes on; what is being saved does not change under the writer
    assert not saver.save(20, {"batch": 20}, {})
    assert saver.postponed == 1
    assert saver.due(21, 100), "a save that was put off is due at once"
    assert generations.steps() == [], "nothing half-written is a generation"
    go.set()
    saver.finish()
    assert generations.steps() == [10]
    restored, _ = resume(generations, tmp_path / "r", [])
    assert restored.bits() == saved
    commit = generations.commit_of(generations.find().committed[0])
    assert commit.position == {"batch": 10, "within": {"item": 1}}
    assert saver.save(21, {"batch": 21}, {})
    saver.finish()
    assert generations.steps() == [21, 10]


def test_hanging_storage_costs_training_only_a_longer_interval(
    s3: RcloneS3, tmp_path: Path
) -> None:
    """Fault 21, with a real server behind a proxy."""
    s3.store().ensure_bucket(BUCKET)
    proxy = HoldUp(urlsplit(s3.endpoint_url).port or 0)
    try:
        store = ObjectStore(
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            access_key=s3.access_key,
            secret_key=s3.secret_key,
        )
        behind = Generations(store, f"s3://{BUCKET}/fault-21")
        beside = Generations(s3.store(), behind.url)
        state = State(0)
        saver = state.saver(behind, every_steps=2, keep=5)
        trained = 0
        for step in range(1, 5):
            state.step()
            if saver.due(step, 100):
                assert saver.save(step, {"batch": step}, {}, wait=True)
        saver.finish()
        assert beside.steps() == [4, 2]
        proxy.hold_answers()
        for step in range(5, 12):
            state.step()
            trained += 1
            if saver.due(step, 100):
                saver.save(step, {"batch": step}, {})
        assert trained == 7, "training went on"
        assert saver.postponed == 1, "one save was in flight, and the next is due when it ends"
        assert [alert.kind for alert in saver.alerts] == ["checkpoint-storage-slow"]
        assert beside.steps() == [4, 2], "the ones before are what they were"
        proxy.cut()  # what was under way is lost on the way
        proxy.free()
        saver.finish()
        assert beside.steps() == [6, 4, 2], "and was tried again"
        assert saver.due(12, 100), "what was put off is due"
        assert saver.save(12, {"batch": 12}, {})
        saver.finish()
        assert resume(beside, tmp_path)[1] == 12
    finally:
        proxy.close()


@pytest.mark.parametrize("full", [False, True], ids=["away", "full"])
def test_a_store_that_is_away_or_full_costs_saves_and_training_goes_on(
    two: State, generations: Generations, full: bool
) -> None:
    def upload_file(path: Path, url: str, sha256: str = "") -> None:
        generations.store.put_bytes(url, path.read_bytes()[:100])
        raise StorageFull("disk is full", where=url, do="Free space.") if full else AWAY

    store: Any = Instead(generations.store, upload_file=upload_file)
    saver = two.saver(Generations(store, generations.url))
    for step in range(3, 3 + MAX_TEMPORARY_FAILURES - 1):
        saver.save(step, {}, {})
        saver.finish()
    assert generations.steps() == [2, 1], "the generations before are intact"
    assert {alert.kind for alert in saver.alerts} == {"checkpoint-failed"}
    if full:
        assert generations.find().unfinished == (), "half a save would be in the next one's way"
        assert "disk is full" in saver.alerts[0].message and "room for" in saver.alerts[0].message
    saver.save(90, {}, {})
    with pytest.raises(NotSaved if full else ServiceUnavailable):
        saver.finish()


def test_a_store_that_refuses_twice_stops_training(two: State, generations: Generations) -> None:
    refusal = AccessDenied("S3 refused the credentials", do="Check them.")
    saver = two.saver(failing(generations, "upload_file", refusal))
    saver.save(3, {}, {})
    saver.finish()
    saver.save(4, {}, {})
    with pytest.raises(NotSaved, match=r"refused the credentials.*step 4, rank 0.*Check them"):
        saver.finish()


def test_a_store_that_does_not_answer_rejects_nothing(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    for method in ("list", "get_bytes"):
        with pytest.raises(ServiceUnavailable):
            resume(failing(generations, method, AWAY), tmp_path)
    assert generations.steps() == [2, 1]


def test_a_state_that_is_not_finite_is_never_saved(two: State, generations: Generations) -> None:
    with torch.no_grad():
        two.model.model.norm.weight[0] = float("inf")
    saver = two.saver(generations)
    saver.save(3, {}, {})
    with pytest.raises(TrainingFailed, match=r"not finite.*norm"):
        saver.finish()
    with torch.no_grad():
        two.model.model.norm.weight[0] = 1.0
    moment = next(iter(two.optimizer.state.values()))["exp_avg"]
    moment.view(-1)[-1] = float("nan")
    with pytest.raises(TrainingFailed, match=r"not finite.*exp_avg"):
        saver.save_last(4, {}, {})
    assert generations.steps() == [2, 1]


def test_a_commit_marker_records_its_origin(two: State, generations: Generations) -> None:
    commit = json.loads(generations.store.get_bytes(f"{url_of(generations, 2)}/commit.json"))
    assert commit["step"] == 2
    assert commit["position"] == {"batch": 12}
    assert commit["config_digest"] == DIGEST
    assert commit["code_version"] == "test"
    assert commit["metrics"] == {"loss": 0.5}
    assert set(commit["files"]) == {PART, "index.json"}
    assert commit["environment"] == {"torch": "2.13.0"}
    assert (commit["world_size"], commit["layout"]) == (1, {})
    assert "generator" in commit["randomness"]
    part = load(generations.store.get_bytes(f"{url_of(generations, 2)}/{PART}"))
    live = two.train_state().tensors()
    assert {key.partition("@")[0] for key in part} == set(live), "plain safetensors"
    assert all(torch.equal(part[key], live[key.partition("@")[0]]) for key in part)


def test_state_of_another_model_or_configuration_is_refused_and_kept(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    other = new_model(config_for(80_000, 32), 0)
    state = TrainState([other], new_optimizer(other, TrainingSettings()), Group())
    before = [tensor.clone() for tensor in other.state_dict().values()]
    with pytest.raises(TrainingFailed, match="another model"):
        resume_newest_healthy(generations, state, config_digest=DIGEST, work_dir=tmp_path)
    assert all(map(torch.equal, before, other.state_dict().values())), "nothing was loaded"
    with pytest.raises(TrainingFailed, match="another configuration"):
        resume_newest_healthy(generations, state, config_digest="d" * 64, work_dir=tmp_path)
    assert generations.steps() == [2, 1], "a healthy checkpoint is not rejected for that"


def test_what_the_caller_adds_comes_back(generations: Generations, tmp_path: Path) -> None:
    state = State(1).train_state()
    state.extra = {"scale": torch.tensor(1024.0), "growth": 7, "lost": ["a"]}
    saver_of(generations, state).save_last(1, {"batch": 1}, {"loss": 1.0, "bad": float("nan")})
    fresh = State(0).train_state()
    fresh.extra = {"scale": torch.tensor(0.0)}
    found = resume_newest_healthy(generations, fresh, config_digest=DIGEST, work_dir=tmp_path)
    assert found is not None
    assert found.metrics == {"loss": 1.0}
    assert found.position == fresh.position == {"batch": 1}
    assert fresh.extra == {"scale": torch.tensor(1024.0), "growth": 7, "lost": ["a"]}


def test_export_is_byte_for_byte_what_the_models_package_writes(tmp_path: Path) -> None:
    two, counts = State(2), []
    for size in (EXPORT_FILE_BYTES, 20_000):
        ours, theirs = tmp_path / f"ours-{size}", tmp_path / f"theirs-{size}"
        export(two.train_state(), CONFIG, ours, file_bytes=size)
        save_model(two.model, CONFIG, theirs, file_bytes=size)
        written = {path.name: path.read_bytes() for path in ours.iterdir()}
        assert written == {path.name: path.read_bytes() for path in theirs.iterdir()}
        counts.append(len(written))
    assert counts[0] < counts[1]


def test_an_export_may_be_in_another_dtype(tmp_path: Path) -> None:
    two = State(2)
    export(two.train_state(), CONFIG, tmp_path / "halves", dtype=torch.bfloat16)
    model, config = load_model(tmp_path / "halves")
    assert config.torch_dtype == "bfloat16"
    for name, trained in two.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], trained.bfloat16())
    with torch.no_grad():
        two.model.model.norm.weight[0] = 1e6  # above the largest of float16
    with pytest.raises(InvalidInput, match=r"not finite.*norm"):
        export(two.train_state(), CONFIG, tmp_path / "small", dtype=torch.float16)


def test_an_export_that_cannot_be_written_raises_a_named_error(tmp_path: Path) -> None:
    two = State(2)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(TrainingFailed, match="cannot be exported"):
        export(two.train_state(), CONFIG, tmp_path / "taken")
    with torch.no_grad():
        two.model.model.norm.weight[0] = float("nan")
    with pytest.raises(InvalidInput, match=r"not finite.*norm"):
        export(two.train_state(), CONFIG, tmp_path / "nan")


def test_a_model_of_one_s_own_is_exported_and_comes_back_as_it_is(tmp_path: Path) -> None:
    def made() -> TrainState:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).bfloat16()
        model.register_buffer("seen", torch.tensor([True, False]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainState([model], optimizer, Group())

    state = made()
    (model,) = state.modules
    torch.autograd.backward(model(torch.ones(4, 3).bfloat16()).sum())
    state.optimizer.step()
    generations = Generations(DiskStore(), DiskStore.url_of(tmp_path / "own"))
    saver_of(generations, state).save_last(1, {}, {})
    again = made()
    resume_newest_healthy(generations, again, config_digest=DIGEST, work_dir=tmp_path)
    saved, found = state.tensors(), again.tensors()
    assert saved.keys() == found.keys()
    assert any(name.startswith("momentum_buffer.") for name in found)
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    export(state, None, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model-00001-of-00001.safetensors")
    live = model.state_dict()
    assert exported.keys() == live.keys()
    assert all(torch.equal(exported[name], live[name]) for name in live)
    assert not (tmp_path / "export" / "config.json").exists()
    export(state, None, tmp_path / "wide", dtype=torch.float32)
    wide = load_file(tmp_path / "wide" / "model-00001-of-00001.safetensors")
    assert {name: each.dtype for name, each in wide.items()} == {
        name: torch.float32 if each.is_floating_point() else each.dtype
        for name, each in live.items()
    }


@pytest.mark.parametrize("generations", ["s3"], indirect=True)
def test_a_large_part_goes_to_s3_in_parallel_parts_without_a_file(
    generations: Generations, tmp_path: Path
) -> None:
    big = torch.arange(10_000_000, dtype=torch.float32)  # more than two parts of an upload
    model = torch.nn.Linear(2, 2)

    def made(tensor: torch.Tensor) -> TrainState:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainState([model], optimizer, Group(), extra={"big": tensor})

    saver_of(generations, made(big)).save_last(1, {}, {})
    again = made(torch.zeros_like(big))
    resume_newest_healthy(generations, again, config_digest=DIGEST, work_dir=tmp_path)
    assert torch.equal(again.extra["big"], big)
    assert not list(tmp_path.rglob("*.safetensors")), "what was fetched is gone again"
