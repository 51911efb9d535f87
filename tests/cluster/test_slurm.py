"""What `paceline cluster` asks Slurm for, with commands that answer as Slurm's do.

With real daemons: tests/journeys/test_a_slurm_cluster_trains.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.cluster import serve_allocation
from paceline.config import Endpoints, Runtime, Secrets, load_profile
from paceline.errors import Cancelled, InvalidInput, MissingTool, ServiceUnavailable

SLURM = {"partition": "a100", "time_limit": "1-00:00:00", "options": ("--gpus-per-node=8",)}


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    profile = load_profile("slurm").model_copy(update={"name": "site"})
    settings = profile.cluster.slurm.model_copy(
        update={**SLURM, "options": tuple(SLURM["options"])}
    )
    cluster = profile.cluster.model_copy(update={"nodes": 16, "slurm": settings})
    return Runtime(
        profile=profile.model_copy(update={"cluster": cluster}),
        state_dir=tmp_path,
        endpoints=Endpoints(),
        secrets=Secrets(),
    )


def commands(directory: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Put Slurm's commands on the PATH; each adds its arguments to the file that this returns."""
    called = directory / "called"
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "srun"):
        path = directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {called}\n{scripts.get(name, "")}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
    return called


def serve(runtime: Runtime) -> None:
    async def serving() -> None:
        await serve_allocation(runtime, asyncio.Event())

    asyncio.run(serving())


def test_one_job_asks_for_all_nodes_and_a_cancelled_one_ends_the_command(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = commands(
        tmp_path, monkeypatch, sbatch="echo '7;site'", squeue="echo '7|CANCELLED|None|n[1-2]|x'"
    )
    with pytest.raises(Cancelled, match="job 7"):
        serve(runtime)
    first, submitted, *_, last = called.read_text().splitlines()
    assert first.startswith("scancel --quiet --name=paceline-site-")
    words = submitted.split()
    for word in ("--nodes=16", "--exclusive", "--partition=a100", "--time=1-00:00:00"):
        assert word in words
    assert "--gpus-per-node=8" in words and "--export=NONE" in words
    assert not [word for word in words if word.startswith(("--account", "--qos"))]
    assert last == "scancel --quiet 7"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("sbatch: error: invalid partition specified: a100", InvalidInput),
        ("sbatch: error: Unable to contact slurm controller", ServiceUnavailable),
    ],
)
def test_a_refused_job_is_told_from_a_controller_that_is_away(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type
) -> None:
    commands(tmp_path, monkeypatch, sbatch=f"echo '{said}' >&2; exit 1")
    with pytest.raises(kind, match=said.rpartition("error: ")[2]):
        serve(runtime)


def test_a_machine_without_slurm_is_named(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="scancel"):
        serve(runtime)
