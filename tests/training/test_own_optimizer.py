"""An optimiser of one's own (``training.optimizer_ref``): its losses, its checkpoints, refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from paceline.config import TrainingSettings, load_profile, with_job_settings
from paceline.errors import AccessDenied, InvalidInput, InvalidProfile, PacelineError
from paceline.jobs import parameters_of
from paceline.schemas import JobState, SubmitJob, TrainingJob, new_run_id
from paceline.tasks.train import profile_of
from paceline.training import training_key
from paceline.training.user_code import Task, check, require_optimizer, tree_digest
from tests.support.carried_state import BYTE_GRU, SOURCE
from tests.support.hugging_face import write_model, write_tokenizer
from tests.training.warm import typed

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("warm node")]
CODE = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, groups, settings):
        super().__init__(groups, {"lr": settings.learning_rate})
        self.b1, self.b2 = settings.betas

    def learning_rate(self, step, steps):
        return 1e-3 / (1 + step)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                its = self.state[p]
                if not its:
                    its["momentum"] = torch.zeros_like(p)
                    its["count"] = torch.zeros(())
                its["count"] += 1
                m = its["momentum"]
                update = torch.sign(m * self.b1 + p.grad * (1 - self.b1))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * update / its["count"].item() ** 0.25)
                m.mul_(self.b2).add_(p.grad, alpha=1 - self.b2)

def lion(groups, settings):
    assert all(len(group["names"]) == len(group["params"]) for group in groups)
    return Lion(groups, settings)

def adamw(groups, settings):
    return torch.optim.AdamW(groups, settings.learning_rate, betas=settings.betas, fused=True)

def adafactor(groups, settings):
    return torch.optim.Adafactor(groups, lr=settings.learning_rate)

class Counting(Lion):
    count = 0

    def step(self):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.count
        super().step()

def counting(groups, settings):
    return Counting(groups, settings)

class Plain(Lion):
    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1

class Needs(Plain):
    def step(self):
        for its in self.state.values():
            its["step"] + 1
        super().step()

def needs(groups, settings):
    return Needs(groups, settings)

class Named(Lion):
    def step(self):
        super().step()
        for its in self.state.values():
            its["ema"] = its["momentum"]

def named(groups, settings):
    return Named(groups, settings)

def lbfgs(groups, settings):
    return torch.optim.LBFGS([p for group in groups for p in group["params"]])

def raising(groups, settings):
    raise RuntimeError("no such table: users")

def nothing(groups, settings):
    return {"lr": 1}

def fewer(groups, settings):
    return torch.optim.SGD([group for group in groups if group["weight_decay"]], lr=0.1)

class Nan(Lion):
    def learning_rate(self, step, steps):
        return float("nan")

def nan(groups, settings):
    return Nan(groups, settings)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code")
    (root / "own_steps.py").write_text(CODE)
    return root


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for number in range(20):
        (root / f"{number}.txt").write_text(f"line {number} of {number * 7} lines\n" * 40)
    return root


def reference(code: Path, function: str) -> str:
    return f"file://{code}@sha256:{tree_digest(code)}#own_steps:{function}"


def words_of(code: Path, function: str) -> tuple[str, ...]:
    return (
        *("--set", f'security.code_sources=["{code}", "{SOURCE}"]'),
        *("--set", f"training.optimizer_ref={reference(code, function)}"),
    )


def train(text: Path, output: Path, *words: str, check: bool = True) -> Any:
    return typed(
        *("train", "--text", str(text), "--output", str(output), "--json", "--ranks", "2"),
        *("--set", "model.parameters=20000", "--set", "model.context=32", *words),
        check=check,
    )


def steps_in(output: Path) -> list[dict[str, float]]:
    (metrics,) = output.glob("checkpoints/*/metrics.jsonl")
    return [json.loads(each) for each in metrics.read_text().splitlines()]


def same_steps(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for name in ("loss", "grad_norm", "lr"):
        assert [each[name] for each in one] == [each[name] for each in other]


def test_a_training_with_it_has_the_bits_of_ours_with_the_same_rule(
    text: Path, code: Path, tmp_path: Path
) -> None:
    groups = ('training.groups=[{match=["*norm*"], learning_rate_factor=0.5, weight_decay=0.3}]',)
    asked = ("--steps", "4", "--ranks", "1", *(word for each in groups for word in ("--set", each)))
    ours = json.loads(train(text, tmp_path / "ours", *asked).stdout)
    own = json.loads(train(text, tmp_path / "own", *asked, *words_of(code, "adamw")).stdout)
    same_steps(steps_in(tmp_path / "own"), steps_in(tmp_path / "ours"))
    assert own["weights_digest"] == ours["weights_digest"]
    assert own["job_id"] != ours["job_id"], "another configuration"


@pytest.mark.nightly
@pytest.mark.parametrize(("function", "mesh"), [("lion", "shard=2"), ("adafactor", "dp=2")])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(
    text: Path, code: Path, tmp_path: Path, function: str, mesh: str
) -> None:
    words = ("--steps", "8", *words_of(code, function), "--set", f"training.mesh.{mesh}")
    words += ("--set", "training.checkpoints.every_steps=3", "--set", "training.checkpoints.keep=9")
    whole = json.loads(train(text, tmp_path / "out", *words).stdout)
    at_once = steps_in(tmp_path / "out")
    if function == "lion":
        assert [each["lr"] for each in at_once] == [1e-3 / (1 + step) for step in range(8)]
    job = tmp_path / "out" / "checkpoints" / whole["job_id"]
    for each in (*job.glob("step-00000008-*"), job / "export"):
        shutil.rmtree(each)
    again = json.loads(train(text, tmp_path / "out", *words).stdout)
    assert again["resumed_from_step"] in (3, 6), "a save is left out while another is under way"
    by_step = {each["step"]: each for each in steps_in(tmp_path / "out")}
    same_steps([by_step[each["step"]] for each in at_once], at_once)
    assert again["weights_digest"] == whole["weights_digest"]
    if mesh != "shard=2":
        return
    for each in (*job.glob("step-00000008-*"), job / "export"):  # and on one rank, unsharded
        shutil.rmtree(each)
    one = train(text, tmp_path / "out", *words, "--set", "training.mesh.shard=1", "--ranks", "1")
    assert json.loads(one.stdout)["resumed_from_step"] in (3, 6)
    by_step = {each["step"]: each for each in steps_in(tmp_path / "out")}
    for each in at_once:
        assert by_step[each["step"]]["loss"] == pytest.approx(each["loss"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["transformers", "user code"])
def test_other_models_are_trained_with_it(
    text: Path, code: Path, tmp_path: Path, model: str
) -> None:
    asked: tuple[str, ...] = ("--set", f"training.code_ref={BYTE_GRU}")
    if model == "transformers":
        where = write_model("llama", tmp_path / "model", vocab_size=300)
        write_tokenizer(where, [each.read_text() for each in text.iterdir()])
        asked = ("--model", str(where), "--set", "training.mesh.shard=2")
    train(text, tmp_path / "out", "--steps", "4", *asked, *words_of(code, "lion"))
    losses = [each["loss"] for each in steps_in(tmp_path / "out")]
    assert losses[-1] < losses[0]


def require_here(settings: TrainingSettings, code: Path) -> None:
    """Take the trial steps in this process, whose environment stays as it is."""
    with mock.patch.dict(os.environ):
        require_optimizer(settings, [str(code)], code.with_name("cache"))


@pytest.mark.parametrize(
    ("function", "changes", "line"),
    [
        ("counting", {}, "takes other steps after it was resumed"),
        ("needs", {}, "raised at a trial step resumed from a checkpoint: got KeyError: 'step'"),
        ("named", {}, "a checkpoint cannot name this state of the optimiser: got 'ema'"),
        ("lbfgs", {}, "the optimiser raised at a trial step: got TypeError"),
        ("raising", {}, "raised as it made its optimiser: got RuntimeError: no such table"),
        ("nothing", {}, "the code makes no optimiser: got dict"),
        ("fewer", {}, "other parameters than the groups: got 2 parameters, 2 of them"),
        ("nan", {}, "not a learning rate: got nan"),
        ("absent", {}, "code reference names no function: got absent"),
        ("adafactor", {"mesh": {"shard": 2}}, "raised at a trial step on sharded parameters"),
    ],
)
def test_what_cannot_be_resumed_or_sharded_is_refused_by_name(
    code: Path, function: str, changes: dict[str, Any], line: str
) -> None:
    settings = TrainingSettings(optimizer_ref=reference(code, function), **changes)
    with pytest.raises(PacelineError) as caught:
        require_here(settings, code)
    assert line in caught.value.one_line()
    assert "training.optimizer_ref file://" in caught.value.one_line()


@pytest.mark.parametrize("function", ["lion", "adamw"])
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}, {"tp": 2}])
def test_what_is_cut_as_its_parameter_passes(
    code: Path, function: str, mesh: dict[str, int]
) -> None:
    settings = TrainingSettings.model_validate({
        "optimizer_ref": reference(code, function), "mesh": mesh,
    })  # fmt: skip
    require_here(settings, code)


@pytest.mark.nightly
def test_it_is_refused_before_a_rank_starts(text: Path, code: Path, tmp_path: Path) -> None:
    done = train(text, tmp_path, "--steps", "2", *words_of(code, "counting"), check=False)
    assert done.returncode == 2
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("paceline: ")]
    assert "takes other steps" in line
    assert "rank 0" not in done.stderr


def test_a_source_that_is_not_allowed_and_no_pin_are_refused(code: Path, tmp_path: Path) -> None:
    for text, error in ((reference(code, "lion"), AccessDenied), ("json:loads", InvalidInput)):
        with pytest.raises(error) as caught:
            check("", [], tmp_path, Task(), settings=TrainingSettings(optimizer_ref=text))
        assert "training.optimizer_ref" in caught.value.one_line() or error is AccessDenied


def test_it_is_the_installations_not_a_jobs() -> None:
    with pytest.raises(InvalidProfile, match="not a setting of one training"):
        with_job_settings(load_profile("embedded"), {"training.optimizer_ref": "a:b"})


def test_a_job_has_one_of_its_own_from_an_allowed_source(code: Path) -> None:
    profile = load_profile("embedded", {"security.code_sources": [str(code)]})
    run: Any = SimpleNamespace(runtime=SimpleNamespace(profile=profile))
    text = reference(code, "lion")
    asked = profile_of(run, {"training.steps": 2}, None, "", text).training
    assert (asked.optimizer_ref, asked.steps) == (text, 2)
    with pytest.raises(InvalidProfile, match="takes the place of optimizer, here muon"):
        profile_of(run, {"training.optimizer": "muon"}, None, "", text)
    for named, error in (("lion:make", InvalidInput), (f"{text[:-4]}@", InvalidInput)):
        with pytest.raises(error, match=r"training\.optimizer_ref"):
            profile_of(run, {}, None, "", named)
    elsewhere: Any = SimpleNamespace(runtime=SimpleNamespace(profile=load_profile("embedded")))
    with pytest.raises(AccessDenied, match=r"training\.optimizer_ref"):
        profile_of(elsewhere, {}, None, "", text)


def test_a_jobs_own_optimiser_is_part_of_what_is_trained() -> None:
    given: dict[str, Any] = {"model_id": "m", "version": "1", "dataSnapshot": "s3://b/x"}
    plain = queued(SubmitJob.model_validate(given))
    own = queued(SubmitJob.model_validate(given | {"optimizerRef": "a:b"}))
    profile = load_profile("embedded")
    assert training_key(plain.spec, profile) != training_key(own.spec, profile)
    assert parameters_of(own)["optimizer_ref"] == "a:b"
    assert "optimizer_ref" not in {**parameters_of(plain), **plain.spec.model_dump()}


def queued(spec: SubmitJob) -> TrainingJob:
    return TrainingJob(
        job_id="tj-" + "0" * 12, submission_id="0" * 64, spec=spec, run_id=new_run_id(),
        state=JobState.QUEUED, created_at=0, updated_at=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": "muon"}, "takes the place of optimizer, here muon"),
        ({"synchrony": {"kind": "local-sgd"}}, "needs synchrony every-step, not local-sgd"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainingSettings.model_validate({"optimizer_ref": "a:b", **changes})
