"""docs/how-to/train-your-hugging-face-model.md, typed: a directory of transformers in, one out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journeys.guide import commands, commands_under, keeping
from tests.journeys.hosts import COMMAND_S
from tests.support.command import paceline
from tests.support.hugging_face import write_model, write_tokenizer

pytestmark = pytest.mark.nightly
PAGE = "how-to/train-your-hugging-face-model.md"
HEADING = "Train it"
# What a user does with the result, without a network and without paceline.
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = tokenizer.apply_chat_template([{"role": "user", "content": "line 7"}], tokenize=False)
with torch.no_grad():
    logits = model(**tokenizer("line 7 of file 3", return_tensors="pt")).logits
wrong = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]]))
print(json.dumps({"wrong": wrong, "chat": chat, "n": logits.shape[2]}))
"""


def typed(*line: str, home: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(home)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        line, cwd=home, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def refused(line: str) -> str:
    """Type a line that is refused before any rank starts; return its one line of reason."""
    first, *words = shlex.split(line)
    assert first == "paceline"
    done = paceline(*words)  # within this process: an import of torch is most of a refusal
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (reason,) = [each for each in done.stderr.splitlines() if each.startswith("paceline: ")]
    return reason


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    text = tmp_path / "text"
    text.mkdir()
    said = [
        "".join(f"line {n} of file {number} is {n * number}\n" for n in range(80))
        for number in range(12)
    ]
    for number, each in enumerate(said):
        (text / f"{number}.txt").write_text(each)
    model = write_model("qwen2", tmp_path / "model", vocab_size=320)
    write_tokenizer(model, said)
    return {"MODEL": str(model), "TEXT": str(text), "OUTPUT": str(tmp_path / "out")}


def export_of(output: str) -> Path:
    (found,) = Path(output).glob("checkpoints/*/export")
    return found


@pytest.mark.timeout(900)
def test_what_the_page_says_trains_a_model_that_transformers_loads(places, tmp_path) -> None:
    lines = commands_under(PAGE, HEADING, **places)
    assert len(lines) == 2
    lines += commands_under(PAGE, "Cut the matrices", **places)
    lines += commands_under(PAGE, "Cut into stages", **places)
    lines += commands_under(PAGE, "Cut long rows", **places)
    for number, line in enumerate(lines):
        output = str(tmp_path / f"out-{number}")
        done = typed("bash", "-ec", line.replace(places["OUTPUT"], output), home=tmp_path)
        assert "of Qwen2ForCausalLM, rows of 64 tokens (its own tokens)" in done.stderr
        export = export_of(output)
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (export / name).read_bytes() == (Path(places["MODEL"]) / name).read_bytes()
        loaded = json.loads(typed(sys.executable, "-c", LOAD, str(export), home=tmp_path).stdout)
        assert loaded["wrong"] == []
        assert loaded["n"] == 320
        assert loaded["chat"] == "<|user|>line 7"
        (look,) = commands_under(PAGE, "Use what was trained", EXPORT=str(export))
        assert len(typed("bash", "-ec", look, home=tmp_path).stdout) > 10
    figures = [
        [json.loads(each)["loss"] for each in path.read_text().splitlines()]
        for path in sorted(tmp_path.glob("out-*/checkpoints/*/metrics.jsonl"))
    ]
    replicas, shards, cut, stages, parts = figures
    assert len(replicas) == 20
    assert replicas[-1] < replicas[0] - 0.5
    assert shards == pytest.approx(replicas, rel=1e-5)
    assert cut == pytest.approx(replicas, rel=1e-5)
    assert stages == pytest.approx(replicas, rel=1e-5)
    assert parts == pytest.approx(replicas, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--ranks 4 --set training.mesh.tp=4", "does not divide the key-value heads"),
        ("--ranks 3 --set training.mesh.pp=3", "more stages than layers"),
        ("--set training.synchrony.kind=local-sgd", "every-step"),
        ("--set training.lora.target_modules=nope", "no layer to adapt has this name: got nope"),
        ("--set training.lora.r=0", "got training.lora.r = 0"),
        ("--set model.context=128", "rows are longer than the model's context"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(places, more, words) -> None:
    line = commands_under(PAGE, HEADING, **places)[0]
    assert words in refused(f"{line} {more}")
    assert not Path(places["OUTPUT"]).exists()


def test_pickled_weights_are_named(places) -> None:
    model = Path(places["MODEL"])
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    line = commands_under(PAGE, HEADING, **places)[0]
    assert "pytorch_model.bin" in refused(line)
    assert not Path(places["OUTPUT"]).exists()


# What a node's own programs do with the active version, offline.
GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("acme/tiny", cache_dir=sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained("acme/tiny", cache_dir=sys.argv[1])
asked = tokenizer("line 7 of file", return_tensors="pt")
print(tokenizer.decode(model.generate(**asked, max_new_tokens=12, do_sample=False)[0]))
"""


@pytest.mark.xdist_group("a home")
@pytest.mark.timeout(900)
def test_an_installation_trains_judges_promotes_and_rolls_it_out(places, tmp_path) -> None:
    """What is judged in its own tokens is better than the base, gzip, xz and the n-gram model."""
    blocks = {
        name: keeping(text).replace("MODEL", places["MODEL"]).replace("TEXT", places["TEXT"])
        for name, text in commands(PAGE).items()
    }
    for number in range(12, 60):  # enough that documents are held out
        lines = (f"line {n} of file {number} is {n * number}\n" for n in range(80))
        Path(places["TEXT"], f"{number}.txt").write_text("".join(lines))
    Path(places["MODEL"], "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    Path(places["MODEL"], "LICENSE").write_text("the terms\n")
    try:
        typed("bash", "-ec", blocks["up"].replace("up", "up --profile ci"), home=tmp_path)
        typed("bash", "-ec", blocks["train"], home=tmp_path)
        done = typed("bash", "-ec", blocks["promote"], home=tmp_path)
        assert "acme/tiny v2 is champion" in done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        bits = {each["name"]: each["bits_per_byte"] for each in report["scores"]}
        for other in ("base", "gzip", "xz", "ngram"):
            assert bits["candidate"]["high"] < bits[other]["low"], bits
        (candidate,) = [each for each in report["scores"] if each["name"] == "candidate"]
        assert 0 < candidate["tokens"] < report["bytes"] / 1.5, "its own tokens, not bytes"
        for node in ("node-0", "node-3"):
            held = tmp_path / ".paceline/nodes" / node / "store/hub/models--acme--tiny/snapshots/2"
            card = (held / "README.md").read_text()
            assert "license: apache-2.0\n" in card
            assert "base_model: acme/tiny\n" in card
            assert f"| candidate | {bits['candidate']['value']:.4f} |" in card
            assert (held / "LICENSE").read_text() == "the terms\n"
        at_once = typed("bash", "-ec", blocks["lifecycle"].rstrip() + " --json", home=tmp_path)
        summary = json.loads(at_once.stdout)
        assert summary["gate"]["passed"]
        assert summary["model"]["parameters"] > 10_000
        held = tmp_path / ".paceline/nodes/node-1/store/models" / summary["model"]["model_id"]
        tokenizer = Path(places["MODEL"], "tokenizer.json").read_bytes()
        assert (held / "active" / "tokenizer.json").read_bytes() == tokenizer
        typed("bash", "-ec", blocks["continue"], home=tmp_path)
        went_on = json.loads((tmp_path / "trained.json").read_text())
        assert (went_on["resumed_from_step"], went_on["steps"]) == (300, 340)
        typed("bash", "-ec", blocks["train-lora"], home=tmp_path)
        adapted = json.loads((tmp_path / "trained.json").read_text())
        assert adapted["weights_digest"] != went_on["weights_digest"]
        hub = tmp_path / ".paceline/nodes/node-2/store/hub"
        said = typed(sys.executable, "-c", GENERATE, str(hub), home=tmp_path).stdout
        assert said.startswith("line 7 of file")
        assert "line 8" in said or " is " in said, said
    finally:
        typed("paceline", "down", home=tmp_path)
