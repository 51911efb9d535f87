"""Ranks of one node read the base model once to verify it: bytes read are those of the kernel."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import CorruptData
from paceline.manifest import MANIFEST_FILE, build_manifest
from paceline.training.loop.starting_state import verified_base

SIZE = 8_000_000
RANKS = 3
_FORK = multiprocessing.get_context("fork")  # siblings, as a launcher's ranks are


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Any]:
    """A node whose store has a model, and the job that trains it."""
    directory = tmp_path / "node/store/models/tiny/v1"
    directory.mkdir(parents=True)
    (directory / "weights.safetensors").write_bytes(os.urandom(SIZE))
    manifest = build_manifest(directory, model_id="tiny", version="v1", link_mbit=1000)
    (directory / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    job = SimpleNamespace(
        job_id="job", model_id="tiny", version="v1", manifest_digest=manifest.digest
    )
    return tmp_path / "node", job


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def rank(answers: Any, node: Path, job: Any, attempt: int) -> None:
    os.environ |= {"MASTER_PORT": "29500", "PACELINE_ATTEMPT": str(attempt)}
    before = bytes_read()
    try:
        verified_base(node, job)
    except CorruptData as error:
        answers.put(error.one_line())
    else:
        answers.put(bytes_read() - before)


def started(places: tuple[Path, Any], attempt: int) -> list[Any]:
    """What each rank of a start has read, or said."""
    answers = _FORK.Queue()
    ranks = [_FORK.Process(target=rank, args=(answers, *places, attempt)) for _ in range(RANKS)]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=60) for _ in ranks]
    for each in ranks:
        each.join(60)
    return found


def test_one_rank_of_a_start_reads_the_base_and_the_others_wait(places: tuple[Path, Any]) -> None:
    for attempt in (0, 1):  # each start verifies again
        first, *others = sorted(started(places, attempt), reverse=True)
        assert first >= SIZE
        assert len(others) == RANKS - 1
        assert all(each < SIZE / 100 for each in others)


def test_every_rank_refuses_a_base_that_is_damaged(places: tuple[Path, Any]) -> None:
    assert max(started(places, 0)) >= SIZE
    node, _ = places
    with (node / "store/models/tiny/v1/weights.safetensors").open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes(16))
    found = started(places, 0)  # of the same start: a rank that comes later
    assert len(found) == RANKS
    assert all("does not match its digest" in str(each) for each in found)
