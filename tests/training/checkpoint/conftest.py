"""Gangs that save and resume under many layouts, launched once for all tests of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.training.loop import Group
from tests.support.forked import run_gangs
from tests.support.servers import free_port
from tests.training.checkpoint.ranks import work

PROGRAM = "tests.training.checkpoint.ranks"
DEADLINE_S = 200


def launch(
    root: Path, *worlds: int, words: tuple[str, ...] = ()
) -> dict[int, list[dict[str, Any]]]:
    """Run gangs of so many ranks, one after another, and return what each rank found; of two, the
    second is killed."""
    gangs = []
    for world in worlds:
        port = free_port()
        gangs.append([[*map(str, (root, port, rank, world, *words))] for rank in range(world)])
    ended = run_gangs(PROGRAM, gangs, DEADLINE_S)
    for world, gang in zip(worlds, ended, strict=True):
        told = "\n".join(each.err for each in gang)
        codes = [each.code for each in gang]
        assert codes == ([0, -9] if world == 2 else [0] * world), told[-6000:]
    return {
        world: [
            json.loads((root / f"rank-{rank}-of-{world}.json").read_text()) for rank in range(world)
        ]
        for world in worlds
    }


@pytest.fixture(
    scope="session",
    params=[False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["", "every"],
)
def every(request: pytest.FixtureRequest) -> bool:
    """Whether all layouts are tried."""
    return bool(request.param)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, every: bool) -> Path:
    """Where all gangs save, resume and export."""
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="session")
def runs(root: Path, every: bool) -> dict[int, list[dict[str, Any]]]:
    """One rank, then two, then four; each resumes what it finds, its own and the ones before."""
    found = {1: [work(root, Group(), every)]}
    found |= launch(root, 2, 4, words=("every",) if every else ())
    found[-1] = [work(root, Group(), every)]  # one rank again: from everything there is
    return found
