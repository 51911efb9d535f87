"""Optimisers: the losses of a loop that anyone would write in PyTorch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import new_model
from paceline.training.loop import (
    TransformerWorkload,
    learning_rate,
    new_optimizer,
    require_groups,
)
from tests.training.test_loop import CONFIG, Batches, change, run

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


def test_the_first_matching_group_wins_and_tied_weights_have_all_their_names() -> None:
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
        ({"optimizer": "sgd", "no_decay": ["*embed*"]}, "sgd has no weight decay"),
        ({"optimizer": "sgd", "groups": [EMBED | {"weight_decay": 0.1}]}, "sgd has no weight"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        change(**changes)
