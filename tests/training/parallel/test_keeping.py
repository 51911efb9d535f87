"""What a hook or a task carries from batch to batch is in checkpoints: a resume repeats the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from examples.carried_state.byte_gru import CarriedState
from tests.support.two_ranks import run_two

pytestmark = pytest.mark.xdist_group("forked ranks")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two("tests.training.parallel.keeping_ranks", str(tmp_path_factory.mktemp("keeping")))


@pytest.mark.parametrize("case", ["compressed", "carried"])
def test_a_resume_on_the_same_ranks_is_bit_identical_only_with_kept_state(
    ranks: list[dict[str, Any]], case: str
) -> None:
    assert [each[case]["resumed"] for each in ranks] == [True, True]
    assert [each[case]["without"] for each in ranks] == [False, False], "it matters"


@pytest.mark.parametrize("case", ["compressed", "carried"])
def test_a_batch_that_is_passed_over_spoils_none_after_it(
    ranks: list[dict[str, Any]], case: str
) -> None:
    bad, *after = ranks[0][case]["spoilt"]
    assert np.isnan(bad) and np.isfinite(after).all() and len(after) == 3
    assert max(after) < 1.5 * ranks[0][case]["losses"][0]


def test_draws_and_counts_before_the_first_step_do_not_change_a_resume(
    ranks: list[dict[str, Any]],
) -> None:
    assert [each["drawn"] for each in ranks] == [True, True], "a resume is bit-identical"


def test_each_ranks_error_is_saved_and_what_they_share_once(ranks: list[dict[str, Any]]) -> None:
    kept = ranks[0]["compressed"]["kept"]
    of_ranks = [[each for each in kept if f"error.{rank}-of-2." in each] for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1]) >= 1
    assert len([each for each in kept if ".q." in each]) == len(of_ranks[0])
    assert "kept.powersgd.iterations" in kept


def test_rows_go_on_with_their_state_on_another_number_of_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["carried"]["kept"] == ["kept.carried.0", "kept.carried.2"]
    assert np.allclose(ranks[0]["alone"], ranks[0]["carried"]["losses"], rtol=1e-9, atol=0)


def test_errors_of_another_world_are_dropped_with_a_warning(ranks: list[dict[str, Any]]) -> None:
    assert not [each for each in ranks[0]["warned before"] if "PowerSGD" in each]
    iterations, errors, matrices = ranks[0]["of three"]
    assert (iterations, errors) == (15, 0) and matrices > 0
    assert any("errors are dropped" in each for each in ranks[0]["warned"])


def test_only_rows_that_were_computed_here_are_saved_again() -> None:
    carried = CarriedState()
    carried.restore({"carried.0": torch.ones(4, 1, 2)})
    carried.keep([2, 3], torch.zeros(2, 1, 2))
    carried.snapshot()
    carried.keep([2, 3], torch.full((2, 1, 2), 9.0))  # of the batch that is under way
    saved = carried.tensors()
    assert list(saved) == ["carried.2"] and saved["carried.2"].sum() == 0
