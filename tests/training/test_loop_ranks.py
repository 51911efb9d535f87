"""The loop on two ranks: the same steps as on one, decided alike, with the slow rank named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.two_ranks import run_two

pytestmark = pytest.mark.xdist_group("forked ranks")


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """What each of two ranks said, in one launch."""
    return run_two("tests.training.loop_ranks")


def test_two_ranks_with_uneven_shares_learn_as_one(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert np.allclose(each["both"], each["alone"], rtol=1e-10)
        assert np.allclose(each["parts"], each["alone"], rtol=1e-10)
    assert said[0]["both"] == said[1]["both"], "the same number on every rank"


def test_held_out_loss_is_that_of_one_rank(said: list[dict[str, Any]]) -> None:
    for both, alone in zip(said[0]["both_held_out"], said[0]["alone_held_out"], strict=True):
        assert both["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-10)
    assert len(said[0]["both_held_out"]) == 2


def test_every_rank_names_the_slow_one(said: list[dict[str, Any]]) -> None:
    for each in said:
        ((rank, factor),) = each["slow"]
        assert rank == 1
        assert factor > 1.3


def test_figures_tell_of_the_all_reduce(said: list[dict[str, Any]]) -> None:
    figures = said[0]["figures"]
    assert figures["reduced_bytes"] > 8 * 10_000
    assert figures["reduce_bytes_per_second"] > 0
    assert 0 < figures["mfu"] < 1.5


def test_one_rank_that_is_asked_to_stop_stops_all(said: list[dict[str, Any]]) -> None:
    assert [each["stopped"] for each in said] == [[4, True]] * 2


def test_a_loss_that_is_spoilt_on_one_rank_rolls_all_back(said: list[dict[str, Any]]) -> None:
    assert [each["bad"] for each in said] == [[5, 5, "nan"]] * 2
