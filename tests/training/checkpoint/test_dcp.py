"""Export of our generations to DCP directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from paceline.errors import Conflict, CorruptData, InvalidInput, SourceMissing
from paceline.models import new_model
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    Generations,
    export_dcp,
    generation_at,
    generations_at,
)
from paceline.training.checkpoint.dcp_export import DcpContents
from paceline.training.checkpoint.records import Index
from paceline.training.loop import Group, new_optimizer
from tests.training.checkpoint.ranks import (
    SAVE_AT,
    Run,
    config,
    saver_of,
    settings_for,
)

pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.xdist_group("forked ranks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def bits_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: each.detach().contiguous().numpy().tobytes() for name, each in tensors.items()}


def weights_of(run: Run) -> dict[str, Tensor]:
    every = run.state.tensors().items()
    return {name.removeprefix("model."): each for name, each in every if name[:6] == "model."}


def spoil(path: Path, at: int = -9) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """One rank's training at step 2, saved below ``single``, and that training itself."""
    root = tmp_path_factory.mktemp("dcp")
    run = Run("single", Group(), ema=None)
    run.take(0, SAVE_AT)
    generations = Generations(DiskStore(), DiskStore.url_of(root / "single"))
    saver_of(run, generations).save_last(SAVE_AT, {"batch": SAVE_AT}, {})
    shutil.copytree(root / "single", root / "damaged")
    (file,) = (root / "damaged").glob("step-*/rank-*.safetensors")
    spoil(file)
    return root, run


@pytest.fixture(scope="module")
def gangs(runs: dict[int, list[dict[str, Any]]], root: Path) -> Path:
    """Return where two ranks with shards saved: ``jobs/shard2``, and ``by-dcp`` by plain DCP."""
    assert runs[2]
    return root


def filled(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [each for each in optimizer.param_groups if each["params"]]


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimiser as anybody makes them, with moments to be filled."""
    model = new_model(config(), 5).double()
    optimizer = new_optimizer(model, settings_for({}))
    optimizer.param_groups = filled(optimizer)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    return model, optimizer


def same_as(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wanted = bits_of(run.state.tensors())
    found = {f"model.{name}": each for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state[parameter].items():
            found[f"{moment}.{name}"] = value
    assert bits_of(found) == wanted


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_plain_torch_loads_weights_and_optimizer_bit_for_bit(
    saved: tuple[Path, Run], tmp_path: Path, flat: bool
) -> None:
    root, run = saved
    export_dcp(*generation_at(root / "single"), tmp_path / "out")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "SHA256SUMS"}
    model, optimizer = plain()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer.param_groups[0]["lr"] = 9.0
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "paceline": {"step": -1},
    }
    dcp.load(state, checkpoint_id=tmp_path / "out")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    same_as(run, model, optimizer)
    assert state["paceline"] == {"step": SAVE_AT}
    for mine, theirs in zip(filled(optimizer), filled(run.optimizer), strict=True):
        assert mine["lr"] == theirs["lr"] != 9.0
        assert mine["betas"] == theirs["betas"]
        assert mine["weight_decay"] == theirs["weight_decay"]


def test_shards_are_one_model_for_a_single_process(
    saved: tuple[Path, Run], gangs: Path, tmp_path: Path
) -> None:
    _, run = saved
    theirs = plain()[0].state_dict()
    dcp.load({"model": theirs}, checkpoint_id=gangs / "by-dcp")
    export_dcp(*generation_at(gangs / "jobs" / "shard2"), tmp_path / "out", model_prefix="")
    names = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {f"ema.{name}" for name in theirs} <= set(names), "averages beside the weights"
    exported = plain()[0].state_dict()
    dcp.load(exported, checkpoint_id=tmp_path / "out")  # weights at the root, as torchtitan has
    assert bits_of(theirs) == bits_of(exported)
    wanted = run.state.tensors()
    for name, tensor in exported.items():  # the same training under another layout
        torch.testing.assert_close(tensor, wanted[f"model.{name}"], rtol=1e-9, atol=1e-12)


def test_groups_of_an_earlier_release_are_those_of_their_parameters(
    saved: tuple[Path, Run],
) -> None:
    generations, generation = generation_at(saved[0] / "single")
    commit = generations.commit_of(generation)
    index = generations.index_of(generation, commit)
    earlier = json.loads(index.model_dump_json())
    earlier["groups"] = {"matrices": {"lr": 0.5}, "vectors": {"lr": 0.25}}
    values = DcpContents(commit, Index.model_validate(earlier), "model").values
    assert values["optimizer.param_groups.0.lr"] == 0.5
    assert values["optimizer.param_groups.model.norm.weight.lr"] == 0.25


def test_a_damaged_file_is_named_and_nothing_is_exported(
    saved: tuple[Path, Run], tmp_path: Path
) -> None:
    root, _ = saved
    with pytest.raises(CorruptData, match="does not match its hash") as caught:
        export_dcp(*generation_at(root / "damaged"), tmp_path / "out")
    assert "rank-00000-of-00001" in str(caught.value.where)
    assert caught.value.got != caught.value.wanted
    assert caught.value.do
    assert list(tmp_path.iterdir()) == [], "half an export is none"


def test_weights_only_leaves_the_optimizer_out(saved: tuple[Path, Run], tmp_path: Path) -> None:
    root, _ = saved
    export_dcp(*generation_at(root / "single"), tmp_path / "out", weights_only=True)
    names = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in names} == set(weights_of(saved[1]))
    with pytest.raises(Conflict):
        export_dcp(*generation_at(root / "single"), tmp_path / "out")


def test_places_are_named_as_people_name_them(saved: tuple[Path, Run], tmp_path: Path) -> None:
    root, _ = saved
    shutil.copytree(root / "single", tmp_path / "out" / "checkpoints" / "job-1")
    (there,) = (tmp_path / "out" / "checkpoints" / "job-1").glob("step-*")
    for place in (tmp_path / "out", there.parent, there, DiskStore.url_of(there)):
        assert generation_at(place)[1].step == SAVE_AT
        assert generations_at(place).url == DiskStore.url_of(there.parent)
    with pytest.raises(SourceMissing, match=f"steps {SAVE_AT}"):
        generation_at(tmp_path / "out", step=7)
    with pytest.raises(SourceMissing):
        generation_at(tmp_path / "nowhere")
    shutil.copytree(there.parent, there.parent.with_name("job-2"))
    with pytest.raises(InvalidInput, match="job-1, job-2"):
        generation_at(tmp_path / "out")
