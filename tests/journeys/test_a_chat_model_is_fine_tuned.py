"""docs/how-to/fine-tune-on-conversations.md, typed: a base model in, one that answers out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.journeys.guide import commands, commands_under, keeping
from tests.journeys.test_a_hugging_face_model_is_trained import export_of, refused, typed
from tests.support.hugging_face import CHATML, MARKED, write_model, write_tokenizer

pytestmark = pytest.mark.nightly
PAGE = "how-to/fine-tune-on-conversations.md"
HEADING = "Fine-tune it on this machine"
# What a user does with the result, without a network and without paceline.
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
asked = tokenizer.apply_chat_template(
    [{"role": "user", "content": "what is 3 + 4?"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)
made = model.generate(**asked, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(made[0][asked["input_ids"].shape[1]:]).split("<|im_end|>")[0])
"""


def conversation(one: int, other: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"what is {one} + {other}?"},
        {"role": "assistant", "content": f"the sum is {one + other}"},
    ]


def write_chat_model(directory: Path, said: Sequence[str], vocabulary: int) -> Path:
    """Save a random Llama whose tokenizer is trained on ``said``, and which stops where an
    assistant's message ends."""
    model = write_model("llama", directory, vocab_size=vocabulary)
    write_tokenizer(model, said, vocabulary - 10, template=CHATML, end="<|im_end|>")
    config = json.loads((model / "generation_config.json").read_text())
    eos = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["<|im_end|>"]
    (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    return model


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    rows = [conversation(one, other) for one in range(24) for other in range(24)]
    said = [turn["content"] for each in rows for turn in each]
    model = write_chat_model(tmp_path / "model", said, 320)
    chat = tmp_path / "chat"
    chat.mkdir()
    lines = [json.dumps({"messages": each}) + "\n" for each in rows]
    long = [turn for each in rows[:9] for turn in each]
    lines.append(json.dumps({"messages": long, "key": "far too long"}) + "\n")
    (chat / "sums.jsonl").write_text("".join(lines))
    return {"MODEL": str(model), "CHAT": str(chat), "OUTPUT": str(tmp_path / "out")}


@pytest.mark.timeout(900)
def test_the_page_fine_tunes_a_model_that_answers(places, tmp_path) -> None:
    train, ask = commands_under(PAGE, HEADING, **places, EXPORT="EXPORT")
    done = typed("bash", "-ec", train, home=tmp_path)
    assert "1 left out, e.g. far too long: " in done.stderr
    assert "more than max_tokens 63" in done.stderr
    export = export_of(places["OUTPUT"])
    template = "chat_template.jinja"
    assert (export / template).read_bytes() == (Path(places["MODEL"]) / template).read_bytes()
    answer = typed("bash", "-ec", ask.replace("EXPORT", str(export)), home=tmp_path).stdout
    assert (
        answer.strip()
        == typed(sys.executable, "-c", ANSWER, str(export), home=tmp_path).stdout.strip()
    )
    # The same data for a model with another template, and rows that are too short.
    (snapshot,) = Path(places["OUTPUT"]).glob("data/snapshots/*")
    again = train.replace(f"--text {places['CHAT']}", f"--snapshot {snapshot}")
    again = again.replace(places["OUTPUT"] + " ", places["OUTPUT"] + "-2 ")
    short = again.replace("model.context=64", "model.context=16")
    done = typed("bash", "-ec", short, home=tmp_path, check=False)
    assert "a conversation is longer than a row" in done.stderr
    (Path(places["MODEL"]) / template).write_text(MARKED)
    done = typed("bash", "-ec", again, home=tmp_path, check=False)
    assert done.returncode == 2
    assert "data and model have different chat templates" in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rm MODEL/chat_template.jinja", "has no chat template"),
        ("echo '{% for m in' > MODEL/chat_template.jinja", "not a chat template"),
        (
            "echo '{{ raise_exception(\"no\") }}' > MODEL/chat_template.jinja",
            "the chat template raises TemplateError: no",
        ),
        ("sed -i 's/assistant/helper/' CHAT/sums.jsonl", "no message is an assistant's"),
        ("PACELINE=x", "data.batching=packed"),
    ],
)
def test_what_cannot_be_done_is_one_line(places, tmp_path, change, words) -> None:
    train = commands_under(PAGE, HEADING, **places, EXPORT="EXPORT")[0]
    if change == "PACELINE=x":
        train = train.replace(" --set data.batching=packed", "")
    for name, value in places.items():
        change = change.replace(name, value)
    typed("bash", "-c", change, home=tmp_path)
    assert words in refused(train)
    assert not Path(places["OUTPUT"]).exists()


@pytest.mark.xdist_group("another home")
@pytest.mark.timeout(900)
def test_an_installation_fine_tunes_judges_promotes_and_answers(places, tmp_path) -> None:
    """What assistants say is predicted better than by the base, gzip, xz and the n-gram model."""
    blocks = {
        name: keeping(text).replace("MODEL", places["MODEL"]).replace("CHAT", places["CHAT"])
        for name, text in commands(PAGE).items()
    }
    try:
        typed("bash", "-ec", blocks["up"].replace("up", "up --profile ci"), home=tmp_path)
        typed("bash", "-ec", blocks["train"], home=tmp_path)
        (note,) = json.loads((tmp_path / "snapshot.json").read_text())["notes"]
        assert "1 samples are left out of the snapshot: far too long: " in note
        done = typed("bash", "-ec", blocks["promote"], home=tmp_path)
        assert "acme/tiny v2 is champion" in done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        bits = {each["name"]: each["bits_per_byte"] for each in report["scores"]}
        for other in ("base", "gzip", "xz", "ngram"):
            assert bits["candidate"]["high"] < bits[other]["low"], bits
        said = len("the sum is 12<|im_end|>\n")
        assert report["bytes"] == pytest.approx(said * report["documents"], rel=0.1)
        assert done.stdout.splitlines()[-1].startswith("the sum is ")
    finally:
        typed("paceline", "down", home=tmp_path)
