"""docs/how-to/learn-from-preferences.md, typed: pairs of answers in, and out a model that prefers
the chosen ones; transformers loads it offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.journeys.guide import commands, commands_under, keeping
from tests.journeys.test_a_hugging_face_model_is_trained import export_of, refused, typed
from tests.support.hugging_face import CHATML, write_model, write_tokenizer

pytestmark = pytest.mark.nightly
PAGE = "how-to/learn-from-preferences.md"
HEADING = "Train it on this machine"
# What a user does with the result, without a network and without paceline: in how many pairs of new
# questions the chosen answer gained more on the base than the rejected one.
GAINED = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
base, export, pairs = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
models = [AutoModelForCausalLM.from_pretrained(each) for each in (base, export)]
def score(model, prompt, answer):
    asked = [{"role": "user", "content": prompt}]
    head = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(head + answer + "<|im_end|>", return_tensors="pt")["input_ids"]
    n = len(tokenizer(head)["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, n - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, ids[0, n:, None]).sum())
ahead = 0
rows = json.loads(pairs)
for row in rows:
    chosen, rejected = (
        score(models[1], row["prompt"], row[side]) - score(models[0], row["prompt"], row[side])
        for side in ("chosen", "rejected")
    )
    ahead += chosen > rejected
print(ahead / len(rows))
"""


def pair(one: int, other: int) -> dict[str, str]:
    return {
        "prompt": f"what is {one} + {other}?",
        "chosen": f"the sum is {one + other}",
        "rejected": f"I do not know {one} and {other}",
    }


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    rows = [pair(one, other) for one in range(24) for other in range(24)]
    model = write_model("llama", tmp_path / "model", vocab_size=320, max_position_embeddings=128)
    said = [each for row in rows for each in row.values()]
    write_tokenizer(model, said, 310, template=CHATML, end="<|im_end|>")
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    lines = [json.dumps(each) + "\n" for each in rows]
    lines.append(json.dumps({**rows[0], "chosen": "", "key": "says nothing"}) + "\n")
    (pairs / "sums.jsonl").write_text("".join(lines))
    return {"MODEL": str(model), "PAIRS": str(pairs), "OUTPUT": str(tmp_path / "out")}


@pytest.mark.timeout(900)
def test_the_page_trains_a_model_that_prefers_what_people_chose(places, tmp_path) -> None:
    full, lora, ask = commands_under(PAGE, HEADING, **places, EXPORT="EXPORT")
    new = json.dumps([pair(30 + n, 40 - n) for n in range(12)])
    for line, output in ((full, places["OUTPUT"]), (lora, places["OUTPUT"] + "-lora")):
        done = typed("bash", "-ec", line, home=tmp_path)
        assert "1 left out, e.g. says nothing: its 'chosen' is empty" in done.stderr
        is_evaluated = "evaluate_every_steps" in line
        assert ("nats a pair, the chosen answer is ahead in 100%" in done.stderr) == is_evaluated
        export = export_of(output)
        (metrics,) = Path(output).glob("checkpoints/*/metrics.jsonl")
        steps = [json.loads(each) for each in metrics.read_text().splitlines()]
        assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
        assert steps[-1]["loss"] < 0.3
        assert steps[-1]["reward_accuracy"] > 0.95
        gained = typed(
            sys.executable, "-c", GAINED, places["MODEL"], str(export), new, home=tmp_path
        )
        assert float(gained.stdout) > 0.95
        assert typed("bash", "-ec", ask.replace("EXPORT", str(export)), home=tmp_path).stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rm MODEL/chat_template.jinja", "has no chat template"),
        ('sed -i \'s/"chosen"/"prefer"/\' PAIRS/sums.jsonl', "of answers without 'chosen'"),
        ('sed -i \'s/"rejected": .*/"rejected": ""}/\' PAIRS/sums.jsonl', "is empty"),
        ("LINE s/data.batching=bucketed/data.batching=packed/", "data.batching=bucketed"),
        ("LINE s/--set training.dpo.beta=0.1//", "pairs without training.dpo"),
        ("LINE s/model.context=96/model.context=24/", "in both answers, more than max_tokens 23"),
    ],
)
def test_what_cannot_be_done_is_one_line(places, tmp_path, change, words) -> None:
    train = commands_under(PAGE, HEADING, **places, EXPORT="EXPORT")[0]
    if change.startswith("LINE s/"):
        train = train.replace(*change.removeprefix("LINE s/").removesuffix("/").split("/"))
        change = "true"
    for name, value in places.items():
        change = change.replace(name, value)
    typed("bash", "-c", change, home=tmp_path)
    assert words in refused(train)


@pytest.mark.xdist_group("another home")
@pytest.mark.timeout(900)
def test_an_installation_trains_it_and_judges_the_chosen_answers(places, tmp_path) -> None:
    blocks = {
        name: keeping(text).replace("MODEL", places["MODEL"]).replace("PAIRS", places["PAIRS"])
        for name, text in commands(PAGE).items()
    }
    try:
        typed("bash", "-ec", blocks["up"].replace("up", "up --profile ci"), home=tmp_path)
        typed("bash", "-ec", blocks["train"], home=tmp_path)
        trained = json.loads((tmp_path / "trained.json").read_text())
        assert trained["first_loss"] == pytest.approx(0.6931, abs=1e-4)
        assert trained["final_loss"] < 0.3
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["of_assistants"]
        assert {"base", "candidate"} <= {each["name"] for each in report["scores"]}
        said = len("the sum is 12<|im_end|>\n")
        assert report["bytes"] == pytest.approx(said * report["documents"], rel=0.1)
    finally:
        typed("paceline", "down", home=tmp_path)
