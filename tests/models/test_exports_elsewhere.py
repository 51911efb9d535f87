"""What was trained here is read elsewhere: from several files, by the names that vLLM's loaders
take, by transformers where there is no paceline; and configs of transformers 4 are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from paceline.models import Pretrained, read_index
from paceline.training.checkpoint import TrainState, export
from paceline.training.loop import Group
from tests.support.elsewhere import logits_elsewhere
from tests.support.hugging_face import FAMILIES, LLAMA3_ROPE, write_model

FILE_BYTES = 20_000  # several files of a model that has 100 kB
# Names in the files, as vLLM's loaders take them: its modules, with q_proj, k_proj and v_proj for
# qkv_proj, and gate_proj and up_proj for gate_up_proj (stacked_params_mapping). Sources, of
# vllm-project/vllm below vllm/model_executor/models: llama.py (0035bdf2), gpt_neox.py (002800f0),
# gemma3.py (004dc924), qwen3.py (002456df, with qwen2.py's Qwen2Model); mistral is its llama, and
# gemma and gemma2 are gemma3 without norms of queries and keys.
_ATTENTION = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
_MLP = [f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
_NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
_GEMMA2_NORMS = [*_NORMS, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]
_OF_HEADS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
_BIASES = [f"self_attn.{each}_proj.bias" for each in "qkv"]
_LLAMA = [*_ATTENTION, *_MLP, *_NORMS]
_NEOX = [
    f"{module}.{part}"
    for module in (
        "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "input_layernorm", "post_attention_layernorm",
    )
    for part in ("weight", "bias")
]  # fmt: skip
_OUTSIDE, _HEAD = ["model.embed_tokens.weight", "model.norm.weight"], ["lm_head.weight"]
# family → names beside the layers, of a layer, and where layers are; tied heads are not written
VLLM: dict[str, tuple[list[str], list[str], str]] = {
    "llama": (_OUTSIDE + _HEAD, _LLAMA, "model.layers"),
    "mistral": (_OUTSIDE + _HEAD, _LLAMA, "model.layers"),
    "qwen2": (_OUTSIDE, _LLAMA + _BIASES, "model.layers"),
    "qwen3": (_OUTSIDE + _HEAD, _LLAMA + _OF_HEADS, "model.layers"),
    "gemma": (_OUTSIDE, _LLAMA, "model.layers"),
    "gemma2": (_OUTSIDE, _ATTENTION + _MLP + _GEMMA2_NORMS, "model.layers"),
    "gemma3_text": (_OUTSIDE, _ATTENTION + _MLP + _GEMMA2_NORMS + _OF_HEADS, "model.layers"),
    "gpt_neox": (
        [
            "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight",
            "gpt_neox.final_layer_norm.bias", "embed_out.weight",
        ],
        _NEOX,
        "gpt_neox.layers",
    ),
}  # fmt: skip
TOKENS = list(range(3, 40))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """family → its export in several files, after a step of training, and logits of the model."""
    root, found = tmp_path_factory.mktemp("exported"), {}
    for family in FAMILIES:
        opened = Pretrained.open(write_model(family, root / family / "base"))
        model = opened.load()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.tensor([TOKENS])).logsumexp(-1).mean().backward()
        optimizer.step()
        into = root / family / "export"
        state = TrainState([model], optimizer, Group())
        export(state, None, into, pretrained=opened, file_bytes=FILE_BYTES)
        with torch.no_grad():
            found[family] = into, model(torch.tensor([TOKENS]))[0]
    return found


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_export_of_several_files_has_the_names_that_vllm_takes(
    exported: dict[str, tuple[Path, torch.Tensor]], family: str
) -> None:
    into, _ = exported[family]
    files = sorted(into.glob("*.safetensors"))
    assert len(files) > 3
    count = len(files)
    assert [each.name for each in files] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    held = {}
    for each in files:
        with safe_open(each, "np") as opened:
            held |= dict.fromkeys(opened.keys(), each.name)
        if len([name for name in held.values() if name == each.name]) > 1:
            assert each.stat().st_size <= FILE_BYTES, "a larger tensor has its own file"
    assert held == read_index(into), "the index names each tensor's file"
    outside, of_a_layer, layers = VLLM[family]
    wanted = {*outside, *(f"{layers}.{n}.{each}" for n in range(2) for each in of_a_layer)}
    assert set(held) == wanted


@pytest.mark.nightly
def test_transformers_gives_the_same_logits_where_there_is_no_paceline(
    exported: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    found = logits_elsewhere(tmp_path, TOKENS, *(into for into, _ in exported.values()))
    for (into, logits), elsewhere in zip(exported.values(), found, strict=True):
        assert torch.allclose(torch.tensor(elsewhere), logits, rtol=0, atol=1e-5), into


OLD_ROPE = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
# family → settings of the model, and how transformers 4 wrote what 5 calls otherwise
OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": OLD_ROPE}),
    "qwen2": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None, "use_sliding_window": False},
    ),
    "qwen3": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "gpt_neox": (
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        }},
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", list(OLD))
def test_a_config_of_transformers_4_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    settings, old = OLD[family]
    made = write_model(family, tmp_path, **settings)
    tokens_BT = torch.tensor([TOKENS])
    with torch.no_grad():
        wanted = Pretrained.open(made).load()(tokens_BT)
        default = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
        other = Pretrained.open(write_model(family, tmp_path / "other", **default)).load()
        assert not torch.allclose(other(tokens_BT), wanted, atol=1e-4), "these settings count"
    path = made / "config.json"
    config = json.loads(path.read_text())
    for new in ("rope_parameters", "dtype"):
        config.pop(new)
    config |= old | {
        "torch_dtype": "float32",
        "_name_or_path": "someone/model",
        "transformers_version": "4.41.0",
        "use_cache": True,
    }
    path.write_text(json.dumps(config))
    opened = Pretrained.open(made)
    opened.require_sound()
    with torch.no_grad():
        assert torch.equal(opened.load()(tokens_BT), wanted)
