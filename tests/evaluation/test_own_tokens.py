"""Models are scored in their own tokens: the same bits as a plain loop over transformers' model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from paceline.config import EvaluationSettings
from paceline.data import Conversation, Document, open_tokenizer
from paceline.errors import InvalidInput, InvalidSnapshot
from paceline.evaluation import (
    HeldOutDocument,
    TextModel,
    as_markdown,
    choose_conversations,
    choose_prefixes,
    generate,
    score_models,
    score_transformer,
)
from paceline.models import config_for, new_model, save_model
from tests.support.hugging_face import write_model, write_tokenizer

TEXTS = [
    "".join(f"line {n} of file {number} is {n * number} ÄÖ→\n" for n in range(12)).encode()
    for number in range(6)
]


def documents_of(texts: list[bytes]) -> list[HeldOutDocument]:
    return [HeldOutDocument(str(number), each, len(each)) for number, each in enumerate(texts)]


def silent(_fraction: float) -> None:
    pass


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json trained on the texts."""
    made = write_tokenizer(tmp_path_factory.mktemp("words"), [each.decode() for each in TEXTS])
    return made / "tokenizer.json"


@pytest.fixture(params=["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest, words: Path, tmp_path: Path) -> Path:
    """Return a model of 64 positions, so that the texts take several windows."""
    made = write_model(request.param, tmp_path / "model", vocab_size=310)
    (made / "tokenizer.json").write_bytes(words.read_bytes())
    return made


def plain_bits(directory: Path, tokenizer: Path, texts: list[bytes]) -> list[float]:
    """Return of each text Σ −log2 p of the tokens, each from the separator and all before it in its
    window."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    encoded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    separator = encoded.convert_tokens_to_ids("<|endoftext|>")
    rows = (encoded(text.decode(), add_special_tokens=False)["input_ids"] for text in texts)
    return [_bits(model, [separator, *ids], ids) for ids in rows]


def _bits(model: torch.nn.Module, row: list[int], ids: list[int]) -> float:
    context, total, done = 64, 0.0, 0
    while done < len(ids):
        end = min(len(ids), context if not done else done + 3 * context // 4)
        start = max(0, end - context)
        with torch.no_grad():
            logits = model(torch.tensor([row[start:end]])).logits[0]
        nats = F.cross_entropy(logits, torch.tensor(ids[start:end]), reduction="none")
        total += float(nats[done - start :].double().sum()) / np.log(2)
        done = end
    return total


def test_bits_are_those_of_a_plain_loop(model: Path, words: Path) -> None:
    found = score_transformer(model, documents_of(TEXTS), silent)
    wanted = plain_bits(model, words, TEXTS)
    assert found.bits == pytest.approx(wanted, rel=1e-5)
    tokens = open_tokenizer(str(words)).encode(TEXTS)
    assert found.tokens == sum(map(len, tokens)) < sum(map(len, TEXTS)) / 1.5
    assert (found.dtype, found.format) == ("float32", "safetensors")


def test_a_text_begins_with_the_token_that_the_tokenizer_adds(tmp_path: Path) -> None:
    """BOS ≠ EOS, as of Llama 3: the bits are the loss of transformers' own ``tokenizer(text)``."""
    made = write_model("llama", tmp_path, vocab_size=310, bos_token_id=0, eos_token_id=1)
    write_tokenizer(made, [each.decode() for each in TEXTS], begin="<|begin_of_text|>")
    text = TEXTS[1][:60]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    ids = tokenizer(text.decode(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        mean = transformers.AutoModelForCausalLM.from_pretrained(made)(ids, labels=ids).loss
    found = score_transformer(made, documents_of([text]), silent)
    assert found.tokens == ids.shape[1] - 1
    assert found.bits[0] == pytest.approx(found.tokens * float(mean) / np.log(2), rel=1e-5)


def test_a_separator_above_255_is_the_token_that_it_is(words: Path, tmp_path: Path) -> None:
    """The last one of the vocabulary, as Qwen has it."""
    made = tokenizers.Tokenizer.from_str(words.read_text().replace("<|endoftext|>", "<|other|>"))
    made.add_special_tokens(["<|endoftext|>"])
    model = write_model("llama", tmp_path / "model", vocab_size=310)
    made.save(str(model / "tokenizer.json"))
    separator = made.token_to_id("<|endoftext|>")
    assert TextModel.open(model).separator == separator > 255
    found = score_transformer(model, documents_of(TEXTS[:3]), silent)
    wanted = plain_bits(model, model / "tokenizer.json", TEXTS[:3])
    assert found.bits == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("single", "first"),
    [("<s> $A", 1), ("<s> $A </s>", 1), ("$A </s>", None), ("$A", None)],
)
def test_the_first_token_is_the_one_before_the_text(
    words: Path, tmp_path: Path, single: str, first: int | None
) -> None:
    made = tokenizers.Tokenizer.from_file(str(words))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).first == first
    assert open_tokenizer(str(words)).first is open_tokenizer("bytes").first is None


def test_figures_of_tokens_are_those_of_a_plain_loop(model: Path, words: Path) -> None:
    """One window a text: perplexity, accuracy, and ten bins of certainty, by hand."""
    texts = [text[:60].decode(errors="ignore").encode() for text in TEXTS]
    report = score_models(
        {"candidate": model},
        documents_of(texts),
        lambda: texts,
        EvaluationSettings(bootstrap_samples=100),
        snapshot_digest="0" * 64,
        on_progress=lambda *_: None,
    )
    score = report.score("candidate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    encoded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(words))
    best, right, nats = [], [], []
    for text in texts:
        ids = encoded(text.decode(), add_special_tokens=False)["input_ids"]
        row = torch.tensor([[encoded.convert_tokens_to_ids("<|endoftext|>"), *ids]])
        with torch.no_grad():
            p_TV = theirs(row[:, :-1]).logits[0].softmax(-1)
        best.append(p_TV.max(-1).values)
        right.append(p_TV.argmax(-1) == row[0, 1:])
        nats.append(-p_TV.gather(1, row[0, 1:, None]).log()[:, 0])
    best_N, right_N, nats_N = (torch.cat(each).double().numpy() for each in (best, right, nats))
    of = np.minimum((best_N * 10).astype(int), 9)
    apart = sum(abs((right_N - best_N)[of == each].sum()) for each in range(10)) / len(best_N)
    assert score is not None
    assert score.tokens == len(best_N)
    assert score.perplexity == pytest.approx(float(np.exp(nats_N.mean())), rel=1e-5)
    assert score.token_accuracy == pytest.approx(right_N.mean())
    assert score.calibration_error == pytest.approx(apart, abs=2e-6)
    assert "calibration error" in as_markdown(report)
    assert report.score("gzip").perplexity is None  # type: ignore[union-attr]


def test_our_model_reads_the_datas_tokens_and_not_bytes(words: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(words))
    vocabulary = tokenizer.vocabulary
    config = config_for(
        60_000,
        32,
        vocabulary.vocab_size,
        separator=vocabulary.separator,
        tokenizer_digest=tokenizer.digest,
    )
    save_model(new_model(config, seed=1), config, tmp_path)
    with pytest.raises(InvalidInput, match="different tokenizers"):
        score_transformer(tmp_path, documents_of(TEXTS), silent)  # a tokenizer that is nowhere
    lent = score_transformer(tmp_path, documents_of(TEXTS), silent, tokenizer)
    (tmp_path / "tokenizer.json").write_bytes(words.read_bytes())
    own = score_transformer(tmp_path, documents_of(TEXTS), silent)
    assert own.bits == pytest.approx(lent.bits)
    # A model that knows nothing needs log2(vocabulary) bits a token.
    assert own.bits.sum() / own.tokens == pytest.approx(np.log2(vocabulary.vocab_size), rel=0.05)


@pytest.mark.parametrize(
    ("change", "words_of_error"),
    [
        ({"normalizer": {"type": "Lowercase"}, "text": b"UPPER"}, "does not keep the text"),
        ({"normalizer": {"type": "NFC"}, "text": "a\u0308bc".encode()}, ""),
        ({"text": b"\xff\xfe"}, "not UTF-8"),
    ],
)
def test_a_tokenizer_that_loses_text_is_named(
    words: Path, tmp_path: Path, change: dict[str, object], words_of_error: str
) -> None:
    model = write_model("llama", tmp_path / "model", vocab_size=310)
    text = change.pop("text")
    assert isinstance(text, bytes)
    (model / "tokenizer.json").write_text(json.dumps(json.loads(words.read_text()) | change))
    if not words_of_error:
        assert score_transformer(model, documents_of([text]), silent).tokens > 0
        return
    with pytest.raises(InvalidInput, match=words_of_error):
        score_transformer(model, documents_of([text]), silent)


def test_a_first_space_may_be_lost_and_a_prompt_may_lose_more(tmp_path: Path) -> None:
    """A tokenizer of Mistral's layout, which puts a space before a text that has none."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = write_model("mistral", tmp_path, vocab_size=400, bos_token_id=1, eos_token_id=2)
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    special = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator([each.decode() for each in TEXTS], trainer)
    made.save(str(model / "tokenizer.json"))
    found = score_transformer(model, documents_of([b"line 7", b" line 7", b"  line 7"]), silent)
    assert found.bits[0] == pytest.approx(found.bits[1])
    assert found.bits[2] > found.bits[1], "the other spaces are predicted"
    opened = TextModel.open(model)
    said = ["".join(generate(opened, text, max_tokens=4)) for text in ("line 7", " line 7")]
    assert said[0] == said[1]
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.save(str(model / "tokenizer.json"))
    assert "".join(generate(TextModel.open(model), "LINE 7", max_tokens=4)) == said[0]


def test_a_prefix_does_not_cut_a_character() -> None:
    (found,) = choose_prefixes([("a", "→".encode() * 2000)], 1024)
    assert found.text == "→".encode() * 341
    (raw,) = choose_prefixes([("a", b"\x80" * 2000)], 1024)
    assert len(raw.text) == 1024, "bytes that are no text are cut anywhere"


def test_of_conversations_the_labels_of_a_plain_loop_are_scored(model: Path, words: Path) -> None:
    ids = np.arange(40, 100, dtype=np.uint32) % 50
    mask = np.arange(60) % 20 >= 12
    chat = HeldOutDocument("chat", b"x" * 24, 24, Conversation(ids, mask))
    found = score_transformer(model, [chat], silent, open_tokenizer(str(words)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    labels = torch.from_numpy(np.where(mask, ids.astype(np.int64), -100)[None])
    with torch.no_grad():
        mean = plain(torch.from_numpy(ids.astype(np.int64)[None]), labels=labels).loss
    assert found.tokens == mask.sum() == 24
    assert found.bits[0] == pytest.approx(24 * float(mean) / np.log(2), rel=1e-5)
    with pytest.raises(InvalidInput, match="tokens of another tokenizer"):
        score_transformer(model, [chat], silent, open_tokenizer("bytes"))


def test_conversations_are_chosen_whole_and_within_the_budget() -> None:
    read = [Document(f"{n}", b"y" * (n % 7)) for n in range(40)]
    chosen = choose_conversations(read, 30)
    assert 20 < sum(len(each.text) for each in chosen) <= 30
    assert all(len(each.text) == int(each.path) % 7 > 0 for each in chosen)
    assert len(choose_conversations(read, 1)) == 1
    with pytest.raises(InvalidSnapshot, match="nothing is held out"):
        choose_conversations(read[:1], 30)
