"""What transformers loads without a word is accepted, and another architecture refused: by the
headers alone, as on a control host without torch, and by ``Pretrained``, which builds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from paceline.errors import InvalidInput
from paceline.models import Pretrained, read_index, require_described, require_tensors
from paceline.training.checkpoint import TrainState, export
from paceline.training.loop import Group
from tests.support.hugging_face import (
    FAMILIES,
    SHAPE,
    change_config,
    change_weights,
    write_model,
)


def checked(directory: Path) -> Pretrained:
    """The model, after all that a job's submission, its check and its ranks compare."""
    require_described(directory, 32, "", 256)
    require_tensors(directory, None)
    found = Pretrained.open(directory)
    found.require_sound()
    return found


def add_buffers(tensors: dict[str, torch.Tensor]) -> None:
    """What older versions of transformers wrote beside the weights of each layer."""
    is_neox = any(name.startswith("gpt_neox.") for name in tensors)
    for number in range(SHAPE["num_hidden_layers"]):
        at = (
            f"gpt_neox.layers.{number}.attention" if is_neox else f"model.layers.{number}.self_attn"
        )
        tensors[f"{at}.rotary_emb.inv_freq"] = torch.ones(4)
        if is_neox:
            tensors[f"{at}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
            tensors[f"{at}.masked_bias"] = torch.tensor(-1e9)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_buffers_of_older_exports_are_neither_read_nor_exported(
    family: str, tmp_path: Path
) -> None:
    made = write_model(family, tmp_path / "made", dtype=torch.float16)
    plain = Pretrained.open(made).load()
    names = set(load_file(made / "model.safetensors"))
    change_weights(made, add_buffers)
    opened = checked(made)
    model = opened.load()
    tokens_BT = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens_BT), plain(tokens_BT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens_BT).logsumexp(-1).mean().backward()
    optimizer.step()
    into = tmp_path / "export"
    export(TrainState([model], optimizer, Group()), None, into, pretrained=opened)
    assert set(read_index(into)) == names


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("kept", ["embedding", "head"])
def test_a_tied_weight_may_be_stored_under_either_name(
    family: str, kept: str, tmp_path: Path
) -> None:
    made = write_model(family, tmp_path, tie_word_embeddings=True)
    ends = ("gpt_neox.embed_in", "embed_out") if family == "gpt_neox" else (
        "model.embed_tokens", "lm_head",
    )  # fmt: skip

    def store(tensors: dict[str, torch.Tensor]) -> None:
        found = [tensors.pop(f"{each}.weight", None) for each in ends]
        tensors[f"{ends[kept == 'head']}.weight"] = next(each for each in found if each is not None)

    with torch.no_grad():
        wanted = Pretrained.open(made).load()(torch.arange(20)[None])
        change_weights(made, store)
        assert torch.equal(checked(made).load()(torch.arange(20)[None]), wanted)


def test_an_untied_model_without_its_head_is_refused_without_torch(tmp_path: Path) -> None:
    made = write_model("llama", tmp_path, tie_word_embeddings=False)
    change_weights(made, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(InvalidInput, match=r"lack tensors.*got lm_head\.weight"):
        require_tensors(made, None)


# weights of → under the config of, and the first tensor that it does not have, or lacks
OTHERS = {
    "qwen3": ("llama", "have unknown", "model.layers.0.self_attn.k_norm.weight"),
    "qwen2": ("llama", "have unknown", "model.layers.0.self_attn.k_proj.bias"),
    "gemma2": ("gemma", "have unknown", "model.layers.0.post_feedforward_layernorm.weight"),
    "gemma3_text": ("gemma2", "have unknown", "model.layers.0.self_attn.k_norm.weight"),
    "llama": ("qwen3", "lack", "model.layers.0.self_attn.q_norm.weight"),
}


@pytest.mark.parametrize("family", list(OTHERS))
def test_weights_of_another_architecture_are_refused_without_torch(
    family: str, tmp_path: Path
) -> None:
    other, what, name = OTHERS[family]
    made = write_model(family, tmp_path)
    change_config(made, model_type=other)
    with pytest.raises(InvalidInput, match=f"weights {what} tensors.*got {name}"):
        require_tensors(made, None)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_that_the_config_names_are_known(changes: dict[str, Any], tmp_path: Path) -> None:
    checked(write_model("llama", tmp_path, **changes))


@pytest.mark.parametrize("is_by_kind_of_layer", [False, True])
def test_longrope_rows_stay_within_the_original_window(
    is_by_kind_of_layer: bool, tmp_path: Path
) -> None:
    """Beyond it all positions turn otherwise, as soon as one document of a batch is longer."""
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    if is_by_kind_of_layer:
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        made = write_model("gemma3_text", tmp_path)
        change_config(made, rope_parameters={"full_attention": rope, "sliding_attention": plain})
    else:
        made = write_model("llama", tmp_path, rope_parameters=rope)
        checked(made).require_trainable(32, "", 256)
        with pytest.raises(InvalidInput, match=r"at most 32 \(original_max_position"):
            Pretrained.open(made).require_trainable(33, "", 256)
    require_described(made, 32, "", 256)
    with pytest.raises(InvalidInput, match=r"at most 32 .*longrope.*--set model\.context=32"):
        require_described(made, 33, "", 256)


def test_the_text_model_of_a_multimodal_gemma_trains_as_the_refusal_says(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=SHAPE, vision_config=vision, mm_tokens_per_image=4
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(InvalidInput, match=r"not supported.*\.model\.language_model"):
        require_described(tmp_path / "whole", 32, "", 256)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    text = transformers.AutoModelForCausalLM.from_config(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.save_pretrained(tmp_path / "text")
    tokens_BT = torch.arange(20)[None]
    with torch.no_grad():
        mine = checked(tmp_path / "text").load()(tokens_BT)
        assert torch.equal(mine, whole.eval()(input_ids=tokens_BT).logits)


def test_a_model_without_a_head_trains_as_its_refusal_says(tmp_path: Path) -> None:
    made = write_model("qwen2", tmp_path / "made")
    transformers.AutoModel.from_pretrained(made).save_pretrained(tmp_path / "headless")
    kind = json.loads((tmp_path / "headless/config.json").read_text())["architectures"]
    assert kind == ["Qwen2Model"]
    with pytest.raises(InvalidInput, match=r"not a language model.*AutoModelForCausalLM"):
        require_described(tmp_path / "headless", 32, "", 256)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "headless")
    again.save_pretrained(tmp_path / "again")
    tokens_BT = torch.arange(20)[None]
    with torch.no_grad():
        wanted = Pretrained.open(made).load()(tokens_BT)
        assert torch.equal(checked(tmp_path / "again").load()(tokens_BT), wanted)
