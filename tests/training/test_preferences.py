"""Direct preference optimisation: losses and gradients of a plain loop, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.config import TrainingSettings
from paceline.data import assign_splits
from paceline.errors import InvalidInput
from paceline.training.parallel import MeshSpec, require_layout
from tests.support.carried_state import BYTE_GRU
from tests.support.hugging_face import CHATML, write_model, write_tokenizer
from tests.training.warm import typed

pytestmark = [pytest.mark.timeout(200), pytest.mark.xdist_group("warm node")]
STEPS = 3
CONTEXT = 128
BETA = 0.3
ANSWERS = ("chosen", "rejected")
LORA = {"r": 4, "lora_alpha": 12}


def rows() -> list[dict[str, Any]]:
    """Pairs of answers of different lengths, texts and lists of messages."""
    found: list[dict[str, Any]] = []
    for number in range(24):
        row = {
            "prompt": f"what is {number} + {number}?",
            "chosen": f"it is {2 * number}",
            "rejected": "I think " * (number % 4) + f"{3 * number + 1}",
        }
        if number % 2:
            row = {
                name: [
                    {"role": "user" if name == "prompt" else "assistant", "content": each}
                ]
                for name, each in row.items()
            }  # fmt: skip
        found.append({"key": f"row-{number}", **row})
    return found


def messages_of(row: dict[str, Any], answer: str) -> tuple[list[Any], list[Any]]:
    prompt, said = row["prompt"], row[answer]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        said = [{"role": "assistant", "content": said}]
    return prompt, said


def score(model: Any, tokenizer: Any, row: dict[str, Any], answer: str) -> torch.Tensor:
    """The log-probability of an answer, as a user of transformers computes it."""
    prompt, said = messages_of(row, answer)
    head = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(prompt + said, tokenize=False)
    before = len(tokenizer(head)["input_ids"])
    ids = torch.tensor([tokenizer(whole)["input_ids"]])
    logits = model(input_ids=ids).logits[0, before - 1 : -1]
    answered = ids[0, before:]
    return F.log_softmax(logits, -1).gather(1, answered[:, None]).sum()


def plain_loop(directory: Path, rates: list[float], lora: bool) -> list[dict[str, float]]:
    """The figures of each step: every pair by itself, averaged over the pairs."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what peft reads
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in learnt if each.ndim >= 2]},
            {"params": [each for each in learnt if each.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    held_out = assign_splits([each["key"] for each in rows()], 0.1, 0)
    pairs = [each for each in rows() if each["key"] not in held_out]
    steps = []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        found = dict.fromkeys(("loss", "reward_chosen", "reward_rejected", "reward_accuracy"), 0.0)
        for row in pairs:
            with torch.no_grad():
                reference = [score(base, tokenizer, row, each) for each in ANSWERS]
            policy = [score(model, tokenizer, row, each) for each in ANSWERS]
            chosen, rejected = (
                BETA * (mine - its) for mine, its in zip(policy, reference, strict=True)
            )
            loss = -F.logsigmoid(chosen - rejected) / len(pairs)
            loss.backward()
            found["loss"] += float(loss.detach())
            found["reward_chosen"] += float(chosen.detach()) / len(pairs)
            found["reward_rejected"] += float(rejected.detach()) / len(pairs)
            found["reward_accuracy"] += float(chosen.detach() > rejected.detach()) / len(pairs)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        margin = found["reward_chosen"] - found["reward_rejected"]
        steps.append({**found, "reward_margin": margin, "grad_norm": float(norm)})
    return steps


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and the directory of its pairs."""
    root = tmp_path_factory.mktemp("pairs")
    model = write_model("llama", root / "model", vocab_size=320, max_position_embeddings=CONTEXT)
    texts = [json.dumps(each) for each in rows()]
    write_tokenizer(model, texts, 275, template=CHATML, end="<|im_end|>")
    (root / "data").mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in rows())
    (root / "data" / "rows.jsonl").write_text(lines)
    return model, root / "data"


def train(places: tuple[Path, Path], output: Path, *words: str, check: bool = True) -> Any:
    model, source = places
    batch = len(rows()) - len(assign_splits([each["key"] for each in rows()], 0.1, 0))
    return typed(
        *("train", "--model", str(model), "--text", str(source), "--output", str(output)),
        *("--json", "--set", f"model.context={CONTEXT}", "--set", "data.format=jsonl"),
        *("--set", "data.batching=bucketed", "--set", f"training.dpo.beta={BETA}"),
        *("--set", f"training.batch_sequences={batch}", *words),
        check=check,
    )


def steps_in(output: Path) -> list[dict[str, float]]:
    (metrics,) = output.glob("checkpoints/*/metrics.jsonl")
    return [json.loads(each) for each in metrics.read_text().splitlines()]


def lora_words() -> list[str]:
    return [
        word for name, each in LORA.items() for word in ("--set", f"training.lora.{name}={each}")
    ]


@pytest.mark.parametrize(
    ("lora", "ranks", "shard"),
    [
        (True, 1, 1),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((False, 2, 2), (True, 2, 1))),
    ],
)
def test_losses_and_norms_are_those_of_a_plain_loop(
    places: tuple[Path, Path], tmp_path: Path, lora: bool, ranks: int, shard: int
) -> None:
    train(
        places, tmp_path / "out", "--steps", str(STEPS), "--ranks", str(ranks),
        "--set", "training.accumulation=3", "--set", f"training.mesh.shard={shard}",
        "--set", "training.evaluate_every_steps=3", *(lora_words() if lora else ()),
    )  # fmt: skip
    found = steps_in(tmp_path / "out")
    wanted = plain_loop(places[0], [each["lr"] for each in found], lora)
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6), "the base is the reference"
    assert wanted[-1]["loss"] < wanted[0]["loss"] - 1e-3
    for mine, plain in zip(found, wanted, strict=True):
        for name, each in plain.items():
            assert mine[name] == pytest.approx(each, rel=1e-5, abs=1e-5), name
    assert {"held_out_loss", "held_out_reward_margin"} <= found[-1].keys()
    assert "held_out_bits_per_byte" not in found[-1]


@pytest.mark.parametrize(
    "way",
    [
        ("--set", "training.lora.lora_dropout=0.1"),
        pytest.param(("--ranks", "2", "--set", "training.mesh.shard=2"), marks=pytest.mark.nightly),
    ],
    ids=["lora", "fsdp"],
)
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(
    places: tuple[Path, Path], tmp_path: Path, way: tuple[str, ...]
) -> None:
    """The reference is the base, not the weights of the checkpoint."""
    words = ("--steps", "8", "--set", "training.batch_sequences=6", *way)
    words += ("--set", "training.checkpoints.every_steps=3", "--set", "training.checkpoints.keep=9")
    whole = json.loads(train(places, tmp_path / "out", *words).stdout)
    at_once = steps_in(tmp_path / "out")
    job = tmp_path / "out" / "checkpoints" / whole["job_id"]
    for each in (*job.glob("step-00000008-*"), job / "export"):
        shutil.rmtree(each)
    again = json.loads(train(places, tmp_path / "out", *words).stdout)
    assert again["resumed_from_step"] in (3, 6), "a save is left out while another is under way"
    by_step = {each["step"]: each for each in steps_in(tmp_path / "out")}
    for each in at_once:
        same = ("loss", "grad_norm", "reward_margin", "reward_accuracy")
        assert [by_step[each["step"]][name] for name in same] == [each[name] for name in same]
    assert again["weights_digest"] == whole["weights_digest"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["our own transformer", "bfloat16", "DoRA"])
def test_other_ways_begin_at_the_base_and_learn(
    places: tuple[Path, Path], tmp_path: Path, way: str
) -> None:
    """Blocks recomputed, products of model and reference in bfloat16, magnitudes switched off."""
    model, source = places
    words = {
        "our own transformer": (
            f"data.tokenizer={model / 'tokenizer.json'}", "model.parameters=20000",
            "training.activation_checkpointing=true",
        ),
        "bfloat16": ("training.precision=bfloat16",),
        "DoRA": (
            "training.lora.use_dora=true", "training.lora.target_modules=all-linear",
            "training.mesh.shard=2", "training.activation_checkpointing=true",
        ),
    }[way]  # fmt: skip
    start = () if way == "our own transformer" else ("--model", str(model))
    done = typed(
        *("train", *start, "--text", str(source), "--output", str(tmp_path / "out"), "--json"),
        *("--steps", "8", "--ranks", "2", "--set", f"model.context={CONTEXT}"),
        *("--set", "data.format=jsonl", "--set", "data.batching=bucketed"),
        *("--set", "training.dpo.beta=1", "--set", "training.learning_rate=1e-2"),
        *(word for each in words for word in ("--set", each)),
    )
    result = json.loads(done.stdout)
    assert result["first_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert result["final_loss"] < 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": {"tp": 2}}, "preferences are learned by replicas or shards"),
        ({"mesh": {"pp": 2}}, "preferences are learned by replicas or shards"),
        ({"synchrony": {"kind": "local-sgd"}}, "local-sgd"),
        ({"code_ref": BYTE_GRU}, "byte_gru"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    settings = TrainingSettings.model_validate({"dpo": {}, **changes})
    with pytest.raises(InvalidInput) as caught:
        require_layout(MeshSpec.of(settings.mesh, settings.ranks), settings, None)
    assert words in caught.value.one_line()
    assert "training.dpo" in caught.value.one_line()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--set", "data.batching=packed"), "data.batching=bucketed"),
        (("--set", "training.dpo.beta=0"), "training.dpo.beta"),
        (("--labels", "shuffled"), "the control run shuffles tokens"),
        (("--set", "model.context=32"), "tokens in both answers, more than max_tokens 31"),
        (("--set", "data.text_field=prompt"), "got training.dpo and text, or other samples"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(
    places: tuple[Path, Path], tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    done = train(places, tmp_path / "out", "--steps", "3", *words, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    (said,) = [each for each in done.stderr.splitlines() if each.startswith("paceline: ")]
    assert line in said
    assert "Traceback" not in done.stderr
    assert "rank 0" not in done.stderr, "no rank started"
