"""A directory that transformers wrote is checked by name before it is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.errors import PacelineError, PermanentError
from paceline.models import Pretrained, config_for, is_pretrained, new_model, save_model
from paceline.training.checkpoint import TrainState, export
from paceline.training.loop import Group
from tests.support.hugging_face import write_model, write_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("written")
    return {family: write_model(family, root / family) for family in ("llama", "qwen2")}


def configured(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weighted(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def indexed(directory: Path) -> None:
    """An index that names a file that is not there."""
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.norm.weight"
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "code of its own": (
        "llama",
        configured(auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
        "trust_remote_code",
    ),
    "an unknown family": ("llama", configured(model_type="bert"), "model_type 'bert'"),
    "a classifier": (
        "llama",
        configured(architectures=["LlamaForSequenceClassification"]),
        "not a language model",
    ),
    "quantised": ("llama", configured(quantization_config={"bits": 4}), "quantised"),
    "another shape": ("llama", configured(intermediate_size=128), "another shape"),
    "another depth": ("llama", configured(num_hidden_layers=3), "model.layers.2"),
    "an impossible config": ("llama", configured(num_attention_heads="x"), "config"),
    "an unknown activation": (
        "llama",
        configured(hidden_act="nonsense"),
        "not acceptable: got hidden_act = 'nonsense'",
    ),
    "unknown rotary positions": (
        "llama",
        configured(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
        "rope_parameters.rope_type = 'nonsense'",
    ),
    "pickled": ("llama", lambda path: (path / "pytorch_model.bin").touch(), "pytorch_model.bin"),
    "only a slow tokenizer": (
        "llama",
        lambda path: (path / "vocab.json").touch(),
        "tokenizer.json",
    ),
    "a missing weight": ("llama", weighted(lambda t: t.pop(NORM)), f"got {NORM}"),
    "an unknown weight": (
        "llama",
        weighted(lambda t: t.update({"model.extra": torch.ones(2)})),
        "got model.extra",
    ),
    "mixed dtypes": (
        "llama",
        weighted(lambda t: t.update({NORM: t[NORM].bfloat16()})),
        f"{NORM} BF16",
    ),
    "integers": (
        "llama",
        weighted(lambda t: t.update({k: v.to(torch.int8) for k, v in t.items()})),
        "I8",
    ),
    "NaN": (
        "llama",
        weighted(lambda t: t[NORM][3:4].fill_(torch.nan)),
        f"NaN or infinity in {NORM}",
    ),
    "tied weights that differ": (
        "qwen2",
        weighted(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "tied weights differ",
    ),
    "a lost file": ("llama", indexed, "model-00002-of-00002.safetensors"),
    "cut short": ("llama", lambda path: (path / WEIGHTS).write_bytes(b"\x10\0\0"), WEIGHTS),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_directory_that_cannot_be_trained_is_refused_in_one_line(written, tmp_path, name) -> None:
    family, spoil, words = BAD[name]
    directory = tmp_path / "model"
    shutil.copytree(written[family], directory)
    spoil(directory)
    with pytest.raises(PacelineError) as caught:
        Pretrained.open(directory).require_sound()
    assert words in caught.value.one_line()
    assert "\n" not in caught.value.one_line()
    assert isinstance(caught.value, PermanentError), "never tried again"


def test_tied_weights_may_be_written_twice(written, tmp_path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(written["qwen2"], directory)
    weighted(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(
        directory
    )
    found = Pretrained.open(directory)
    found.require_sound()
    assert found.parameters == Pretrained.open(written["qwen2"]).parameters


def test_what_a_trainer_resumes_by_is_not_weights(written, tmp_path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(written["llama"], directory)
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        (directory / name).write_bytes(b"pickled")
    (tmp_path / "copy").mkdir()
    Pretrained.open(directory).copy(tmp_path / "copy")
    assert {each.name for each in (tmp_path / "copy").iterdir()} == {
        "config.json", "generation_config.json", WEIGHTS,
    }  # fmt: skip


def test_our_own_exports_stay_our_own(written, tmp_path) -> None:
    config = config_for(20_000, 32)
    save_model(new_model(config, 0), config, tmp_path)
    assert not is_pretrained(tmp_path)
    assert is_pretrained(written["llama"])


def test_rows_and_tokens_must_fit_the_model(written, tmp_path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(written["llama"], directory)
    bare = Pretrained.open(directory)
    bare.require_trainable(64, "", 256)
    with pytest.raises(PacelineError, match="rows are longer"):
        bare.require_trainable(65, "", 256)
    with pytest.raises(PacelineError, match="more tokens than the model"):
        bare.require_trainable(64, "", 257)
    write_tokenizer(directory, ["some text of this test"])
    with pytest.raises(PacelineError, match="different tokenizers"):
        Pretrained.open(directory).require_trainable(64, "", 256)


def test_files_in_halves_are_loaded_in_float32(tmp_path) -> None:
    """Their weights are exact in float32; products in bfloat16 would be other figures."""
    directory = write_model("llama", tmp_path, dtype=torch.bfloat16)
    ours = Pretrained.open(directory).load()
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert {each.dtype for each in ours.parameters()} == {torch.float32}
    tokens_BT = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.allclose(ours(tokens_BT), theirs(tokens_BT).logits, atol=1e-5)


def test_transformers_reads_an_export_in_the_dtype_that_was_named(written, tmp_path) -> None:
    pretrained = Pretrained.open(written["llama"])
    model = pretrained.load()
    state = TrainState([model], torch.optim.SGD(model.parameters()), Group())
    into = tmp_path / "export"
    export(state, None, into, pretrained=pretrained, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(into)
    before = AutoModelForCausalLM.from_pretrained(pretrained.directory)
    assert (before.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    for name, weight in before.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.bfloat16())


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_a_piece_of_a_long_document_reads_in_a_packed_row_as_alone(
    tmp_path: Path, rope_type: str
) -> None:
    """Its positions run on past the model's; those of ``dynamic`` decide the frequencies."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 32
    model = Pretrained.open(write_model("llama", tmp_path, rope_parameters=rope)).load()
    pieces = torch.randint(256, (48,), generator=torch.Generator().manual_seed(1)).split([30, 18])
    positions_BT = torch.cat([torch.arange(1000, 1030), torch.arange(18)])[None]
    documents_BT = torch.tensor([[4] * 30 + [0] * 18])
    with torch.no_grad():
        packed_BTV = model(torch.cat(pieces)[None], positions_BT, documents_BT)
        alone_TV = torch.cat([model(each[None])[0] for each in pieces])
    torch.testing.assert_close(packed_BTV[0], alone_TV, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_documents_of_a_row_of_8192_tokens_read_as_alone(tmp_path: Path, family: str) -> None:
    """A full row; with sliding windows, too."""
    long = {"max_position_embeddings": 8192, "hidden_size": 16, "num_attention_heads": 2}
    heads = {"head_dim": 8, "num_key_value_heads": 1}
    model = Pretrained.open(write_model(family, tmp_path, **long, **heads)).load()
    sizes = [5000, 3000, 192]
    pieces = torch.randint(256, (8192,), generator=torch.Generator().manual_seed(1)).split(sizes)
    positions_BT = torch.cat([torch.arange(size) for size in sizes])[None]
    documents_BT = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]
    with torch.no_grad():
        packed_BTV = model(torch.cat(pieces)[None], positions_BT, documents_BT)
        alone_TV = torch.cat([model(each[None])[0] for each in pieces])
    torch.testing.assert_close(packed_BTV[0], alone_TV, rtol=1e-3, atol=1e-3)
