"""docs/how-to/fine-tune-on-conversations.md, "The whole life in one command", typed: adapters on
two nodes, tasks of lm-eval, a second person's approval, and what comes out loads offline."""

from __future__ import annotations

import json
import sys
import time

import pytest
import yaml

from tests.journeys.guide import commands
from tests.journeys.test_a_chat_model_is_fine_tuned import ANSWER, PAGE, places
from tests.journeys.test_a_hugging_face_model_is_trained import typed

__all__ = ["places"]  # a fixture

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.xdist_group("a home"),
    pytest.mark.timeout(600),
]
RUN = "run-20261123-120000-cccccc"
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "sums.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "the sum",
    "doc_to_choice": [" is 1", "!?!?"],
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def test_a_base_becomes_an_approved_champion(places, tmp_path, monkeypatch) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sums.yaml").write_text(yaml.safe_dump(TASK))
    (tmp_path / "tasks/sums.jsonl").write_text('{"label": 0}\n' * 20)
    words = {"MODEL": places["MODEL"], "CHAT": places["CHAT"], "RUN": RUN}
    blocks = {}
    for name, text in commands(PAGE).items():
        for word, value in words.items():
            text = text.replace(word, value)  # noqa: PLW2901
        blocks[name] = text
    try:
        typed("bash", "-ec", blocks["whole"].replace("up", "up --profile ci", 1), home=tmp_path)
        waits = typed("bash", "-ec", blocks["lifecycle"], home=tmp_path, check=False)
        assert waits.returncode == 5, waits.stderr[-3000:]
        evidence = waits.stderr.rpartition("evidence ")[2].split(",")[0].split()[0]

        bob = tmp_path / "bob"
        bob.mkdir()
        runtime = json.loads((tmp_path / ".paceline/runtime.json").read_text())
        monkeypatch.setenv("XDG_CONFIG_HOME", str(bob))
        monkeypatch.setenv("PACELINE_TOKEN", (tmp_path / "bob.token").read_text().strip())
        typed("paceline", "login", runtime["endpoints"]["coordinator_url"], home=bob)
        monkeypatch.delenv("PACELINE_TOKEN")
        typed("bash", "-ec", blocks["approve"].replace("EVIDENCE", evidence), home=bob)
        monkeypatch.delenv("XDG_CONFIG_HOME")

        until = time.monotonic() + 200
        line = f"{blocks['lifecycle'].rstrip()} --json"
        while (done := typed("bash", "-ec", line, home=tmp_path, check=False)).returncode:
            assert done.returncode == 5, done.stderr[-3000:]
            assert time.monotonic() < until, done.stderr[-3000:]
            time.sleep(5)
        summary = json.loads(done.stdout)
        checks = {each["name"]: each["passed"] for each in summary["gate"]["checks"]}
        assert checks["task sums/acc no worse than base"]
        held = tmp_path / ".paceline/nodes/node-2/store/models" / summary["model"]["model_id"]
        assert (held / "active").readlink().name == "2"
        card = (held / "active/README.md").read_text()
        assert "what assistants say in" in card
        assert "| sums/acc | candidate |" in card
        said = typed(sys.executable, "-c", ANSWER, str(held / "active"), home=tmp_path).stdout
        assert said.startswith("the sum"), said
        ours = f"models:/{summary['model']['model_id']}@champion"
        asked = ("--chat", "what is 3 + 4?", "--max-tokens", "20")
        assert typed("paceline", "generate", ours, *asked, home=tmp_path).stdout == said
    finally:
        typed("paceline", "down", home=tmp_path)
