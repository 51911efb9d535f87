"""Optimisers: the losses of a loop that anyone would write in PyTorch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import new_model
from paceline.training.loop import (
    CPU,
    Evaluator,
    Group,
    Progress,
    StepReport,
    TransformerWorkload,
    WeightAverage,
    apply_gradients,
    learning_rate,
    new_optimizer,
    require_groups,
    train,
)
from paceline.training.parallel import Mesh, MeshSpec, parallelise, require_layout
from paceline.training.strategies.learner import Learner, norm_of
from tests.support.two_ranks import run_two
from tests.training.optimizer_ranks import CASES
from tests.training.test_continuing import text, train as train_here
from tests.training.test_loop import CONFIG, ROWS, Batches, batch_of, change, run

__all__ = ["text"]  # a fixture

pytestmark = pytest.mark.xdist_group("forked ranks")
EMBED = {"match": ["*embed*"], "learning_rate_factor": 0.1, "weight_decay": 0.0}
Stepping = list[torch.optim.Optimizer]


def by_hand(
    settings: TrainingSettings,
    optimizers: Callable[[nn.Module], Stepping],
    after: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[list[float], nn.Module]:
    """Return the losses of a plain loop, and its model; a group's ``times`` multiplies the rate."""
    workload, batches, losses = TransformerWorkload(CONFIG), Batches(), []
    model = new_model(CONFIG, 0)
    stepping = optimizers(model)
    for step in range(settings.steps):
        batch = batches.next()
        inputs = workload.inputs(batch, torch.device("cpu"))
        loss = workload.loss_sum(model(*inputs.args, **inputs.kwargs), *inputs.targets)
        (loss / inputs.weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        for each in stepping:
            for group in each.param_groups:
                rate = learning_rate(step, settings.steps, settings)
                group["lr"] = rate * group.get("times", 1.0)
            each.step()
        model.zero_grad()
        after(model)
        losses.append(float(loss.detach()) / inputs.weight)
    return losses, model


def named(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if wanted(name, each)]


def test_groups_take_the_steps_of_a_plain_loop() -> None:
    settings = change(groups=[EMBED, {"match": ["*"], "learning_rate_factor": 2.0}])

    def adamw(model: nn.Module) -> Stepping:
        embedding = named(model, lambda name, _: "embed" in name)
        matrices = named(model, lambda name, each: "embed" not in name and each.ndim > 1)
        vectors = named(model, lambda _, each: each.ndim < 2)
        groups = [
            {"params": embedding, "weight_decay": 0.0, "times": 0.1},
            {"params": matrices, "weight_decay": settings.weight_decay, "times": 2.0},
            {"params": vectors, "weight_decay": 0.0, "times": 2.0},
        ]
        return [torch.optim.AdamW(groups, betas=settings.betas)]

    losses, _ = by_hand(settings, adamw)
    assert run(settings).losses == pytest.approx(losses, abs=1e-6)
    assert losses != pytest.approx(run().losses, abs=1e-4), "the groups make a difference"


def test_the_first_matching_group_wins_by_any_name_of_tied_weights() -> None:
    model = new_model(CONFIG, 0)
    model.head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False)
    model.head.weight = model.model.embed_tokens.weight
    rules = [{"match": ["head.*"], "learning_rate_factor": 3.0}, EMBED]
    optimizer = new_optimizer(model, change(groups=rules, no_decay=["*o_proj*"]))
    groups = [each for each in optimizer.param_groups if each["params"]]
    (head,) = [each for each in groups if each.get("learning_rate_factor") == 3.0]
    assert head["params"] == [model.head.weight]
    plain = [each for group in groups if not group["weight_decay"] for each in group["params"]]
    assert {each.ndim for each in plain} == {1, 2}
    assert any(each is model.model.layers["0"].self_attn.o_proj.weight for each in plain)
    sgd = new_optimizer(model, change(groups=[rules[0]], optimizer="sgd"))
    assert [each["weight_decay"] for each in sgd.param_groups] == [0.0, 0.0]


def muon(settings: TrainingSettings) -> Callable[[nn.Module], Stepping]:
    """Return torch's own two optimisers, as Muon's authors divide parameters."""

    def optimizers(model: nn.Module) -> Stepping:
        decay, betas = settings.weight_decay, settings.betas
        hidden = named(model, lambda name, each: "layers" in name and each.ndim == 2)
        vectors = named(model, lambda _, each: each.ndim < 2)
        groups = [
            {"params": named(model, lambda name, _: "embed" in name), "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        first = torch.optim.Muon(hidden, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [first, torch.optim.AdamW(groups, betas=betas)]

    return optimizers


def test_muon_takes_the_steps_of_a_plain_loop_with_torchs_two_optimizers() -> None:
    settings = change(optimizer="muon")
    losses, _ = by_hand(settings, muon(settings))
    whole = run(settings)
    assert whole.losses == pytest.approx(losses, abs=1e-5)  # its updates are computed in bfloat16
    assert losses != pytest.approx(run().losses, abs=1e-4)
    half = run(settings, should_stop=iter([False, False, True]).__next__)
    rest = run(settings, before=half)
    assert half.losses + rest.losses == whole.losses, "its state is that of one optimiser"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_evaluations_have_the_moving_average_and_training_has_not(
    optimizer: str,
) -> None:
    settings = change(optimizer=optimizer, ema={"decay": 0.8}, evaluate_every_steps=1)
    workload = TransformerWorkload(CONFIG)
    parallel = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
    its = new_optimizer(parallel.modules, settings)
    average, reports = WeightAverage(its, settings.ema), list[StepReport]()
    evaluator = Evaluator(Batches, ROWS, averaged=average.applied)
    train(
        parallel, workload, its, Batches(), settings, Group(),
        progress=Progress(), evaluator=evaluator, on_step=reports.append,
    )  # fmt: skip
    assert [each.loss for each in reports] == run(change(optimizer=optimizer)).losses

    plain = parallelise(workload.build(), Mesh(MeshSpec()), settings, workload)
    averaged = AveragedModel(plain.modules[0], multi_avg_fn=get_ema_multi_avg_fn(0.8))
    stepping = new_optimizer(plain.modules, settings)
    for step, report in enumerate(reports):
        part = workload.inputs(batch_of(step), CPU)
        plain.accumulate([part], 1 / part.weight)
        plain.clip(settings.clip_norm)
        apply_gradients(stepping, learning_rate(step, settings.steps, settings))
        averaged.update_parameters(plain.modules[0])
        first = workload.inputs(batch_of(0), CPU)
        with torch.no_grad():
            loss = workload.loss_sum(averaged(*first.args), *first.targets)
        held_out = report.held_out["held_out_loss"]
        assert held_out == pytest.approx(float(loss) / first.weight, abs=1e-6)
    with average.applied():
        both = zip(parallel.modules[0].parameters(), averaged.parameters(), strict=True)
        assert all(mine.equal(theirs) for mine, theirs in both)


def test_muon_leaves_ends_vectors_and_what_a_group_says_to_adamw() -> None:
    config = CONFIG.model_copy(update={"tie_word_embeddings": False})
    model = new_model(config, 0)
    rules = [{"match": ["*down_proj*"], "optimizer": "adamw", "learning_rate_factor": 2.0}]
    optimizer = new_optimizer(model, change(optimizer="muon", groups=rules))
    names = {each: name for name, each in model.named_parameters()}
    by_adamw = {
        names[each]
        for group in optimizer.param_groups
        if "betas" in group
        for each in group["params"]
    }
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert (
        by_adamw
        == {name for name in names.values() if "norm" in name or "down_proj" in name} | ends
    )
    (down,) = [each for each in optimizer.param_groups if each["params"] and len(each) and
               each.get("learning_rate_factor") == 2.0]  # fmt: skip
    assert "momentum" not in down


def test_muon_without_a_matrix_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
    with pytest.raises(InvalidInput, match="muon has no matrix to train"):
        require_groups(model, change(optimizer="muon"))


def test_muon_on_stages_is_refused_before_ranks_start() -> None:
    settings = change(optimizer="muon", mesh={"pp": 2})
    with pytest.raises(InvalidInput, match="muon does not train the stages of a pipeline"):
        require_layout(MeshSpec.of(settings.mesh, 2), settings, None)


def test_a_parameter_server_keeps_muons_state() -> None:
    settings = change(optimizer="muon")
    learners = [Learner(new_model(CONFIG, seed), settings, workers=1) for seed in (0, 1)]
    gradient = np.random.default_rng(0).normal(size=learners[0].count).astype(np.float32)
    learners[0].apply(gradient, 1, norm_of(gradient))
    learners[1].from_bytes(learners[0].to_bytes())
    for each in learners:
        each.apply(gradient, 2, norm_of(gradient))
    assert learners[0].to_bytes() == learners[1].to_bytes()


@pytest.mark.nightly
def test_what_is_exported_is_the_average_of_the_last_checkpoint(text: Path, tmp_path: Path) -> None:
    words = [f"training.{each}" for each in ("ema.decay=0.6", "optimizer=muon")]
    words += ['training.groups=[{match=["*norm*"], learning_rate_factor=0.5}]']
    asked = [word for each in words for word in ("--set", each)]
    done, _ = train_here(text, tmp_path, "--steps", "5", "--ranks", "2", *asked)
    job = tmp_path / "checkpoints" / done["job_id"]
    assert done["ema_decay"] == 0.6
    stored = {}
    for each in job.glob("step-00000005-*/rank-*.safetensors"):
        stored |= {name.partition("@")[0]: found for name, found in load_file(each).items()}
    files = [load_file(each) for each in (job / "export").glob("*.safetensors")]
    for name, exported in (each for file in files for each in file.items()):
        assert exported.equal(stored[f"ema.{name}"])
        assert not exported.equal(stored[f"model.{name}"])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks and then one of them said, in one launch."""
    root = str(tmp_path_factory.mktemp("optimizers"))
    return run_two("tests.training.optimizer_ranks", root)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_resumed_to_the_bit_on_as_many_ranks(
    said: list[dict[str, Any]], case: str
) -> None:
    for each in (rank[case] for rank in said):
        assert each["again"]["restored"] == each["saved"]
        assert each["again"]["bits"] == each["bits"]
        assert each["again"]["losses"] == each["losses"]
    if CASES[case][0] == "dp2":
        assert said[0][case]["bits"] == said[1][case]["bits"], "replicas stay equal"


@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_on_from_two(said: list[dict[str, Any]], case: str) -> None:
    two = said[0][case]
    if CASES[case][0] == "dp2":
        assert two["alone"]["restored"] == two["saved"]
    # Muon rounds to bfloat16, so another order of a gradient's sum may be seen.
    tolerance = 1e-5 if "muon" in case else 1e-9
    assert two["alone"]["losses"] == pytest.approx(two["losses"], rel=tolerance)


def test_muon_has_the_same_losses_on_parts_of_matrices(said: list[dict[str, Any]]) -> None:
    whole = said[0]["muon"]["losses"]
    for case in ("muon, shards", "muon, cut"):
        assert said[0][case]["losses"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": [{"match": ["*embde*"]}]}, "got *embde*, wanted names such as"),
        ({"groups": [EMBED, {"match": ["*norm*", "*bias"]}]}, "got *bias"),
        ({"no_decay": ["embed"]}, "at training.no_decay"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match="no trained parameter") as caught:
        require_groups(new_model(CONFIG, 0), change(**changes))
    assert named in caught.value.one_line()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": [{"match": []}]}, "at least 1 item"),
        ({"groups": [{"match": ["*"], "learning_rate_factor": 0.0}]}, "greater than 0"),
        ({"groups": [{"match": ["*"], "weight_decay": -1.0}]}, "greater than or equal to 0"),
        ({"groups": [{"match": ["*"], "lr": 1.0}]}, "Extra inputs"),
        ({"no_decay": [""]}, "at least 1 character"),
        ({"groups": [EMBED | {"optimizer": "adamw"}]}, "beside muon only"),
        ({"ema": {"decay": 1.0}}, "less than 1"),
        ({"ema": {"decay": 0.0}}, "greater than 0"),
        ({"ema": {}, "synchrony": {"kind": "local-sgd"}}, "ema needs synchrony every-step, not"),
        ({"ema": {}, "synchrony": {"kind": "parameter-server"}}, "not parameter-server"),
        ({"optimizer": "sgd", "no_decay": ["*embed*"]}, "sgd has no weight decay"),
        ({"optimizer": "sgd", "groups": [EMBED | {"weight_decay": 0.1}]}, "sgd has no weight"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        change(**changes)
