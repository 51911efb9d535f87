"""`paceline reproduce` as a person runs it, on what a real run left in MLflow, S3 and on the nodes.

The run is the lifecycle's: a flow on Prefect, two ranks on Dask, losses and records in MLflow.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import paceline
from paceline.config import Runtime
from paceline.data import load_snapshot
from paceline.schemas import Reproduction
from paceline.storage import ObjectStore
from paceline.training import Recorded
from tests.support import stack as installed
from tests.support.stack import Ended

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def recorded(lifecycle: Ended, stack: Runtime) -> Recorded:
    from paceline.cli.training import recorded_run

    return recorded_run(stack, str(lifecycle.answer["run_id"]))


def reproduce(recorded: Recorded, stack: Runtime, *words: str, path: Path | None = None) -> Ended:
    """Run `paceline reproduce`, with ``path`` before everything that is installed."""
    before = os.environ.get("PYTHONPATH")
    if path is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), before]))
    try:
        return installed.paceline("reproduce", recorded.run_id, *words, state=stack.state_dir)
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


@pytest.mark.nightly
def test_a_run_comes_out_bit_identical(recorded: Recorded, stack: Runtime) -> None:
    assert len(recorded.losses) == recorded.result.steps == recorded.job.settings.steps
    assert recorded.result.ranks == 2
    store = ObjectStore.from_runtime(stack)
    before = store.directories(recorded.job.checkpoint_url)
    ended = reproduce(recorded, stack)
    assert ended.code == 0, ended.err
    (line,) = [each for each in ended.out.splitlines() if each.startswith("bit-identical: ")]
    assert f"{recorded.result.steps} losses" in line
    assert recorded.result.weights_digest[:16] in line
    assert not [each for each in ended.out.splitlines() if each.startswith("!")], ended.out
    assert store.directories(recorded.job.checkpoint_url) == before, "nothing of it is left"


@contextmanager
def without(store: ObjectStore, url: str, instead: bytes | None = None) -> Iterator[None]:
    """Have nothing at ``url``, or ``instead``, for the time of the ``with``."""
    kept = store.get_bytes(url)
    store.delete(url)
    try:
        if instead is not None:
            store.put_bytes(url, instead)
        yield
    finally:
        store.put_bytes(url, kept)


def require_refused(ended: Ended, what: str, got: str, wanted: str, where: str, do: str) -> None:
    assert ended.code == 4, ended.err
    line = ended.problem
    assert line.startswith(f"paceline: {what} is not as it was when the run trained: got ")
    for part in (got, f"wanted {wanted}", f"at {where}", do):
        assert part in line, line
    assert "  step " not in ended.err, "nothing was trained"


@pytest.mark.chaos
def test_data_that_are_gone_cut_or_changed_are_refused(recorded: Recorded, stack: Runtime) -> None:
    store, job = ObjectStore.from_runtime(stack), recorded.job
    snapshot = load_snapshot(job.snapshot_url, store)
    what = ("data snapshot", job.snapshot_digest, job.snapshot_url, "`paceline snapshot`")
    with without(store, f"{job.snapshot_url}/snapshot.json"):
        ended = reproduce(recorded, stack)
        require_refused(ended, what[0], "no snapshot here", *what[1:])
    record = snapshot.record.model_copy(update={"seed": snapshot.record.seed + 1})
    with without(store, f"{job.snapshot_url}/snapshot.json", record.model_dump_json().encode()):
        ended = reproduce(recorded, stack, "--anyway")
        require_refused(ended, what[0], "does not match its name", *what[1:])
    shard = snapshot.of_split("train")[0]
    url = snapshot.shard_url(shard)
    with without(store, url):
        ended = reproduce(recorded, stack, "--json")
        assert ended.code == 4
        assert ended.answer["error"]["code"] == "NotReproducible"
        assert shard.name in ended.answer["error"]["got"]
        checked = reproduce(recorded, stack, "--check", "--json")
        assert checked.code == 4
        (differs,) = Reproduction.model_validate(checked.answer).differences
        assert (differs.what, differs.then) == ("data snapshot", job.snapshot_digest)
    assert reproduce(recorded, stack, "--check").code == 0, "it is back"


@pytest.mark.chaos
def test_another_torch_is_refused(recorded: Recorded, stack: Runtime, tmp_path: Path) -> None:
    information = tmp_path / "torch-2.12.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    ended = reproduce(recorded, stack, path=tmp_path)
    ours = importlib.metadata.version("torch")
    require_refused(ended, "torch", "got 2.12.1", ours, os.uname().nodename, "--anyway")


@pytest.mark.chaos
def test_changed_code_is_refused_and_compared_when_asked(
    recorded: Recorded, stack: Runtime, tmp_path: Path
) -> None:
    root = Path(paceline.__file__).parents[2]
    copied = tmp_path / "paceline"
    shutil.copytree(root / "src/paceline", copied, ignore=shutil.ignore_patterns("*.pyc"))
    schedule = copied / "training" / "loop" / "optimizer.py"
    schedule.write_text(f"{schedule.read_text()}\n# a change\n")
    ended = reproduce(recorded, stack, path=tmp_path)
    where = str(tmp_path / "paceline")
    then = recorded.result.code_version
    require_refused(ended, "code version", "+src.", then, where, "Check out commit ")
    ended = reproduce(recorded, stack, "--anyway", path=tmp_path)
    assert ended.code == 0, "a comment changes no bits"
    assert f"! code version: then {then}, now " in ended.out
    assert "bit-identical: " in ended.out
    slower = schedule.read_text().replace("* (step + 1) /", "* (step + 2) /")
    assert slower != schedule.read_text()
    schedule.write_text(slower)
    ended = reproduce(recorded, stack, "--anyway", path=tmp_path)
    assert ended.code == 3, ended.err
    assert f"different from step 2 on: loss then {recorded.losses[2]!r}, now " in ended.out
