"""Local SGD on two real ranks: what it equals, what it sends, and that a resume repeats it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import config_for
from paceline.training.loop import TransformerWorkload
from paceline.training.parallel import Mesh, MeshSpec
from paceline.training.strategies.local_sgd import local_sgd
from tests.support.two_ranks import run_two

pytestmark = pytest.mark.xdist_group("forked ranks")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_two("tests.training.strategies.ranks")


def test_one_local_step_of_plain_sgd_is_synchronous_training(ranks: list[dict[str, Any]]) -> None:
    losses, weights = ranks[0]["alone"]
    for each in ranks:
        assert np.allclose(each["one"][0], losses, rtol=1e-10, atol=0)
        assert np.allclose(each["one"][1], weights, rtol=1e-10, atol=1e-13)
    assert losses[0] != losses[-1], "it learned something"


def test_ranks_part_between_averages_and_meet_again(ranks: list[dict[str, Any]]) -> None:
    (_, met, apart, sent), (_, met_too, apart_too, _) = ranks[0]["four"], ranks[1]["four"]
    assert apart != apart_too, "ten steps end between two averages of every four"
    assert met == met_too, "the last save averages"
    # Weights and two moments, float64, at steps 4, 8 and the last save; one local step sends more.
    assert sent == 3 * 3 * 8 * len(met)
    assert ranks[0]["one"][2] == 12 * 8 * len(met), "plain SGD has no moments to send"


def test_a_save_between_averages_is_one_state_and_resumes_identically(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["kept"] == ranks[1]["kept"], "weights and moments of all ranks"
    for each in ranks:
        assert each["resumed"] == [True, True], "losses and weights, bit for bit"


def test_an_evaluation_between_averages_judges_the_mean_and_keeps_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    one, other = ranks[0]["judged"], ranks[1]["judged"]
    assert one["own"] != other["own"]
    for each in (one, other):
        assert each["between"] == each["met"] == one["met"]
        assert each["still own"]


def test_one_ranks_bad_gradient_is_everybodys_bad_step(ranks: list[dict[str, Any]]) -> None:
    assert [each["finite"] for each in ranks] == [False, False]


def test_only_replicas_step_alone() -> None:
    workload = TransformerWorkload(config_for(10_000, 16))
    settings = TrainingSettings.model_validate({"synchrony": {"kind": "local-sgd"}})
    for spec in (MeshSpec(shard=2), MeshSpec(dp=2, tp=2), MeshSpec(pp=2)):
        with pytest.raises(InvalidInput, match="whole replicas"):
            local_sgd(workload.build(), Mesh(spec), settings, workload)
    hooked = settings.model_copy(
        update={"mesh": settings.mesh.model_copy(update={"hook": "powersgd"})}
    )
    with pytest.raises(InvalidInput, match="not gradients"):
        local_sgd(workload.build(), Mesh(MeshSpec(dp=2)), hooked, workload)


def test_alone_it_is_plain_training() -> None:
    workload = TransformerWorkload(config_for(10_000, 16))
    settings = TrainingSettings.model_validate({"synchrony": {"kind": "local-sgd"}})
    parallel = local_sgd(workload.build(), Mesh(MeshSpec()), settings, workload)
    assert (parallel.data_rank, parallel.data_world) == (0, 1)
    for each in parallel.modules[0].parameters():
        each.grad = torch.ones_like(each)
    assert parallel.clip(1e9) == pytest.approx(
        math.sqrt(sum(p.numel() for p in parallel.modules[0].parameters()))
    )
