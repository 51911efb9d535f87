"""Generated text is what transformers generates, ends at the model's stop, and repeats by seed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
import transformers

from paceline.errors import InvalidInput
from paceline.evaluation import TextModel, generate
from paceline.models import config_for, new_model, save_model
from paceline.schemas import schema_text
from tests.support.command import paceline
from tests.support.hugging_face import FAMILIES, write_model, write_tokenizer

PROMPT = "line 7 of file → 3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    made = write_model("llama", tmp_path_factory.mktemp("model"), **changes)
    return write_tokenizer(made, [f"line {n} of file {n} is {n * n}" for n in range(200)])


def test_greedy_text_is_that_of_transformers(model: Path) -> None:
    said = "".join(generate(TextModel.open(model), PROMPT, max_tokens=20))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    asked = tokenizer("<|endoftext|>" + PROMPT, return_tensors="pt")
    made = theirs.generate(**asked, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    assert said == tokenizer.decode(made[asked["input_ids"].shape[1] :])
    assert said


def test_text_begins_with_the_token_that_the_tokenizer_adds(tmp_path: Path) -> None:
    """BOS ≠ EOS, as of Llama 3: the text is that of transformers' own two lines."""
    made = write_model("llama", tmp_path, vocab_size=300, bos_token_id=0, eos_token_id=1)
    write_tokenizer(made, [f"line {n} of file {n} is {n * n}" for n in range(200)], begin="<s>")
    said = "".join(generate(TextModel.open(made), PROMPT, max_tokens=20))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    asked = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    row = theirs.generate(**asked, max_new_tokens=20, do_sample=False, pad_token_id=1)[0]
    assert asked["input_ids"][0, 0] == tokenizer.bos_token_id == 0
    assert said == tokenizer.decode(row[asked["input_ids"].shape[1] :])
    assert said


def test_drawn_text_repeats_by_its_seed(model: Path) -> None:
    opened = TextModel.open(model)

    def drawn(seed: int) -> str:
        return "".join(generate(opened, PROMPT, max_tokens=12, temperature=1.0, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)
    nearly = generate(opened, PROMPT, max_tokens=12, temperature=1e-300)
    assert "".join(nearly) == "".join(generate(opened, PROMPT, max_tokens=12))


def test_it_ends_with_the_token_that_ends_documents(tmp_path: Path) -> None:
    """A model whose head prefers one token: it stops at once where that token ends a text."""
    made = write_model("llama", tmp_path, vocab_size=256, tie_word_embeddings=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        loaded.lm_head.weight.copy_(torch.zeros_like(loaded.lm_head.weight))
        loaded.model.norm.weight.fill_(1.0)
    loaded.save_pretrained(made)  # all logits are equal: the first token wins, 0
    opened = TextModel.open(made)
    assert "".join(generate(opened, "a", max_tokens=5)) == "\0" * 5
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert list(generate(opened, "a", max_tokens=5)) == []


def test_the_command_prints_it_and_names_what_is_wrong(model: Path, tmp_path: Path) -> None:
    done = paceline(
        "generate", str(model), PROMPT, "--max-tokens", "20", PACELINE_STATE=str(tmp_path)
    )
    assert done.stdout == "".join(generate(TextModel.open(model), PROMPT, max_tokens=20)) + "\n"
    shown = json.loads(
        paceline("generate", str(model), PROMPT, "--max-tokens", "20", "--json").stdout
    )
    assert shown["text"] + "\n" == done.stdout
    jsonschema.validate(shown, json.loads(schema_text("generate")))
    wrong = paceline("generate", "nowhere", PROMPT)
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1
    assert "no model here" in wrong.stderr


def test_a_prompt_or_seed_that_cannot_be_read_is_one_line(model: Path) -> None:
    with pytest.raises(InvalidInput, match="not UTF-8"):
        next(generate(TextModel.open(model), "caf\udce9", max_tokens=2))
    wrong = paceline("generate", str(model), PROMPT, "--seed", str(2**70))
    assert wrong.returncode == 2
    assert "--seed" in wrong.stderr


def test_our_own_model_answers_in_bytes(tmp_path: Path) -> None:
    config = config_for(20_000, 32)
    save_model(new_model(config, 3), config, tmp_path)
    assert "".join(generate(TextModel.open(tmp_path), "x" * 100, max_tokens=4))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="not safetensors"):
        TextModel.open(tmp_path)


@pytest.mark.parametrize("family", ["ours", *FAMILIES])
def test_kept_keys_and_values_change_no_token(family: str, tmp_path: Path) -> None:
    """As the whole row computed anew for each token, also beyond the context; each token once."""
    if family == "ours":
        config = config_for(60_000, 32)
        ours = new_model(config, 3)
        with torch.no_grad():  # far from 0, so that attention counts
            for each in ours.parameters():
                each.mul_(4.0 if each.ndim > 1 else 1.0)
        save_model(ours, config, tmp_path)
    else:
        write_model(family, tmp_path, max_position_embeddings=32)
    model = TextModel.open(tmp_path)
    assert model.context == 32
    row = torch.randint(model.vocabulary, (40,), generator=torch.Generator().manual_seed(1))
    lengths: list[int] = []
    next_logits = model.decoder()
    for length in (3, *range(8, 41)):
        counting = model.network.register_forward_pre_hook(
            lambda _, given: lengths.append(given[0].shape[1])
        )
        logits_V = next_logits(row[:length].tolist())
        counting.remove()
        with torch.inference_mode():
            wanted_V = model.forward(row[None, max(0, length - 32) : length])[0, -1]
        torch.testing.assert_close(logits_V, wanted_V, rtol=1e-4, atol=1e-4)
        assert logits_V.argmax() == wanted_V.argmax()
    assert lengths == [3, 5, *[1] * 24, *[32] * 8]
