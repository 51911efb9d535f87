"""What a training cost follows from what was recorded and from prices; the rest stays unknown."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import PriceSettings, load_profile
from paceline.errors import InvalidInput, InvalidProfile
from paceline.jobs import cost_of, cost_row, estimate, grouped, price_of
from paceline.schemas import CheckpointRef, Restart, TimeLedger, TrainingUsage, TrainResult

DIGEST = "0" * 64
PRICES = PriceSettings(
    per_hour={"H100": 2.0, "cpu": 0.5},
    watts={"H100": 1000.0},
    per_kwh=0.25,
    per_gb_egress=0.1,
    per_gb_month=0.02,
)
LEDGER = TimeLedger(
    start_s=200, productive_s=2400, data_wait_s=300, checkpoint_stall_s=100, lost_work_s=250,
    detection_s=50, restart_s=200, finish_s=100, wall_s=3600, goodput=0.7,
)  # fmt: skip
RESTART = Restart(
    attempt=2, failed_rank=1, worker_id="node-1", reason="killed", resumed_step=50, lost_steps=10,
    seconds=200.0, kind="lost", ranks=8,
)  # fmt: skip


def result(**changes: Any) -> TrainResult:
    """An hour on eight GPUs, with one restart: 100 steps of 36,000 tokens."""
    given: dict[str, Any] = {
        "job_id": "job-1", "steps": 100, "resumed_from_step": 0, "first_loss": 5.0,
        "final_loss": 2.0, "tokens_per_second": 1500.0, "data_wait_share": 0.1,
        "checkpoint_stall_share": 0.03, "export_url": "s3://b/e", "weights_digest": DIGEST,
        "checkpoints": (CheckpointRef(step=100, url="s3://b/c", digest=DIGEST, bytes=3 * 10**9),),
        "restarts": (RESTART,), "seconds": 3600.0, "config_digest": DIGEST, "ledger": LEDGER,
        "accelerators": {"NVIDIA H100 80GB HBM3": 8}, "tokens_per_step": 36_000.0,
        "epoch_tokens": 360_000,
    }  # fmt: skip
    return TrainResult.model_validate(given | changes)


def test_an_hour_on_eight_accelerators_by_hand() -> None:
    cost = cost_of(result(), PRICES)
    kept = 0.02 * 3 / 730.5  # 3 GB for an hour
    assert cost.storage == pytest.approx(kept)
    assert cost.total == pytest.approx(8 * 2.0 + 8 * 0.25 + kept, rel=1e-9), "8 GPU-hours, 8 kWh"
    assert cost.accelerator_hours == cost.energy_kwh == 8.0
    assert cost.by_class == {
        "useful": 2400, "data_wait": 300, "checkpoint": 100, "recovery": 500, "idle": 300
    }  # fmt: skip
    assert sum(cost.price_by_class.values()) == pytest.approx(18.0)
    assert cost.price_by_class["recovery"] == pytest.approx(18.0 * 500 / 3600)
    assert cost.per_step == pytest.approx((18 + kept) / 100)
    assert cost.per_1k_tokens == pytest.approx((18 + kept) / 3600)
    assert cost.per_epoch == pytest.approx((18 + kept) / 10), "an epoch is ten steps"
    assert cost.storage_a_month == pytest.approx(0.06)
    assert cost.egress is None, "a result of an older version does not record it"
    assert cost.unknown == ("a node that was lost is counted as held: the price is at most this",)


def test_egress_is_in_the_total_and_in_its_group() -> None:
    cost = cost_of(result(checkpoints=(), read_bytes=50 * 10**9), PRICES)
    assert (cost.egress, cost.storage) == (5.0, 0.0)
    assert cost.total == pytest.approx(18.0 + 5.0)
    assert cost.per_step == pytest.approx(0.23)
    (group,) = grouped([cost, cost], "model")
    assert (group.price, group.egress, group.storage) == (pytest.approx(46.0), 10.0, 0.0)
    free = PRICES.model_copy(update={"per_gb_egress": None, "per_gb_month": None})
    assert cost_of(result(read_bytes=50 * 10**9), free).total == pytest.approx(18.0)
    unpriced = cost_of(result(read_bytes=10**9), PRICES.model_copy(update={"per_hour": {}}))
    assert (unpriced.total, unpriced.egress) == (None, pytest.approx(0.1))


def test_a_spot_fleet_pays_its_share_and_the_whole_energy() -> None:
    spot = PRICES.model_copy(update={"spot_factor": 0.5})
    assert cost_of(result(checkpoints=()), spot).total == pytest.approx(8.0 + 2.0)


def test_without_prices_nothing_has_a_price_and_nothing_is_zero() -> None:
    cost = cost_of(result(restarts=()), PriceSettings())
    figures = (cost.total, cost.per_step, cost.per_1k_tokens, cost.per_epoch, cost.energy_kwh,
               cost.egress, cost.storage_a_month)  # fmt: skip
    assert figures == (None,) * 7
    assert cost.price_by_class == {}
    assert cost.accelerator_hours == 8.0
    assert cost.unknown == ("no price in [prices] per_hour for NVIDIA H100 80GB HBM3",)


def test_a_mixed_gang_has_a_price_only_where_each_kind_has_one() -> None:
    both = {"NVIDIA H100 80GB HBM3": 8, "NVIDIA A100-SXM4-80GB": 8}
    assert cost_of(result(accelerators=both), PRICES).total is None
    cost = cost_of(result(accelerators={"cpu": 2}, checkpoints=()), PRICES)
    assert cost.total == pytest.approx(1.0)
    assert "energy is not in the price: no watts for each kind" in cost.unknown


def test_a_result_of_an_older_version_says_what_it_lacks() -> None:
    old = result(ledger=None, accelerators={}, tokens_per_step=None, epoch_tokens=None, restarts=())
    assert not {"accelerators", "tokens_per_step", "epoch_tokens"} & old.model_dump().keys()
    cost = cost_of(old, PRICES)
    assert cost.total is cost.accelerator_hours is cost.tokens is None
    assert cost.unknown == ("accelerators: not recorded", "classes of time: not recorded")


def test_a_job_that_begins_later_is_divided_by_its_own_steps() -> None:
    cost = cost_of(result(resumed_from_step=60, restarts=()), PRICES)
    assert cost.per_step == pytest.approx(18.0 / 40, rel=1e-4)
    assert cost.unknown == ("begins at step 60: what came before is not in these figures",)


def test_a_kind_is_found_by_whole_words_and_the_longest_counts() -> None:
    table = {"A100": 1.0, "A100-SXM4": 2.0, "A10": 3.0}
    assert price_of("NVIDIA A100-SXM4-80GB", table) == 2.0
    assert price_of("NVIDIA a100 80GB PCIe", table) == 1.0
    assert price_of("NVIDIA A10", table) == 3.0
    assert price_of("NVIDIA A10G", table) is None


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("prices.per_hour", "{H100 = -1}", "greater than or equal to 0"),
        ("prices.per_kwh", "-0.3", "greater than or equal to 0"),
        ("prices.spot_factor", "0", "greater than 0"),
        ("prices.per_hour", '{H100 = "two"}', "valid number"),
    ],
)
def test_a_price_that_cannot_be_is_refused_by_name(key: str, value: str, wanted: str) -> None:
    with pytest.raises(InvalidProfile, match=wanted) as refused:
        load_profile("embedded", {key: value})
    assert key in str(refused.value.got)


def test_groups_add_up_what_is_known_and_count_the_rest() -> None:
    known = [cost_of(result(job_id=f"job-{n}"), PRICES) for n in (1, 2)]
    lacking = cost_of(result(job_id="job-3", accelerators={}), PRICES)
    models = ("a", "a", "a")
    costs = [
        each.model_copy(update={"model_id": model, "started_at": 1_790_000_000.0})
        for each, model in zip([*known, lacking], models, strict=True)
    ]
    (group,) = grouped(costs, "model")
    assert (group.name, group.trainings, group.without_price) == ("a", 3, 1)
    assert group.price == pytest.approx(36.0, rel=1e-4)
    assert group.useful_hours == pytest.approx(16 * 2 / 3)
    assert [each.name for each in grouped(costs, "day")] == ["2026-09-21"]
    assert len(grouped(costs, "job")) == 3
    assert grouped([lacking], "job")[0].price is None
    row = cost_row(known[0])
    assert (row["recovery_s"], row["accelerators"]) == (500.0, "8 × NVIDIA H100 80GB HBM3")


def test_an_estimate_goes_from_no_failure_to_the_largest_recovery() -> None:
    first = TrainingUsage.of(result())  # 3.6e6 tokens in 2,800 s of steps; 500 s lost; 300 s idle
    calm = TrainingUsage.of(
        result(
            ledger=LEDGER.model_copy(
                update={
                    "lost_work_s": 0.0,
                    "detection_s": 0.0,
                    "restart_s": 0.0,
                    "data_wait_s": 0.0,
                }
            )
        )
    )
    guess = estimate(PRICES, steps=1000, earlier=[first, calm])
    slow, fast = 36e6 / (3.6e6 / 2800), 36e6 / (3.6e6 / 2500)
    assert guess.hours.low == pytest.approx((fast + 300) / 3600)
    assert guess.hours.high == pytest.approx((slow * (1 + 500 / 2800) + 300) / 3600)
    assert guess.price is not None
    assert guess.price.low == pytest.approx(guess.hours.low * 18)
    assert guess.energy_kwh is not None
    assert guess.energy_kwh.value == pytest.approx(guess.hours.value * 8)
    assert "as in 2 trainings" in " ".join(guess.based_on)


def test_an_estimate_of_given_figures_says_that_it_has_no_range() -> None:
    guess = estimate(
        PRICES, steps=10, tokens_per_step=3600.0, tokens_per_second=10.0, accelerators={"cpu": 4}
    )
    assert guess.hours.low == guess.hours.value == guess.hours.high == pytest.approx(1.0)
    assert guess.price is not None
    assert guess.price.value == pytest.approx(2.0)
    assert "no range" in guess.based_on[0]
    with pytest.raises(InvalidInput, match="nothing to base an estimate on"):
        estimate(PRICES, steps=10, earlier=[TrainingUsage.of(result(tokens_per_step=None))])
