"""What the policy asks of an export is set, or refused, before a node is busy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import (
    GateSettings,
    Policy,
    Profile,
    TrainingSettings,
    with_job_settings,
    with_overrides,
)
from paceline.errors import InvalidInput, InvalidProfile
from paceline.flows import lifecycle, train
from paceline.models import config_for, new_model, save_model
from paceline.storage import DiskStore
from paceline.tasks._support.run import Run
from paceline.tasks.train import export_changes, exporting
from paceline.training import base_facts
from paceline.training.export_policy import BaseFacts, settings_for
from tests.support.hugging_face import write_model

BASE = BaseFacts("float32", 1_000_000_000, 64, largest=300_000_000)
PROGRAM = ("safetensors", "torch.export")


def settled(
    policy: dict[str, Any], *, given: tuple[str, ...] = (), **training: Any
) -> tuple[str, bool]:
    own = TrainingSettings(**training)
    found = settings_for(own, Policy(**policy), given, BASE)
    return found.export_dtype, found.export_program


def test_what_is_unset_follows_from_the_policy() -> None:
    assert settled({}) == ("base", False)
    assert settled({"formats": PROGRAM}) == ("base", True)
    assert settled({"dtypes": ("bfloat16", "float16")}) == ("bfloat16", False)
    assert settled({"dtypes": ("float32", "float16")}) == ("base", False)
    assert settled({"max_model_bytes": 2_500_000_000}) == ("bfloat16", False)
    both = {"max_model_bytes": 5_000_000_000, "formats": PROGRAM}
    assert settled(both) == ("bfloat16", True), "model.pt2 has the weights once more"
    assert settled({"dtypes": ("bfloat16",)}, export_dtype="bfloat16") == ("bfloat16", False)


@pytest.mark.parametrize(
    ("policy", "training", "words"),
    [
        ({"formats": PROGRAM}, {"given": ("training.export_program",)}, ("false", "gate.formats")),
        ({"formats": PROGRAM}, {"code_ref": "m:f"}, ("code_ref", "gate.formats")),
        (
            {"dtypes": ("bfloat16",)},
            {"export_dtype": "float32"},
            ("weights in float32", "wanted bfloat16", "gate.dtypes"),
        ),
        ({"dtypes": ("bfloat16",)}, {"given": ("training.export_dtype",)}, ("gate.dtypes",)),
        ({"dtypes": ("int8",)}, {}, ("weights in float32", "int8", "gate.dtypes")),
        ({"max_model_bytes": 1_500_000_000}, {}, ("at most 1500000000 bytes", "max_model_bytes")),
        (
            {"max_model_bytes": 2_500_000_000},
            {"export_dtype": "float32"},
            ("1,000,000,000 parameters in float32", "max_model_bytes"),
        ),
        (
            {"max_model_bytes": 2_500_000_000, "formats": PROGRAM},
            {"given": ("training.export_dtype",), "export_dtype": "bfloat16"},
            ("in bfloat16, and again in model.pt2", "at most 2500000000 bytes"),
        ),
        ({"max_parameters": 999}, {}, ("1,000,000,000", "at most 999", "gate.max_parameters")),
        ({"min_context": 65}, {}, ("a context of 64", "at least 65", "gate.min_context")),
    ],
)
def test_contradictions_are_one_line(
    policy: dict[str, Any], training: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        settled(policy, **training)
    line = caught.value.one_line()
    assert "\n" not in line
    for each in words:
        assert each in line


def test_the_policy_bounds_an_exports_files() -> None:
    def sized(policy: int, given: tuple[str, ...] = (), **training: Any) -> TrainingSettings:
        return settings_for(
            TrainingSettings(**training), Policy(max_file_bytes=policy), given, BASE
        )

    assert sized(2_000_000_000).export_file_bytes == 2_000_000_000
    assert sized(2_000_000_000).export_dtype == "base"
    assert sized(9_000_000_000) == TrainingSettings()
    assert sized(2_000_000_000, export_file_bytes=9_999).export_file_bytes == 9_999
    small = sized(1_000_000_000)
    assert small.export_dtype == "bfloat16", "its largest tensor fits then"
    with pytest.raises(InvalidInput, match=r"export_file_bytes = 5000000000.*max_file_bytes"):
        sized(2_000_000_000, ("training.export_file_bytes",))
    # 600,000,000 bytes are the tensor in bfloat16; its file has a header, too
    for most in (500_000_000, 600_000_000):
        with pytest.raises(InvalidInput, match=rf"a tensor of 300,000,000 .*at most {most} bytes"):
            sized(most)


@pytest.mark.parametrize("value", [1, -5, "5GB", 1.5])
def test_a_size_that_is_none_is_refused_with_the_key(value: object) -> None:
    with pytest.raises(InvalidProfile, match=r"training\.export_file_bytes = .*wanted"):
        with_job_settings(Profile(), {"training.export_file_bytes": value})
    with pytest.raises(InvalidProfile, match=r"gate\.max_file_bytes = .*wanted"):
        with_overrides(Profile(), {"gate.max_file_bytes": value})


def test_a_policy_may_name_the_dtypes_of_user_code() -> None:
    policy = Policy(dtypes=("bfloat16, float32",), max_model_bytes=1000)
    base = BaseFacts("float32", 10_000, 64)
    with pytest.raises(InvalidInput, match="policy would refuse"):
        settings_for(TrainingSettings(), policy, (), base)


def test_without_a_policy_of_its_own_a_model_may_have_any_size() -> None:
    big = BaseFacts("bfloat16", 70_000_000_000, 64)
    training = TrainingSettings()
    assert settings_for(training, Policy(), (), big) == training


def test_the_facts_are_in_the_bases_headers(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    store = DiskStore()
    theirs = write_model("llama", tmp_path / "theirs", vocab_size=257)
    facts = base_facts(theirs.as_uri(), store)
    assert facts is not None
    assert (facts.dtype, facts.context) == ("float32", 64)
    # as hubs have it: the same weights again under other names, and a buffer of older versions
    tensors = load_file(theirs / "model.safetensors")
    save_file({f"its.{name}": tensors[name] for name in tensors}, theirs / "whole.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4, dtype=torch.float16)
    save_file(tensors, theirs / "model.safetensors")
    assert base_facts(theirs.as_uri(), store) == facts
    config = config_for(20_000, 32)
    model = new_model(config, 1)
    save_model(model, config, tmp_path / "ours")
    count = sum(each.numel() for each in model.parameters())
    largest = max(each.numel() for each in model.parameters())
    found = base_facts((tmp_path / "ours").as_uri(), store)
    assert found == BaseFacts("float32", count, 32, largest)
    save_model(model.to(torch.bfloat16), config, tmp_path / "half")
    half = base_facts((tmp_path / "half").as_uri(), store)
    assert half is not None
    (tmp_path / "half" / "config.json").write_text("[]")
    assert base_facts((tmp_path / "half").as_uri(), store) is None
    assert base_facts((tmp_path / "none").as_uri(), store) is None


@pytest.mark.parametrize("flow", [train, lifecycle], ids=["train", "lifecycle"])
def test_a_contradiction_is_found_before_nodes_are_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flow: Any
) -> None:
    config = config_for(20_000, 32)
    save_model(new_model(config, 1), config, tmp_path / "models" / "m" / "v1")
    profile = Profile(gate=GateSettings(models={"m": Policy(min_context=64)}))
    runtime = SimpleNamespace(profile=profile, models_url=(tmp_path / "models").as_uri())
    run = SimpleNamespace(
        state_dir="", run_id="run-20261120-153600-9f3a1c", runtime=runtime, store=DiskStore()
    )
    link = SimpleNamespace(user=("default", ""), sweep=None, hosts=["a"])
    inputs = SimpleNamespace(model_id="m", version="v1", snapshot_url="u")
    passed = {
        "recorded": lambda *_: nullcontext(),
        "linked": lambda *_: nullcontext(link),
        "prepare_inputs": lambda *_, **__: inputs,
    }
    ignored = ("permitted_snapshot", "require_own_expectations", "published_tasks")
    monkeypatch.setattr(Run, "open", lambda *_: run)
    for name in (*passed, *ignored):
        if hasattr(flow, name):
            monkeypatch.setattr(flow, name, passed.get(name, lambda *_: None))
    monkeypatch.setattr(flow, "distribute_model", lambda *_, **__: pytest.fail("a node is busy"))
    monkeypatch.setattr(flow, "require_judgeable", lambda *_: pytest.fail("it is found before"))
    with pytest.raises(InvalidInput, match=r"a context of 32.*gate\.min_context"):
        if flow is train:
            train.train_model.fn("m", "v1", "u")
        else:
            lifecycle.run_lifecycle.fn()


def test_the_model_says_whose_policy_it_is(tmp_path: Path) -> None:
    config = config_for(20_000, 32)
    save_model(new_model(config, 1), config, tmp_path / "models" / "m" / "v1")
    profile = Profile(gate=GateSettings(models={"m": Policy(formats=PROGRAM, dtypes=("float16",))}))
    runtime = SimpleNamespace(profile=profile, models_url=(tmp_path / "models").as_uri())
    run: Any = SimpleNamespace(runtime=runtime, store=DiskStore())
    asked = exporting(run, profile, (), "m", "v1").training
    assert (asked.export_dtype, asked.export_program) == ("float16", True)
    notes: list[str] = []
    run.warn = notes.append
    changed = export_changes(run, profile, exporting(run, profile, (), "m", "v1"))
    assert changed == {"training.export_dtype": "float16", "training.export_program": True}
    assert len(notes) == 2
    handed_on = with_job_settings(profile, changed)  # as a lifecycle does
    assert exporting(run, handed_on, changed, "m", "v1").training == asked
    assert exporting(run, profile, (), "other", "v1").training == profile.training
