"""The gate's policy is the installation's: no parameter, option or directory of a submitter
changes it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.api.flow_runs import _require_allowed
from paceline.cli.flows import lifecycle, promote
from paceline.config import (
    Endpoints,
    Policy,
    Profile,
    Runtime,
    Secrets,
    save_runtime,
    with_job_settings,
    with_overrides,
)
from paceline.errors import AccessDenied, GateRefused, InvalidInput, InvalidProfile
from paceline.flows.lifecycle import run_lifecycle
from paceline.flows.promote import promote_model
from paceline.schemas import FLOW_PARAMETERS, StartFlow, TaskSize, TrainJob, digest_of
from paceline.tasks._support import sealed_records
from paceline.tasks.promote import recorded_evidence
from paceline.tasks.train import profile_of
from paceline.training import store_job
from tests.security.test_a_forged_report_is_refused import Bucket, recorded, run_of

RUN = "run-20261120-153600-9f3a1c"


@pytest.mark.parametrize("flow", ["promote-model", "lifecycle"])
@pytest.mark.parametrize(
    "name",
    ["policy", "gate", "profile", "state_dir", "must_beat", "gate.models", "approval"],
)
def test_rest_takes_no_parameter_that_could_change_it(flow: str, name: str) -> None:
    call = StartFlow.model_validate({"flow": flow, "run_id": RUN, "parameters": {name: "x"}})
    with pytest.raises(InvalidInput, match="takes no such parameter"):
        _require_allowed(call, Profile(), lambda url: url)


def test_rest_takes_no_optimiser_of_another_source() -> None:
    call = StartFlow.model_validate(
        {
            "flow": "train-model",
            "run_id": RUN,
            "parameters": {"optimizer_ref": "evil:make@sha256:" + "0" * 64},
        }
    )
    with pytest.raises(AccessDenied, match=r"training\.optimizer_ref evil:make"):
        _require_allowed(call, Profile(), lambda url: url)


# Each section of a profile but training, and what of training is the installation's.
NOT_OF_A_TRAINING = [
    *(each for each in Profile.model_fields if each not in {"training", "name"}),
    *("gate.max_bits_per_byte", "gate.models", "evaluation.tasks", "security.code_sources"),
    "evaluation.metrics",
    *("data.purpose", "data.project", "data.transform", "data.tokenizer", "data.source"),
    *("model.model_id", "model.base", "training", "training.code_ref"),
    *("training.guard.preemption", "a" * 10_000, "training." + "a." * 10),
]
SMUGGLED = [
    {"training.guard": {"preemption": "http://169.254.169.254/"}},
    {"training.code_ref": "evil:make"},
]


@pytest.mark.parametrize("flow", ["train-model", "lifecycle"])
@pytest.mark.parametrize(
    "settings",
    [*({each: "x"} for each in NOT_OF_A_TRAINING), *SMUGGLED],
    ids=lambda each: str(each)[:40],
)
def test_a_trainings_own_settings_change_no_rule(flow: str, settings: dict[str, object]) -> None:
    call = StartFlow.model_validate(
        {"flow": flow, "run_id": RUN, "parameters": {"settings": settings}}
    )
    with pytest.raises(InvalidProfile) as caught:
        _require_allowed(call, Profile(), lambda url: url)
    assert len(str(caught.value)) < 1000
    with pytest.raises(InvalidProfile):
        with_job_settings(Profile(), settings)


RECORDED = {
    "training.guard.preemption": "http://169.254.169.254/latest/meta-data/iam",
    "training.code_ref": "evil:make",
    "training.ranks_per_node": 9,
    "data.transform": "os:system",
    "data.project": "another",
    "data.expectations": "s3://elsewhere/all-is-well.yaml",
    "data.cache_bytes": 2**50,
    "data.max_bad_share": 0.99,
}
RESTORED = {
    "training.guard.spares": 3,
    "training.lora": {"r": 5},
    "training.steps": 7,
    "model.context": 64,
    "data.batching": "packed",
    "data.columns": 2,
    "data.prefetch_shards": 9,
}


def test_a_record_in_s3_decides_no_setting_of_the_installation() -> None:
    """Who may write to the bucket chooses no URL that nodes call, and no code or place."""
    earlier = with_overrides(Profile(), RECORDED | RESTORED)
    job = TrainJob(
        job_id="job-1", run_id=RUN, state_dir="/state", model_id="m", version="1",
        manifest_digest="0" * 64, snapshot_url="s3://b/data", snapshot_digest="0" * 64,
        purpose="tests", checkpoint_url="s3://paceline/checkpoints", settings=earlier.training,
        data=earlier.data, task=TaskSize(context=64),
    )  # fmt: skip
    run = run_of(Bucket())
    store_job(job.model_copy(update={"checkpoint_url": run.runtime.checkpoints_url}), run.store)
    ours = {"training.guard.preemption": "http://127.0.0.1/notice", "training.dpo": {"beta": 0.2}}
    for profile in (Profile(), with_overrides(Profile(), ours)):
        run.runtime = run.runtime.model_copy(update={"profile": profile})
        found = profile_of(run, {"training.steps": 9}, "job-1", "", "")
        wanted = with_overrides(profile, RESTORED | {"training.steps": 9, "training.dpo": None})
        assert found == wanted


def test_no_flow_has_a_parameter_named_as_a_rule() -> None:
    """Also not one that Prefect's page or API could give."""
    rules = {*Policy.model_fields, "policy", "gate", "profile", "models"}
    for flow in (promote_model, run_lifecycle):
        assert rules.isdisjoint(inspect.signature(flow.fn).parameters)
    assert all(rules.isdisjoint(names) for names in FLOW_PARAMETERS.values())


@pytest.mark.parametrize("command", [promote, lifecycle], ids=lambda each: each.name)
@pytest.mark.parametrize("option", ["--set", "--profile", "--policy"])
def test_the_command_line_has_no_option_that_could_change_it(command: object, option: str) -> None:
    if command is lifecycle and option == "--set":
        return  # of the training alone: test_a_trainings_own_settings_change_no_rule
    words = ["m", "--report", "a" * 64] if command is promote else []
    ended = CliRunner().invoke(command, [*words, option, "gate.max_bits_per_byte=999"])  # type: ignore[arg-type]
    assert ended.exit_code == 2
    assert f"No such option '{option}'" in ended.output


def test_an_evaluation_is_found_by_its_run_and_its_job_alone() -> None:
    bucket = Bucket()
    run, digest, _ = recorded(bucket)
    with pytest.raises(GateRefused, match="no evaluation of it was recorded"):
        recorded_evidence(run, "job-1")
    sealed_records.add_references(run, "evaluation", digest, "job-1")
    for named in ("job-1", run.run_id, digest):
        assert recorded_evidence(run, named)[0] == digest
    key = sealed_records.Reference(kind="evaluation", name="job-1", digest=digest).key
    forged = sealed_records.Reference(kind="evaluation", name="job-1", digest="0" * 64)
    other = run_of(bucket, "a token of scope deploy")
    sealed_records._write(other, forged, "reference", key, digest_of(forged))
    with pytest.raises(GateRefused, match="cannot be trusted"):
        recorded_evidence(run, "job-1")


def test_a_state_directory_of_ones_own_finds_no_recorded_evidence() -> None:
    """Who copies runtime.json without the token and writes a laxer profile has another seal."""
    bucket = Bucket()
    _, digest, _ = recorded(bucket)
    lax = Profile.model_validate({"gate": {"max_bits_per_byte": 999.0}})
    own = run_of(bucket, "a token of scope deploy")
    own.runtime = own.runtime.model_copy(update={"profile": lax})
    with pytest.raises(GateRefused, match="was not recorded here"):
        recorded_evidence(own, digest)


def test_only_the_owner_reads_and_writes_the_policy(tmp_path: Path) -> None:
    path = save_runtime(
        Runtime(profile=Profile(), state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets())
    )
    assert path.stat().st_mode & 0o077 == 0
    assert "gate" in json.loads(path.read_bytes())["profile"]
