"""The profile of one machine of one's own: one node, no emulated links, from text to champion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import finish, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("demo"),
    pytest.mark.timeout(600),
]

SMALL = ("model.parameters=20000", "model.context=64", "training.steps=60", "data.source=unused")


def test_a_workstation_brings_its_own_text_to_a_champion(tmp_path: Path) -> None:
    state, texts = tmp_path / "state", tmp_path / "texts"
    texts.mkdir()
    for index in range(90):
        lines = (f"line {number} of letter {index}: the quick brown fox\n" for number in range(40))
        (texts / f"letter-{index}.txt").write_text("".join(lines))

    def typed(*words: str, seconds: float = 300) -> str:
        ended = finish(start(*words, state=state), seconds)
        assert ended.code == 0, ended.err
        return ended.out + ended.err

    settings = [word for each in SMALL for word in ("--set", each)]
    judging = 'gate.except_baselines=["ngram", "gzip", "xz"]'  # a model of this size beats none
    typed("up", "--profile", "workstation", *settings, "--set", judging)
    try:
        shown = typed("lifecycle", "--data", str(texts), "--set", "training.learning_rate=0.01")
        assert "1 worker" in shown
        assert " 2  complete 100%, 1 of 1 workers complete, active" in typed("status")
    finally:
        typed("down")
