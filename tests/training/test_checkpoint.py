"""Checkpoints: whole or not there, damage of any kind found, one save in flight."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CorruptData, ServiceUnavailable, TrainingFailed
from paceline.models import config_for, new_model
from paceline.objects import ObjectStore
from paceline.profile import TrainingSettings
from paceline.training.checkpoint import Checkpointer, Generations, restore
from paceline.training.group import Group
from paceline.training.recipe import new_optimizer, optimizer_tensors
from paceline.training.recovery import resume_newest_healthy
from tests.training.conftest import BUCKET, Camp

CONFIG = config_for(50_000, 32)
DIGEST = "c" * 64
FILES = ("model.safetensors", "optimizer.safetensors", "commit.json")


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
        moments = optimizer_tensors(self.model, self.optimizer)
        tensors = [*self.model.state_dict().values(), *moments.values()]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]

    def saver(self, generations: Generations, work_dir: Path, **changes: object) -> Checkpointer:
        values: dict[str, object] = {
            "job_id": "job",
            "config_digest": DIGEST,
            "code_version": "test",
            "every_steps": 1,
            "keep": 2,
            "work_dir": work_dir,
        }
        return Checkpointer(generations, self.model, self.optimizer, **(values | changes))


@pytest.fixture
def generations(camp: Camp, request: pytest.FixtureRequest) -> Generations:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Generations(camp.store, f"s3://{BUCKET}/checkpoints/unit-{name}")


@pytest.fixture
def two(generations: Generations, tmp_path: Path) -> State:
    """State whose steps 1 and 2 are saved."""
    state = State(0)
    saver = state.saver(generations, tmp_path / "w")
    for step in (1, 2):
        state.step()
        saver.save(step, {"batch": 6 * step}, {"loss": 1.0 / step}, wait=True)
        saver.finish()
    return state


def resume(generations: Generations, work_dir: Path, rejected: list[int]) -> tuple[State, int]:
    state = State(0)
    found = resume_newest_healthy(
        generations,
        Group(),
        state.model,
        state.optimizer,
        config_digest=DIGEST,
        work_dir=work_dir,
        on_rejected=lambda step, why: rejected.append(step),
    )
    return state, -1 if found is None else found.step


def test_state_comes_back_bit_for_bit_and_trains_on_alike(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    restored, step = resume(generations, tmp_path, [])
    assert step == 2
    assert restored.bits() == two.bits()
    two.step()
    restored.step()
    assert restored.bits() == two.bits()


def damage_bit(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["flip", "truncate", "empty", "missing", "grow"])
def test_any_damage_is_found_and_the_generation_before_is_used(
    two: State, generations: Generations, tmp_path: Path, file: str, kind: str
) -> None:
    url = f"{generations.step_url(2)}/{file}"
    data = camp_bytes(generations, url)
    if kind == "missing":
        generations.store.delete(url)
    else:
        changed = {
            "flip": damage_bit(data),
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


def camp_bytes(generations: Generations, url: str) -> bytes:
    return generations.store.get_bytes(url)


@given(
    position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(FILES)
)
@settings(max_examples=40, deadline=None)
def test_no_single_bit_flip_gets_through(camp: Camp, position: float, bit: int, file: str) -> None:
    generations = Generations(camp.store, f"s3://{BUCKET}/checkpoints/flips")
    directory = camp.runtime.state_dir / "flips"
    if not generations.steps():
        state = State(1)
        saver = state.saver(generations, directory / "w")
        saver.save(1, {"batch": 6}, {})
        saver.finish()
    url = f"{generations.step_url(1)}/{file}"
    good = generations.store.get_bytes(url)
    bad = bytearray(good)
    bad[int(position * len(good))] ^= 1 << bit
    generations.store.put_bytes(url, bytes(bad))
    try:
        with pytest.raises(CorruptData):
            generations.fetch(1, directory / "r", DIGEST)
    finally:
        generations.store.put_bytes(url, good)


def test_when_all_generations_are_damaged_training_starts_afresh(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    for step in (1, 2):
        generations.store.put_bytes(f"{generations.step_url(step)}/model.safetensors", b"x")
    rejected: list[int] = []
    fresh, step = resume(generations, tmp_path, rejected)
    assert (step, rejected) == (-1, [2, 1])
    assert not fresh.optimizer.state


def test_only_so_many_generations_are_kept(generations: Generations, tmp_path: Path) -> None:
    state = State(0)
    saver = state.saver(generations, tmp_path, keep=2)
    for step in range(1, 6):
        state.step()
        saver.save(step, {"batch": step}, {}, wait=True)
    saver.finish()
    assert generations.steps() == [5, 4]
    assert [each.step for each in saver.kept()] == [4, 5]
    left = {info.url.split("/")[-2] for info in generations.store.list(generations.url)}
    assert left == {"step-00000004", "step-00000005"}


class SlowStore:
    """A store that holds uploads until it is told."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.go = threading.Event()

    def upload_file(self, path, url):
        assert self.go.wait(30)
        return self._store.upload_file(path, url)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_one_save_is_in_flight_and_a_slow_store_only_puts_the_next_off(
    generations: Generations, tmp_path: Path
) -> None:
    slow = SlowStore(generations.store)
    held = Generations(slow, generations.url)  # type: ignore[arg-type]
    state = State(1)
    saver = state.saver(held, tmp_path, every_steps=10)
    assert saver.save(10, {"batch": 10}, {})
    saved = state.bits()
    state.step()  # training goes on; what is being saved does not change under the writer
    assert not saver.save(20, {"batch": 20}, {})
    assert saver.put_off == 1
    assert saver.due(21, 100), "a save that was put off is due at once"
    assert generations.steps() == [], "nothing half-written is a generation"
    slow.go.set()
    saver.finish()
    assert generations.steps() == [10]
    restored, _ = resume(generations, tmp_path / "r", [])
    assert restored.bits() == saved
    assert saver.save(21, {"batch": 21}, {})
    saver.finish()
    assert generations.steps() == [21, 10]


class BrokenStore(SlowStore):
    """A store that is away."""

    def upload_file(self, path, url):
        raise ServiceUnavailable("S3 does not answer")


def test_a_store_that_is_away_costs_one_save_and_two_in_a_row_are_fatal(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    broken = Generations(BrokenStore(generations.store), generations.url)  # type: ignore[arg-type]
    saver = two.saver(broken, tmp_path / "b")
    saver.save(3, {"batch": 3}, {})
    saver.finish()
    assert generations.steps() == [2, 1], "the generations before are intact"
    saver.save(4, {"batch": 4}, {})
    with pytest.raises(ServiceUnavailable):
        saver.finish()


def test_weights_that_are_not_finite_are_never_saved(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    with torch.no_grad():
        two.model.model.norm.weight[0] = float("inf")
    with pytest.raises(TrainingFailed, match="not finite"):
        two.saver(generations, tmp_path / "n").save(3, {"batch": 3}, {})
    assert generations.steps() == [2, 1]


def test_a_commit_marker_says_what_made_it(two: State, generations: Generations) -> None:
    commit = json.loads(generations.store.get_bytes(f"{generations.step_url(2)}/commit.json"))
    assert commit["step"] == 2
    assert commit["position"] == {"batch": 12}
    assert commit["config_digest"] == DIGEST
    assert commit["code_version"] == "test"
    assert commit["metrics"] == {"loss": 0.5}
    assert set(commit["files"]) == {"model.safetensors", "optimizer.safetensors"}


def test_state_of_another_model_is_refused(
    two: State, generations: Generations, tmp_path: Path
) -> None:
    commit = generations.fetch(2, tmp_path / "f", DIGEST)
    other = new_model(config_for(80_000, 32), 0)
    optimizer = new_optimizer(other, TrainingSettings())
    with pytest.raises(CorruptData):
        restore(tmp_path / "f", commit, other, optimizer)
