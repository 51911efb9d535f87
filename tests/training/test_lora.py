"""LoRA and DoRA through `paceline train`: resumed to the bit, small checkpoints, clear refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from paceline import extras
from paceline.config import TrainingSettings, load_profile
from paceline.errors import InvalidInput, MissingExtra
from paceline.models import config_for, load_model
from paceline.training import single
from paceline.training.parallel import MeshSpec, require_layout
from tests.support.carried_state import BYTE_GRU, SOURCE
from tests.support.hugging_face import write_model
from tests.training.test_cli_training import nothing_starts, refused
from tests.training.test_continuing import losses, text, train

__all__ = ["nothing_starts", "text"]  # fixtures

pytestmark = pytest.mark.xdist_group("warm node")

LORA = ("--set", "training.lora.r=4", "--set", "training.lora.use_dora=true")
LORA += ("--set", "training.lora.lora_dropout=0.1")
FIRST, AVERAGED = "model.layers.0.self_attn.q_proj.lora_B.weight", ("ema.", "model.")
OFTEN = ("--set", "training.checkpoints.every_steps=4", "--set", "training.checkpoints.keep=9")
GRU = (
    f"training.code_ref={BYTE_GRU}",
    f"security.code_sources=['{SOURCE}']",
    "data.batching=carried",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("base") / "model")


def commits(output: Path, job: str) -> list[dict[str, Any]]:
    found = sorted((output / "checkpoints" / job).glob("step-*/commit.json"))
    return [json.loads(each.read_text()) for each in found]


def saved(output: Path, job: str) -> int:
    """Return the bytes of tensors in the job's newest generation."""
    return sum(each["bytes"] for each in commits(output, job)[-1]["files"].values())


@pytest.mark.parametrize(
    "way",
    [
        (),
        pytest.param(("--ranks", "2", "--set", "training.mesh.shard=2"), marks=pytest.mark.nightly),
    ],
    ids=["one-rank", "fsdp"],
)
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(
    text: Path, model: Path, tmp_path: Path, way: tuple[str, ...]
) -> None:
    """Dropout draws the same in each; of the adapters there is a moving average."""
    averaged = ("--set", "training.ema.decay=0.6")
    asked = ("--model", str(model), *LORA, *OFTEN, *averaged, *way)
    whole, _ = train(text, tmp_path / "whole", "--steps", "12", *asked)
    job = tmp_path / "whole" / "checkpoints" / whole["job_id"]
    at_once = losses(tmp_path / "whole", whole["job_id"])
    adapter = (job / "adapter/adapter_model.safetensors").read_bytes()
    (newest,) = job.glob("step-00000012-*")
    names = json.loads((newest / "index.json").read_text())["tensors"]
    of = {kind: {n.partition(".")[2] for n in names if n.startswith(kind)} for kind in AVERAGED}
    assert of["ema."] == of["model."], "adapters alone"
    exported = load_file(job / "adapter/adapter_model.safetensors")["base_model.model." + FIRST]
    file = newest / "rank-00000-of-00001.safetensors"
    if file.exists():
        stored = load_file(file)
        key = FIRST.replace(".weight", ".default.weight") + "@0,0"
        assert stored[f"ema.{key}"].equal(exported)
        assert not stored[f"model.{key}"].equal(exported)
    for each in (*job.glob("step-00000012-*"), job / "export", job / "adapter"):
        shutil.rmtree(each)
    again, _ = train(text, tmp_path / "whole", "--steps", "12", *asked)
    assert again["job_id"] == whole["job_id"]
    resumed = again["resumed_from_step"]
    assert 4 <= resumed < 12, "a save waits while another is under way"
    assert losses(tmp_path / "whole", whole["job_id"]) == at_once
    assert again["weights_digest"] == whole["weights_digest"]
    assert (job / "adapter/adapter_model.safetensors").read_bytes() == adapter


@pytest.mark.nightly
def test_adapters_and_all_weights_are_different_trainings(
    text: Path, model: Path, tmp_path: Path
) -> None:
    output, base = tmp_path / "out", ("--model", str(model))
    full, _ = train(text, output, "--steps", "6", *base)
    lora, said = train(text, output, "--steps", "6", *base, *LORA)
    assert "DoRA adapters of rank 4 on the layers that peft chooses" in said
    assert lora["job_id"] != full["job_id"]
    assert lora["resumed_from_step"] == 0
    assert lora["first_loss"] == pytest.approx(full["first_loss"], rel=1e-6), "adapters begin at 0"
    assert saved(output, lora["job_id"]) < saved(output, full["job_id"]) / 3
    (marker,) = commits(output, lora["job_id"])
    assert marker["extra"]["base_manifest_digest"] == lora["base_manifest_digest"]
    names = set()
    for file in (output / "checkpoints" / lora["job_id"]).glob("step-*/rank-*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    assert names
    assert all(".lora_" in name for name in names), "no weight of the base"

    other = write_model("llama", tmp_path / "other", initializer_range=0.05)
    before = sorted(each.name for each in (output / "checkpoints").iterdir())
    for words, named in (
        ((*base, *LORA, "--continue-from", full["job_id"]), "then None"),
        ((*base, "--continue-from", lora["job_id"]), "settings.lora None, then {'r': 4"),
        (
            ("--model", str(other), *LORA, "--continue-from", lora["job_id"]),
            f"then {lora['base_manifest_digest']}",
        ),
    ):
        _, said = train(text, output, "--steps", "9", *words, code=2)
        (line,) = [each for each in said.splitlines() if each.startswith("paceline: ")]
        assert "a continuation differs in more than its steps" in line
        assert named in line, line
    assert sorted(each.name for each in (output / "checkpoints").iterdir()) == before
    fresh, _ = train(text, output, "--steps", "6", "--model", str(other), *LORA)
    assert fresh["resumed_from_step"] == 0, "checkpoints of adapters belong to their base"


@pytest.mark.nightly
def test_our_own_transformer_is_adapted(text: Path, tmp_path: Path) -> None:
    full, _ = train(text, tmp_path / "out", "--steps", "6")
    export = tmp_path / "out/checkpoints" / full["job_id"] / "export"
    words = ("--set", "training.lora.target_modules=all-linear", "--set", "training.mesh.shard=2")
    lora, _ = train(
        text, tmp_path / "adapted", "--steps", "6", "--ranks", "2", "--model", str(export), *words
    )
    adapted = tmp_path / "adapted/checkpoints" / lora["job_id"] / "export"
    before, after = (load_model(each)[0].state_dict() for each in (export, adapted))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}


@pytest.mark.nightly
def test_a_model_of_ones_own_is_adapted(text: Path, tmp_path: Path) -> None:
    own = ("--steps", "6", *(word for each in GRU for word in ("--set", each)))
    targets = ("--set", 'training.lora.target_modules=["gate"]')
    done, _ = train(text, tmp_path / "out", *own, *targets)
    job = tmp_path / "out/checkpoints" / done["job_id"]
    (file,) = (job / "export").glob("*.safetensors")
    assert not [name for name in load_file(file) if "lora" in name or "base_layer" in name]
    adapter = load_file(job / "adapter/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapter} == {"gate"}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["lora.r=0"], "got training.lora.r = 0, wanted greater than or equal to 1"),
        (["lora.r=-3"], "got training.lora.r = -3"),
        (["lora.rank=4"], "wanted one of lora_alpha, lora_dropout, r, target_modules, use_dora"),
        (["lora=true"], "wanted a section with r, lora_alpha"),
        (["lora.target_modules=q_porj"], "no layer to adapt has this name: got q_porj"),
        (['lora.target_modules=["q_proj","norm"]'], "got norm, wanted linear layers: down_proj"),
        (["lora.target_modules=lm_head"], "got lm_head"),
        (["lora.r=2", "mesh.pp=2", "ranks=2"], "adapters are trained by replicas or shards"),
        (["lora.use_dora=true", "mesh.tp=2", "ranks=2"], "need whole matrices: got tp 2, use_dora"),
        (["lora.lora_dropout=0.1", "mesh.tp=2", "ranks=2"], "lora_dropout 0.1, wanted tp 1"),
        (['no_decay=["*q_porj*"]'], "no trained parameter has such a name: got *q_porj*"),
        (['groups=[{match=["*norm*"]}]', "lora.r=2"], "got *norm*, wanted names such as model"),
        (["optimizer=muon", "mesh.pp=2", "ranks=2"], "muon does not train the stages"),
        (["lora.r=2", "synchrony.kind=local-sgd"], "adapters are trained by replicas or shards"),
    ],
)
def test_what_cannot_be_adapted_is_one_line_before_any_data_are_read(
    text: Path, model: Path, tmp_path: Path, settings: list[str], named: str
) -> None:
    words = [word for each in settings for word in ("--set", f"training.{each}")]
    error = refused(tmp_path / "out", "--text", str(text), "--model", str(model), *words)
    assert named in error.one_line()
    assert not (tmp_path / "out").exists()


def test_adapters_of_our_transformer_are_not_cut() -> None:
    settings = TrainingSettings.model_validate({"lora": {"r": 2}})
    require_layout(MeshSpec(shard=2), settings, config_for(60_000, 24))
    with pytest.raises(InvalidInput, match="adapters are trained by replicas or shards"):
        require_layout(MeshSpec(tp=2), settings, config_for(60_000, 24, parts=2))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("lora.r=2", "a model of your own has no default layers to adapt"),
        pytest.param(
            'groups=[{match=["*embde*"]}]', "no trained parameter has such a name: got *embde*",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "lora.target_modules=gates", "got gates, wanted linear layers: 0, 1, candidate, gate",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_targets_of_a_model_of_ones_own_are_checked_before_ranks_start(
    text: Path, tmp_path: Path, more: str, named: str
) -> None:
    words = [word for each in (*GRU, f"training.{more}") for word in ("--set", each)]
    _, said = train(text, tmp_path / "out", "--steps", "2", *words, code=2)
    assert named in said.splitlines()[-1]
    assert not list(tmp_path.glob("out/checkpoints/*/step-*"))


@pytest.mark.usefixtures("nothing_starts")
def test_an_adapter_is_no_model(text: Path, model: Path, tmp_path: Path) -> None:
    """Without its base's weights, and beside them: the export would load it a second time."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    alone.mkdir()
    shutil.copytree(model, beside)
    for each in (alone, beside):
        (each / "adapter_config.json").write_text("{}")
        (each / "adapter_model.safetensors").write_bytes(b"")
        error = refused(tmp_path / "out", "--text", str(text), "--model", str(each))
        assert "an adapter is not a model: got adapter_config.json" in error.one_line()
        assert not (tmp_path / "out").exists()


def test_without_peft_the_extra_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = extras.importlib.util.find_spec
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    profile = load_profile("embedded", {"training.lora.r": "4"})
    asked = single.TrainingRequest(output=tmp_path / "out", profile=profile, model=model)
    with pytest.raises(MissingExtra) as raised:
        single.prepare(asked)
    assert "paceline-*.whl)[lora]" in raised.value.one_line()
    assert not os.path.lexists(tmp_path / "out")
