"""docs/how-to/fine-tune-on-conversations.md, "The whole life in one command", typed: conversations
and tasks made from the demo's text, adapters on two nodes, a second person's approval in the page,
and elsewhere, offline, the logits of the model that was trained."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from transformers import AutoTokenizer

from tests.journeys.guide import commands, filled
from tests.journeys.hosts import COMMAND_S
from tests.journeys.test_a_chat_model_is_fine_tuned import ANSWER, PAGE, write_chat_model
from tests.journeys.test_a_hugging_face_model_is_trained import typed
from tests.support.browser import chromium, click, resize, see
from tests.support.elsewhere import logits_elsewhere, run_elsewhere

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.browser,
    pytest.mark.xdist_group("a home"),
    pytest.mark.timeout(1800),
]
RUN = "run-20261123-120000-cccccc"
ASKED = [{"role": "user", "content": "if self._value is None:"}]
# Beside the installation: the base, to whose weights the adapters of the last checkpoint are added.
TRAINED = """
import json, shutil, sys
import paceline, torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
base, tokens = sys.argv[1:]
dcp_to_torch_save("checkpoint", "checkpoint.pt")
adapters = torch.load("checkpoint.pt")["model"]
shutil.copytree(base, "trained")
weights = load_file("trained/model.safetensors")
learnt = [name for name in adapters if ".lora_A." in name]
assert len(learnt) == 14, "each linear layer of two blocks"
for name in learnt:
    layer = name.split(".lora_A.")[0] + ".weight"
    weights[layer] += adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
save_file(weights, "trained/model.safetensors", metadata={"format": "pt"})
model = paceline.load("trained")
with torch.no_grad():
    print(json.dumps(model.forward(torch.tensor([json.loads(tokens)]))[0].tolist()))
"""


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return what is typed, beside a base whose tokenizer is made from the demo's text; stop the
    installation at the end."""
    texts = commands(PAGE)
    typed("bash", "-ec", texts["from-text"], home=tmp_path)
    rows = (tmp_path / "chat/lines.jsonl").read_text().splitlines()
    said = [turn["content"] for row in rows for turn in json.loads(row)["messages"]]
    base = write_chat_model(tmp_path / "tiny", said, 640)
    words = {"MODEL": str(base), "CHAT": "chat", "RUN": RUN}
    yield {name: filled(text, words) for name, text in texts.items()}
    typed("paceline", "down", home=tmp_path)


def approve(page: str, token: str) -> None:
    """Look at the promotion in a browser and approve it, as the owner of ``token``."""
    with chromium() as browser:
        resize(browser, 1280)
        browser.get(page)
        see(browser, "//input[@id='token']").send_keys(token, Keys.ENTER)
        see(browser, "//*[@id='approval']//h2/*[text()='waiting']")
        shown = see(browser, "//*[@id='approval']").text
        assert "task next_line/acc no worse than base" in shown
        click(browser, "//*[@id='approval']//button[text()='Approve']")
        click(browser, "//button[@id='sure-yes']")
        see(browser, "//*[@id='approval']//h2/*[text()='approved']")


def approved(line: str, home: Path) -> dict[str, Any]:
    """Return what ``line`` prints once the promotion that it waits for was approved."""
    until = time.monotonic() + COMMAND_S
    words = ("bash", "-ec", f"{line.rstrip()} --json")
    while (done := typed(*words, home=home, check=False)).returncode:
        assert done.returncode == 5, done.stderr[-3000:]
        assert time.monotonic() < until, done.stderr[-3000:]
        time.sleep(5)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_base_becomes_an_approved_champion_elsewhere(blocks, tmp_path) -> None:
    typed("bash", "-ec", blocks["whole"].replace("up", "up --profile ci", 1), home=tmp_path)
    waits = typed("bash", "-ec", blocks["lifecycle"], home=tmp_path, check=False)
    assert waits.returncode == 5, waits.stderr[-3000:]
    pages = typed("bash", "-ec", f"{blocks['approve'].rstrip()} --json", home=tmp_path)
    approve(json.loads(pages.stdout)["fleet"], (tmp_path / "bob.token").read_text().strip())
    summary = approved(blocks["lifecycle"], tmp_path)

    assert summary["distribution"]["workers"] == 4
    read_shards = [each.parent.name for each in (tmp_path / ".paceline/nodes").glob("*/cache")]
    assert len(read_shards) == 2, "each rank on a node of its own"
    checks = {each["name"]: each["passed"] for each in summary["gate"]["checks"]}
    assert checks["task next_line/acc, lower end"]
    assert checks["task next_line/acc no worse than base"]
    take = blocks["take"].replace("MODEL_ID", summary["model"]["model_id"])
    typed("bash", "-ec", take, home=tmp_path)
    champion, environment = tmp_path / "champion", tmp_path / "elsewhere"
    card = (champion / "README.md").read_text()
    assert "what assistants say in" in card
    assert "| next_line/acc | candidate |" in card

    job = f"s3://paceline/checkpoints/{summary['training']['job_id']}"
    typed("paceline", "checkpoints", "export", job, "checkpoint", home=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(champion)
    tokens = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    words = (TRAINED, "tiny", json.dumps(tokens))
    printed = typed(sys.executable, "-c", *words, home=tmp_path).stdout
    trained = torch.tensor(json.loads(printed))
    base, elsewhere = map(
        torch.tensor,
        logits_elsewhere(environment, tokens, tmp_path / "tiny", champion),
    )
    # Float32 sums in two orders: of paceline's attention and of transformers'.
    assert torch.allclose(elsewhere, trained, rtol=0, atol=1e-5)
    assert not torch.allclose(elsewhere, base, rtol=0, atol=1e-1), "it has learnt"

    said = run_elsewhere(environment, ANSWER, champion)
    ours = f"models:/{summary['model']['model_id']}@champion"
    asked = ("--chat", "what is 3 + 4?", "--max-tokens", "20")
    assert typed("paceline", "generate", ours, *asked, home=tmp_path).stdout == said
