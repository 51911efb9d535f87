"""Which models of transformers `tp` and `pp` can cut: by plan and sizes, before any rank starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from paceline.errors import InvalidInput, PermanentError
from paceline.models import Pretrained
from paceline.training.parallel import MeshSpec, require_cuttable, require_planned
from paceline.training.parallel.tensor import STYLES, styles_of
from tests.support.hugging_face import FAMILIES, SHAPE, write_model
from tests.training.test_cli_training import nothing_starts, refused
from tests.training.test_continuing import text

__all__ = ["nothing_starts", "text"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_starts")


def empty(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_matrix_of_a_family_is_cut(tmp_path: Path, family: str) -> None:
    found = Pretrained.open(write_model(family, tmp_path))
    require_planned(found, MeshSpec(tp=2))
    styles = styles_of(found.empty)
    owners = {
        name: module
        for name, module in found.empty.named_modules()
        if list(module.parameters(recurse=False))
    }
    assert set(styles) == set(owners)
    whole = {name for name, style in styles.items() if style not in STYLES.values()}
    assert all(owners[each].weight.ndim == 1 for each in whole - {"lm_head"})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no plan"),
        (
            lambda: empty(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)),
            "GPT2LMHeadModel has no plan",
        ),
        (
            lambda: empty(transformers.Phi3Config(**SHAPE)),
            "rowwise_split_input of model.layers.0.self_attn.o_proj",
        ),
    ],
    ids=["no model of transformers", "no plan", "another style"],
)
def test_a_family_without_a_plan_that_torch_carries_out_is_refused(model: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)) as raised:
        styles_of(model())
    assert isinstance(raised.value, PermanentError)
    assert "training.mesh.shard" in raised.value.one_line()


def test_a_family_without_a_plan_of_its_layers_is_not_cut_into_stages(tmp_path: Path) -> None:
    found = Pretrained.open(write_model("llama", tmp_path))
    require_planned(found, MeshSpec(pp=2))
    found.config.base_model_pp_plan = None
    with pytest.raises(InvalidInput, match="LlamaForCausalLM has no plan of its layers") as raised:
        require_planned(found, MeshSpec(pp=2))
    assert "training.mesh.shard" in raised.value.one_line()


def test_tied_weights_that_a_plan_cuts_differently_are_refused(tmp_path: Path) -> None:
    model = Pretrained.open(write_model("qwen2", tmp_path)).empty
    styles_of(model)
    model.tp_plan = model.tp_plan | {"lm_head": "rowwise"}
    with pytest.raises(
        InvalidInput, match=r"lm_head.weight and model.embed_tokens.weight are tied"
    ):
        styles_of(model)


@pytest.mark.parametrize(
    ("mesh", "changes", "named"),
    [
        ({"tp": 4}, {}, "key-value heads 2, tp 4"),
        ({"tp": 3}, {"num_key_value_heads": 3}, "query heads 4, tp 3"),
        ({"tp": 8}, {"num_key_value_heads": None}, "query heads 4, tp 8"),
        ({"tp": 2}, {"vocab_size": 301}, "vocabulary 301, tp 2"),
        ({"tp": 2}, {"intermediate_size": 63}, "feed-forward width 63, tp 2"),
        ({"tp": 2}, {"attention_dropout": 0.1}, "attention_dropout 0.1, tp 2"),
        ({"pp": 3}, {}, "more stages than layers: got 2 layers, pp 3"),
        ({"pp": 2}, {"hidden_dropout": 0.1}, "hidden_dropout 0.1, pp 2"),
        ({"pp": 2}, {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type dynamic, pp 2"),
        ({"cp": 4}, {}, "query heads 4, key-value heads 2, cp 4"),
        ({"cp": 2}, {"num_key_value_heads": 1}, "a cp that divides 1, at most 1"),
        ({"cp": 2}, {"hidden_dropout": 0.1}, "hidden_dropout 0.1, cp 2"),
        ({"cp": 2}, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type longrope, cp 2"),
    ],
)
def test_a_mesh_that_cannot_cut_the_sizes_of_a_config_is_refused(
    mesh: dict[str, int], changes: dict[str, Any], named: str
) -> None:
    config = {"model_type": "llama", "attention_dropout": 0.0, **SHAPE}
    require_cuttable(MeshSpec(tp=2), config)
    require_cuttable(MeshSpec(shard=3), config | changes)
    with pytest.raises(InvalidInput) as raised:
        require_cuttable(MeshSpec(**mesh), config | changes)
    assert named in raised.value.one_line()


@pytest.mark.parametrize(
    ("words", "changes", "named"),
    [
        (("mesh.tp=4", "ranks=4"), {}, "key-value heads 2, tp 4"),
        (("mesh.pp=3", "ranks=3"), {}, "more stages than layers"),
        (("mesh.pp=2", "ranks=2", "mesh.microbatches=1"), {}, "fewer microbatches than stages"),
        (("mesh.tp=2", "ranks=2"), {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        (("mesh.cp=4", "ranks=4"), {}, "key-value heads 2, cp 4"),
    ],
)
def test_the_command_refuses_in_one_line_before_any_data_are_read(
    text: Path, tmp_path: Path, words: tuple[str, ...], changes: dict[str, Any], named: str
) -> None:
    model = write_model("llama", tmp_path / "model", **changes)
    settings = [word for each in words for word in ("--set", f"training.{each}")]
    error = refused(tmp_path / "out", "--text", str(text), "--model", str(model), *settings)
    assert named in error.one_line()
