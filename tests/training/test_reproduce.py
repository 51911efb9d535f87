"""Training again what was trained: the same bits, or exactly what differs and from which step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.errors import NotFound
from paceline.training import LocalLauncher, config_digest, run_job
from paceline.training.environment import current, differences
from paceline.training.reproduce import (
    Recorded,
    again,
    compare,
    differences_of,
    holders_of,
    require_possible,
)
from paceline.wire.training import RankEvent
from tests.training.conftest import Camp


@pytest.fixture(scope="module")
def launcher():
    with LocalLauncher() as kept:
        yield kept


@pytest.fixture(scope="module")
def recorded(camp: Camp, launcher: LocalLauncher) -> Recorded:
    """Two ranks, six steps, and what a run keeps of them."""
    events: list[RankEvent] = []
    job = camp.job("reproduced", ranks=2, steps=6)
    result = run_job(job, camp.nodes, launcher, on_event=events.append)
    losses = {e.step: e.data["loss"] for e in events if e.event == "step" and e.rank == 0}
    return Recorded("run-20260101-000000-abcdef", job, result, losses)


def test_the_same_job_again_gives_the_same_bits(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    found = again(recorded, camp.runtime, camp.store, launcher)
    assert found.differences == ()
    assert found.identical and found.steps == 6
    assert found.weights_now == found.weights_then == recorded.result.weights_digest
    assert found.again_job_id not in (None, recorded.job.job_id)


def test_another_seed_is_told_by_its_first_step(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    settings = recorded.job.settings.model_copy(update={"seed": 7})
    job = recorded.job.model_copy(update={"settings": settings})
    other = Recorded(recorded.run_id, job, recorded.result, recorded.losses)
    found = again(other, camp.runtime, camp.store, launcher)
    assert (found.status, found.first_different_step) == ("different", 1)
    assert found.loss_then != found.loss_now
    assert "configuration digest" in [each.what for each in found.differences]


def test_the_first_step_that_parts_is_named(recorded: Recorded) -> None:
    losses = dict(recorded.losses)
    then = losses[4]
    losses[4] = then * (1 + 2**-52)
    losses[6] += 1
    found = compare(recorded, recorded.result, losses, [], 0.0)
    assert (found.status, found.first_different_step) == ("different", 4)
    assert (found.loss_then, found.loss_now) == (then, losses[4])
    del losses[2]
    assert compare(recorded, recorded.result, losses, [], 0.0).first_different_step == 2
    weights = recorded.result.model_copy(update={"weights_digest": "0" * 64})
    found = compare(recorded, weights, recorded.losses, [], 0.0)
    assert (found.status, found.first_different_step) == ("different", None)


def test_what_differs_is_said_exactly(camp: Camp, recorded: Recorded) -> None:
    environment = dict(recorded.result.environment) | {"torch": "1.0", "system": "Plan 9"}
    result = recorded.result.model_copy(
        update={"environment": environment, "code_version": "0.0.1+src.old"}
    )
    before = Recorded(recorded.run_id, recorded.job, result, recorded.losses)
    found = {each.what: each for each in differences_of(before, camp.runtime, camp.store)}
    assert set(found) == {"torch", "system", "code version"}
    assert (found["torch"].then, found["torch"].decisive) == ("1.0", True)
    assert not found["system"].decisive


def test_data_or_model_that_is_gone_is_refused_before_ranks_start(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    for change, what in (
        ({"snapshot_digest": "0" * 64}, "data snapshot"),
        ({"manifest_digest": "0" * 64}, "base model"),
        ({"version": "v9"}, "base model"),
    ):
        job = recorded.job.model_copy(update=change)
        other = Recorded(recorded.run_id, job, recorded.result, recorded.losses)
        with pytest.raises(NotFound, match=what):
            require_possible(differences_of(other, camp.runtime, camp.store))
        with pytest.raises(NotFound, match=what):
            again(other, camp.runtime, camp.store, launcher)
    assert holders_of(recorded.job, camp.runtime) == list(camp.nodes)


def test_an_environment_is_the_same_twice_and_knows_what_matters() -> None:
    environment = current(2)
    assert environment == current(2)
    assert environment.digest != current(1).digest
    assert environment.torch.startswith("2.13") and environment.kernels
    (difference,) = differences(
        environment.model_dump(mode="json"), current(1).model_dump(mode="json")
    )
    assert (difference.what, difference.then, difference.now) == ("threads", "2", "1")
    code = (
        "import sys, paceline.training.environment as its; its.current();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_a_configuration_is_what_decides_what_is_learned(camp: Camp) -> None:
    job = camp.job("identity")
    digest = config_digest(job)
    for same in (
        {"ranks": 2},
        {"mesh": {"shard": 2}},
        {"accumulation": 2},
        {"compile": True},
        {"checkpoints": {"keep": 9}},
        {"data": {"prefetch_batches": 9}},
    ):
        assert config_digest(camp.job("other-id", **same)) == digest, same
    for other in (
        {"seed": 1},
        {"mesh": {"hook": "fp16"}},
        {"synchrony": {"kind": "local-sgd"}},
        {"code_ref": "paceline.training.recurrent:byte_gru"},
        {"data": {"batching": "packed"}},
        {"labels": "shuffled"},
        {"precision": "bfloat16"},
    ):
        assert config_digest(camp.job("identity", **other)) != digest, other
