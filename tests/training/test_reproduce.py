"""Training again what was trained: the same bits, or exactly what differs and from which step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InvalidSnapshot, NotReproducible, ServiceUnavailable
from paceline.schemas import Restart
from paceline.training import (
    LocalLauncher,
    Recorded,
    compare,
    config_digest,
    current_environment,
    differences_of,
    nodes_with_base_model,
    reproducibility,
    require_same,
    train_again,
)
from paceline.training.reproduce import reproduction_job  # what it trains, without training
from tests.support.carried_state import BYTE_GRU
from tests.training.conftest import Camp, run

pytestmark = pytest.mark.xdist_group("gangs")


@pytest.fixture(scope="module")
def recorded(camp: Camp, launcher: LocalLauncher) -> Recorded:
    """Two ranks, six steps, and what a run keeps of them."""
    job = camp.job("reproduced", ranks=2, steps=6)
    story = run(camp, launcher, job)
    return Recorded("run-20260101-000000-abcdef", job, story.result, story.losses)


def test_the_same_job_again_gives_the_same_bits(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    found = train_again(recorded, camp.runtime, camp.store, launcher)
    assert found.differences == ()
    assert found.identical and found.steps == 6
    assert found.weights_now == found.weights_then == recorded.result.weights_digest
    assert found.again_job_id not in (None, recorded.job.job_id)
    left = f"{recorded.job.checkpoint_url}/{found.again_job_id}"
    assert camp.store.list(left) == [], "what says nothing new is not kept"
    work = [camp.runtime.node_dir(each) / "work" for each in camp.nodes]
    assert not [each for each in work if (each / str(found.again_job_id)).exists()]


def test_another_seed_is_refused_and_compared_only_when_asked(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    settings = recorded.job.settings.model_copy(update={"seed": 7})
    job = recorded.job.model_copy(update={"settings": settings})
    other = Recorded(recorded.run_id, job, recorded.result, recorded.losses)
    with pytest.raises(NotReproducible, match="configuration digest is not as it was"):
        train_again(other, camp.runtime, camp.store, launcher)
    found = train_again(other, camp.runtime, camp.store, launcher, anyway=True)
    assert (found.status, found.first_different_step) == ("different", 1)
    assert found.loss_then != found.loss_now
    assert [each.what for each in found.differences] == ["configuration digest"]
    left = f"{recorded.job.checkpoint_url}/{found.again_job_id}"
    assert camp.store.list(left), "what came out otherwise is kept, to be looked at"


def test_a_recorded_address_of_notices_is_not_asked(camp: Camp, recorded: Recorded) -> None:
    settings = recorded.job.settings
    guard = settings.guard.model_copy(update={"preemption": "http://169.254.169.254/latest"})
    job = recorded.job.model_copy(update={"settings": settings.model_copy(update={"guard": guard})})
    again = reproduction_job(replace(recorded, job=job), camp.runtime)
    assert again.settings.guard == settings.guard


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


def test_a_run_that_resumed_a_job_is_compared_by_its_recorded_steps(
    recorded: Recorded,
) -> None:
    result = recorded.result.model_copy(update={"resumed_from_step": 4})
    late = {step: loss for step, loss in recorded.losses.items() if step > 4}
    resumed = Recorded(recorded.run_id, recorded.job, result, late)
    (told,) = [
        each for each in reproducibility._of_run_events(resumed) if each.what == "steps before"
    ]
    assert told.then.startswith("4 made earlier") and not told.decisive
    found = compare(resumed, recorded.result, recorded.losses, [], 0.0)
    assert (found.status, found.steps) == ("identical", 2)
    others = dict(recorded.losses) | {5: 0.25}
    assert compare(resumed, recorded.result, others, [], 0.0).first_different_step == 5


def test_each_difference_is_named_exactly(camp: Camp, recorded: Recorded) -> None:
    then = dict(recorded.result.environment) | {
        "torch": "1.0", "system": "Plan 9", "packages": "0" * 64, "commit": "c0ffee" * 6, "diff": ""
    }  # fmt: skip
    shrunk = Restart(
        attempt=2, failed_rank=1, worker_id="node-1", reason="lost", resumed_step=4, lost_steps=1,
        seconds=1.0, ranks=1,
    )  # fmt: skip
    result = recorded.result.model_copy(
        update={
            "environment": then,
            "code_version": "0.0.1+src.old",
            "restarts": (shrunk,),
            "skipped_batches": (3,),
        }
    )
    synchrony = recorded.job.settings.synchrony.model_copy(update={"kind": "parameter-server"})
    settings = recorded.job.settings.model_copy(update={"synchrony": synchrony})
    job = recorded.job.model_copy(update={"deterministic": False, "settings": settings})
    result = result.model_copy(update={"config_digest": config_digest(job)})
    before = Recorded(recorded.run_id, job, result, recorded.losses)
    found = {each.what: each for each in differences_of(before, camp.runtime, camp.store)}
    decisive = {each.what for each in found.values() if each.decisive}
    assert decisive == {"torch", "code version", "synchrony", "ranks", "deterministic mode"}
    told = {"system", "batches passed over", "commit"} | ({"diff"} & set(found))
    assert set(found) == decisive | told, "packages that no code of ours imports change no bits"
    assert (found["torch"].then, found["torch"].now) == ("1.0", current_environment(1)["torch"])
    with pytest.raises(NotReproducible) as caught:
        require_same([*found.values()])
    error = caught.value
    assert error.what == "code version is not as it was when the run trained"
    assert "(differs too: torch, " in str(error.got)
    assert error.wanted == "0.0.1+src.old"
    assert error.where
    assert error.do is not None
    assert error.do.startswith("Check out commit c0ffeec0ffee")
    require_same([*found.values()], anyway=True)
    require_same([each for each in found.values() if not each.decisive])


def test_a_driver_asks_the_machine_for_its_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reproducibility._accelerator() == current_environment(1)["accelerator"]
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:  \t 34\n")
    monkeypatch.setattr(reproducibility, "_NVIDIA", tmp_path)
    assert reproducibility._accelerator() == "NVIDIA H200"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"snapshot_digest": "0" * 64}, "data snapshot"),
        ({"snapshot_url": "s3://training/data/snapshots/" + "0" * 64}, "data snapshot"),
        ({"manifest_digest": "0" * 64}, "base model"),
        ({"version": "v9"}, "base model"),
    ],
)
def test_data_or_model_that_is_gone_is_refused_whatever_is_asked(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded, change: dict[str, str], what: str
) -> None:
    job = recorded.job.model_copy(update=change)
    other = Recorded(recorded.run_id, job, recorded.result, recorded.losses)
    with pytest.raises(NotReproducible, match=f"{what} is not as it was") as caught:
        train_again(other, camp.runtime, camp.store, launcher, anyway=True)
    assert None not in (caught.value.got, caught.value.wanted, caught.value.where, caught.value.do)
    assert nodes_with_base_model(recorded.job, camp.runtime) == list(camp.nodes)


def test_a_store_that_is_away_is_no_difference(
    camp: Camp, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ServiceUnavailable("S3 does not answer")

    monkeypatch.setattr(reproducibility, "load_snapshot", away)
    with pytest.raises(ServiceUnavailable):
        differences_of(recorded, camp.runtime, camp.store)


def test_a_shard_that_is_cut_or_damaged_is_another_snapshot(
    camp: Camp, launcher: LocalLauncher, recorded: Recorded
) -> None:
    shard = camp.snapshot.of_split("train")[0]
    url = camp.snapshot.shard_url(shard)
    whole = camp.store.get_bytes(url)
    try:
        camp.store.put_bytes(url, whole[:-1])
        (cut,) = differences_of(recorded, camp.runtime, camp.store)
        assert cut.what == "data snapshot"
        assert shard.name in cut.now
        camp.store.put_bytes(url, whole[:-1] + bytes([whole[-1] ^ 1]))
        for node in camp.nodes:  # nor may the copy from before answer for it
            shutil.rmtree(camp.runtime.node_dir(node) / "cache", ignore_errors=True)
        assert differences_of(recorded, camp.runtime, camp.store) == []
        with pytest.raises((NotReproducible, InvalidSnapshot), match="damaged") as caught:
            train_again(recorded, camp.runtime, camp.store, launcher)
        assert shard.sha256[:12] in str(caught.value)
    finally:
        camp.store.put_bytes(url, whole)


def test_an_environment_is_the_same_twice_and_records_what_matters() -> None:
    twice = current_environment(2)
    assert twice == current_environment(2)
    assert twice["torch"].startswith("2.13") and twice["kernels"]
    assert twice | {"threads": 1} == current_environment(1) != twice
    code = (
        "import sys, paceline.training.reproducibility as its; its.current_environment();"
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
        {"code_ref": BYTE_GRU},
        {"data": {"batching": "packed"}},
        {"labels": "shuffled"},
        {"precision": "bfloat16"},
    ):
        assert config_digest(camp.job("identity", **other)) != digest, other


def test_a_custom_task_is_rebuilt_as_recorded_despite_the_profile(
    camp: Camp, recorded: Recorded
) -> None:
    own = {"code_ref": BYTE_GRU, "steps": 1}
    data = {"batching": "carried", "purpose": "tests"}
    size = {"context": 16, "parameters": 8_000}
    assert size["context"] != camp.runtime.profile.model.context
    job = camp.job("sized", data=data, task=size, **own)
    code, said = camp.run_alone(job)
    assert code == 0
    exported = said.of("result")[0].data
    weights = camp.store.head(f"{exported['export_url']}/model-00001-of-00001.safetensors")
    assert weights.size < 4 * 2 * size["parameters"], "the profile's is larger by far"
    unsaid = camp.job("sized", data=data, **own)
    assert config_digest(job) != config_digest(unsaid)
    assert config_digest(job) != config_digest(
        camp.job("sized", data=data, task=size | {"context": 32}, **own)
    )
    for asked, found in ((job, set()), (unsaid, {"model settings"})):
        result = recorded.result.model_copy(update={"config_digest": config_digest(asked)})
        told = differences_of(Recorded("run-1", asked, result, {}), camp.runtime, camp.store)
        assert {each.what for each in told if each.decisive} == found
