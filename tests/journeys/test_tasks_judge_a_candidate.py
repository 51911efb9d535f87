"""docs/how-to/judge-with-tasks.md, typed: tasks from files decide on a promotion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journeys.guide import commands
from tests.journeys.hosts import COMMAND_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("another home"),
    pytest.mark.timeout(900),
]
TYPED = commands("how-to/judge-with-tasks.md")


def typed(text: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HOME": str(home)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=home, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_tasks_are_scored_and_decide(tmp_path: Path) -> None:
    typed(TYPED["tasks"], tmp_path)
    lines = TYPED["lifecycle"].rstrip().replace("paceline up", "paceline up --profile ci")
    try:
        promoted = json.loads(typed(f"{lines} --json", tmp_path).stdout.splitlines()[-1])
        checks = {each["name"]: each for each in promoted["gate"]["checks"]}
        for name in ("task next_line/acc, lower end", "task next_line/acc no worse than base"):
            assert checks[name]["passed"]
        card = tmp_path / ".paceline/nodes/node-0/store/models" / promoted["model"]["model_id"]
        assert "| next_line/acc | candidate |" in (card / "active/README.md").read_text()
    finally:
        typed("paceline down", tmp_path)
