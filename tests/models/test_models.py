"""The transformer, its one dial, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CorruptData, InvalidInput, SourceMissing
from paceline.models import (
    ModelConfig,
    attention,
    config_for,
    count_parameters,
    load_model,
    new_model,
    read_config,
    require_tokenizer,
    save_model,
    weights_digest,
)

TINY = config_for(50_000, 32)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def grouped() -> ModelConfig:
    return TINY.model_copy(update=HEADS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(new_model(TINY, 0), TINY, tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("parameters", "vocabulary"),
    [
        (50_000, 256),
        (200_000, 256),
        (2_000_000, 256),
        (10**8, 256),
        (10**9, 32_000),
        (7 * 10**10, 32_000),
    ],
)
def test_one_dial_comes_within_an_eighth_of_its_size(parameters: int, vocabulary: int) -> None:
    config = config_for(parameters, 256, vocabulary, tied=vocabulary == 256)
    assert abs(count_parameters(config) / parameters - 1) < 0.125
    assert config.context == 256


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"parameters": 1, "context": 32}, "model size"),
        ({"parameters": 10**12, "context": 32}, "model size"),
        ({"parameters": 50_000, "context": 1}, "context too short"),
        ({"parameters": 100_000, "context": 32, "vocabulary": 200_000}, "vocabulary is too large"),
        ({"parameters": 20_000, "context": 32, "parts": 8}, "20000 parameters, 8 parts"),
    ],
)
def test_sizes_that_no_model_has_are_refused(shape: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        config_for(**shape)


def test_parameter_count_is_exact() -> None:
    for config in (TINY, grouped()):
        assert sum(p.numel() for p in new_model(config, 0).parameters()) == count_parameters(config)


def test_a_prediction_never_sees_the_future() -> None:
    model = new_model(grouped(), 0)
    tokens_BT = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20:] = 7
    before, after = model(tokens_BT), model(changed_BT)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_the_same_seed_gives_the_same_bits_whatever_the_global_rng() -> None:
    torch.manual_seed(1)
    first = new_model(TINY, 3).state_dict()
    torch.manual_seed(2)
    second = new_model(TINY, 3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["model.embed_tokens.weight"],
        new_model(TINY, 4).state_dict()["model.embed_tokens.weight"],
    )


def test_a_saved_model_comes_back_bit_for_bit_and_saves_to_the_same_bytes(
    saved: Path, tmp_path: Path
) -> None:
    model, config = load_model(saved)
    original = new_model(TINY, 0)
    tokens_BT = torch.arange(32)[None]
    assert config == TINY == read_config(saved)
    assert torch.equal(model(tokens_BT), original(tokens_BT))
    save_model(model, config, tmp_path / "again")
    assert weights_digest(tmp_path / "again") == weights_digest(saved)
    for path in saved.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_one_changed_block_changes_one_file(saved: Path, tmp_path: Path) -> None:
    model, config = load_model(saved)
    with torch.no_grad():
        model.model.layers["1"].mlp.up_proj.weight.add_(1.0)
    save_model(model, config, tmp_path / "next")
    changed = [
        path.name
        for path in sorted(saved.glob("*.safetensors"))
        if path.read_bytes() != (tmp_path / "next" / path.name).read_bytes()
    ]
    assert len(changed) == 1
    assert weights_digest(tmp_path / "next") != weights_digest(saved)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = new_model(TINY, 0)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(InvalidInput, match="not finite"):
        save_model(model, TINY, tmp_path / "bad")
    assert not list((tmp_path / "bad").glob("*.safetensors"))


def test_pickled_weights_are_refused(saved: Path) -> None:
    torch.save({"a": torch.ones(1)}, saved / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="not safetensors"):
        load_model(saved)


def drop_tensor(directory: Path) -> None:
    path = min(directory.glob("*.safetensors"))
    state = load_file(path)
    state.pop("model.norm.weight")
    save_file(state, path)


def change_shape(directory: Path) -> None:
    path = min(directory.glob("*.safetensors"))
    save_file(load_file(path) | {"model.norm.weight": torch.ones(3)}, path)


def change_dtype(directory: Path) -> None:
    path = min(directory.glob("*.safetensors"))
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


def truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])


def remove_file(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{]")


@pytest.mark.parametrize(
    "damage", [drop_tensor, change_shape, change_dtype, truncate, remove_file, break_config]
)
def test_weights_that_do_not_fit_their_config_are_refused(saved: Path, damage) -> None:
    damage(saved)
    with pytest.raises(CorruptData):
        load_model(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 33), ("vocab_size", 1), ("model_type", "gpt2"), ("odd", 1)],
)
def test_a_config_of_another_kind_is_refused_and_the_key_named(saved: Path, key, value) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(InvalidInput, match="model config"):
        load_model(saved)


def test_an_index_cannot_reach_outside_its_directory(saved: Path) -> None:
    path = saved / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../evil.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="index names"):
        load_model(saved)


def test_a_missing_model_error_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match="nowhere"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceMissing):
        weights_digest(tmp_path / "empty")


def test_documents_packed_into_a_row_do_not_see_each_other() -> None:
    model = new_model(grouped(), 0)
    one, two = torch.arange(12)[None], torch.arange(100, 120)[None]
    packed_BT = torch.cat([one, two], dim=1)
    documents_BT = torch.tensor([[0] * 12 + [1] * 20])
    positions_BT = torch.cat([torch.arange(12), torch.arange(20)])[None]
    logits_BTV = model(packed_BT, positions_BT, documents_BT)
    for alone, found in ((model(one), logits_BTV[:, :12]), (model(two), logits_BTV[:, 12:])):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    # Without the mask the second document sees the first: the comparison can fail.
    leaking = model(packed_BT, positions_BT)[:, 12:]
    assert not torch.allclose(leaking, model(two), atol=1e-4)


def packed(*rows: list[int]) -> torch.Tensor:
    """Documents of these lengths; the last of each row is padding."""
    return torch.stack([
        torch.cat([torch.full((n,), i if i < len(row) - 1 else -1) for i, n in enumerate(row)])
        for row in rows
    ])  # fmt: skip


def test_attention_by_document_learns_the_same_without_a_row_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents_BT = packed([90, 60, 3, 2, 4, 30, 1, 2], [192], [1] * 191 + [1])
    assert isinstance(attention.attention_scope(documents_BT), attention.DocumentSegments)
    tokens_BT = torch.arange(3 * 192).reshape(3, 192) * 7 % 256

    def learned() -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model = new_model(config_for(50_000, 192).model_copy(update=HEADS), 0).double()
        masks = 0

        def pack(kept: torch.Tensor) -> torch.Tensor:
            nonlocal masks
            masks += kept.shape[-2:] == (192, 192)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            logits_BTV = model(tokens_BT, None, documents_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].mT, tokens_BT[:, 1:])
        loss.backward()
        return loss, {name: each.grad for name, each in model.named_parameters()}, masks

    loss, gradients, masks = learned()
    monkeypatch.setattr(attention, "attention_scope", attention.document_mask)
    monkeypatch.setattr("paceline.models.transformer.attention_scope", attention.document_mask)
    wanted, wanted_gradients, masks_before = learned()
    assert (masks, masks_before > 0) == (0, True), "kept for the backward pass, in every layer"
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    for name, each in gradients.items():
        torch.testing.assert_close(each, wanted_gradients[name], rtol=1e-9, atol=1e-14)


def test_a_mask_is_made_where_it_is_cheaper_or_a_document_is_split() -> None:
    assert isinstance(attention.attention_scope(packed([30, 30, 4])), torch.Tensor), "one call does"
    two_places = packed([100, 100, 56])
    assert isinstance(attention.attention_scope(two_places), attention.DocumentSegments)
    two_places[0, 150:200] = 0
    assert isinstance(attention.attention_scope(two_places), torch.Tensor)
    assert isinstance(attention.attention_scope(packed([500, 500]).to("meta")), torch.Tensor)
    long = attention.attention_scope(packed([3000, 20, 20, 20, 5000, 132]))
    assert isinstance(long, attention.DocumentSegments)
    assert long.sizes == [[3000, 60, 5000, 132]]
    assert [each is None for each in long.masks[0]] == [True, False, True, True]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_attention_as_products_is_the_kernels(
    kinds: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(kinds)
    documents_BT = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 3 + [-1] * 4])
    mask_B1TT = attention.document_mask(documents_BT) if masked else None
    shapes = [(2, heads, 16, 8) for heads in (4, kinds, kinds, 4)]
    *given, weight = (torch.randn(each, generator=generator).bfloat16() for each in shapes)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in given]
        out = attention.attend(*inputs, mask_B1TT)
        torch.autograd.backward((out * weight).sum())
        return [each.detach().float() for each in (out, *(one.grad for one in inputs))]

    exact, products = run(torch.float32), run(torch.bfloat16)
    monkeypatch.setattr(attention, "MOST_SCORES", 0)
    kernel = run(torch.bfloat16)
    assert any(not torch.equal(a, b) for a, b in zip(products, kernel, strict=True)), "another way"
    for one, other, wanted in zip(products, kernel, exact, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0.02, atol=0.03)
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.03)


def test_padding_gives_numbers_and_changes_nothing_before_it() -> None:
    model = new_model(TINY, 0)
    tokens_BT = torch.arange(16)[None]
    documents_BT = torch.tensor([[0] * 10 + [-1] * 6])
    logits_BTV = model(tokens_BT, None, documents_BT)
    assert torch.isfinite(logits_BTV).all()
    torch.testing.assert_close(logits_BTV[:, :10], model(tokens_BT[:, :10]), rtol=1e-5, atol=1e-6)


def test_positions_go_on_past_the_context_and_only_distances_count() -> None:
    model = new_model(TINY, 0)
    tokens_BT = torch.arange(32)[None]
    near, far = torch.arange(32)[None], torch.arange(1000, 1032)[None]
    assert torch.equal(model(tokens_BT, near), model(tokens_BT))
    torch.testing.assert_close(model(tokens_BT, far), model(tokens_BT), rtol=1e-3, atol=1e-5)
    stretched = 3 * near
    assert not torch.allclose(model(tokens_BT, stretched), model(tokens_BT), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_one_after_another_are_the_model_and_keep_its_names(tied: bool) -> None:
    config = config_for(80_000, 32, 300, tied=tied)
    model = new_model(config, 0)
    first = model.stage(range(1), embedding=True, head=False)
    last = model.stage(range(1, config.num_hidden_layers), embedding=False, head=True)
    tokens_BT = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    assert torch.equal(last(first(tokens_BT)), model(tokens_BT))
    whole = dict(model.named_parameters())
    parts = [*first.named_parameters(), *last.named_parameters()]
    assert {name for name, _ in parts} == set(whole)
    assert all(parameter is whole[name] for name, parameter in parts)
    twice = {name for name, _ in first.named_parameters()} & {
        name for name, _ in last.named_parameters()
    }
    assert twice == ({"model.embed_tokens.weight"} if tied else set())


@pytest.mark.parametrize("tied", [True, False])
def test_any_vocabulary_is_saved_and_loaded(tied: bool, tmp_path: Path) -> None:
    config = config_for(200_000, 32, 1000, tied=tied, separator=999, tokenizer_digest="ab" * 32)
    model = new_model(config, 0)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)
    assert ("lm_head.weight" in model.state_dict()) is not tied
    save_model(model, config, tmp_path)
    loaded, found = load_model(tmp_path)
    assert found == config
    assert found.separator == 999
    tokens_BT = torch.tensor([[999, 0, 500]])
    assert torch.equal(loaded(tokens_BT), model(tokens_BT))


def test_a_config_written_before_there_were_tokenizers_still_loads(saved: Path) -> None:
    text = (saved / "config.json").read_text()
    assert "tokenizer" not in text  # byte-level configs are what other tools write, no more
    assert read_config(saved).tokenizer_digest == ""


def test_data_of_another_tokenizer_is_refused() -> None:
    mine, other = "ab" * 32, "cd" * 32
    config = config_for(200_000, 32, 1000, tokenizer_digest=mine)
    require_tokenizer(config, mine, 1000)
    require_tokenizer(TINY, "", 256)
    for digest, vocabulary in ((other, 1000), ("", 256), (mine, 1001)):
        with pytest.raises(InvalidInput, match="token"):
            require_tokenizer(config, digest, vocabulary)


def test_training_after_scoring_still_works() -> None:
    model = new_model(TINY, 0)
    with torch.inference_mode():
        model(torch.arange(8)[None])
    model(torch.arange(8)[None]).sum().backward()
    assert model.model.norm.weight.grad is not None


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_model_to_be_cut_has_heads_and_widths_for_each_part(parts: int) -> None:
    for parameters in (500_000, 2_000_000, 10_000_000, 1_000_000_000):
        config = config_for(parameters, 256, parts=parts)
        assert abs(count_parameters(config) / parameters - 1) < 0.35
        assert config.num_attention_heads % parts == 0
        assert config.num_key_value_heads % parts == 0
        assert config.intermediate_size % parts == 0
        deep = config_for(parameters, 256, stages=parts)
        assert abs(count_parameters(deep) / parameters - 1) < 0.35
        assert deep.num_hidden_layers >= parts
