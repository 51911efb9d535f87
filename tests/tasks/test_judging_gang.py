"""Which ranks judge a model: those that were asked for, those of its training, or one process."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.cluster import Machine, Node
from paceline.config import EvaluationSettings, MeshSettings, MetricSettings
from paceline.errors import InvalidInput
from paceline.manifest import Manifest
from paceline.schemas import Accelerator, JobPlacement, Labels
from paceline.tasks._support.run import Run
from paceline.tasks._support.scores import Gang, judging_gang, require_one_process
from tests.security.test_a_forged_report_is_refused import Bucket, run_of

GIB = 2**30


class Store(Bucket):
    def get_bytes(self, url: str, max_bytes: int = 2**20) -> bytes:
        return super().get_bytes(url, max_bytes)


def node(name: str, gpus: int = 0, *, memory_bytes: int = 32 * GIB) -> Node:
    found = [Accelerator(kind="H100", count=gpus, memory_bytes=80 * GIB)] if gpus else []
    machine = Machine(
        version="1", extras=("train",), labels=Labels(host=name), cores=8,
        memory_bytes=memory_bytes, shared_memory_bytes=GIB, accelerators=tuple(found),
    )  # fmt: skip
    return Node(worker_id=name, address=f"tls://{name}:1", machine=machine)


NODES = [node("node-0"), node("node-1")]


def run_with(*, dtype: str = "bfloat16", **evaluation: Any) -> Run:
    """A run whose bucket has the config of the base."""
    run = run_of(bucket := Store())
    profile = run.runtime.profile.model_copy(
        update={"evaluation": EvaluationSettings(**evaluation)}
    )
    run.runtime = run.runtime.model_copy(update={"profile": profile})
    run.__dict__["store"] = bucket
    bucket.objects[f"{run.runtime.models_url}/acme/7b/1/config.json"] = (
        f'{{"dtype": "{dtype}"}}'.encode()
    )
    return run


def gang_of(
    run: Run,
    ranks: int | None = None,
    nodes: list[Node] = NODES,
    weights_bytes: int = GIB,
    tasks: bool = False,
) -> Gang | None:
    files = [SimpleNamespace(path="model.safetensors", size=weights_bytes)]
    base = cast("Manifest", SimpleNamespace(model_id="acme/7b", version="1", files=files))
    return judging_gang(run, nodes, base, ranks, with_tasks=tasks)


def test_a_small_model_of_one_rank_is_judged_by_one_process() -> None:
    assert gang_of(run_with()) is None
    assert gang_of(run_with(), ranks=1, weights_bytes=40 * GIB) is None


def test_ranks_that_are_asked_for_share_it() -> None:
    for found in (gang_of(run_with(), ranks=2), gang_of(run_with(ranks=2))):
        assert found is not None
        assert found.settings.mesh == MeshSettings(dp=1, shard=2)
        assert found.nodes == ("node-0", "node-1")
    cut = gang_of(run_with(ranks=2, tp=2))
    assert cut is not None
    assert cut.settings.mesh == MeshSettings(dp=1, shard=1, tp=2)


def test_a_job_judges_on_the_slots_that_it_holds() -> None:
    run = run_with()
    placement = JobPlacement(hosts={"node-0": 2}, slots={"node-0": 8}, level="rack")
    run.job = cast("Any", SimpleNamespace(placement=placement))
    found = gang_of(run, nodes=[node("node-0", gpus=8)], weights_bytes=40 * GIB)
    assert found is not None
    assert (found.nodes, found.slots) == (("node-0",), {"node-0": (2, 8)})
    with pytest.raises(InvalidInput, match=r"more ranks than the job holds.*at most 2"):
        gang_of(run, ranks=4, nodes=[node("node-0", gpus=8)])


def test_a_model_that_no_node_holds_is_shared_by_all_ranks() -> None:
    found = gang_of(run_with(), weights_bytes=14 * GIB)  # 28 in float32, of 32
    assert found is not None
    assert found.settings.mesh == MeshSettings(dp=1, shard=2)
    assert gang_of(run_with(dtype="float32"), weights_bytes=14 * GIB) is None
    assert gang_of(run_with(), nodes=[node("node-0")], weights_bytes=14 * GIB) is None
    found = gang_of(run_with(), nodes=[node("node-0", gpus=4)], weights_bytes=40 * GIB)
    assert found is not None
    assert found.settings.ranks == 4


def test_what_is_asked_for_and_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not enough nodes"):
        gang_of(run_with(), ranks=3)
    with pytest.raises(InvalidInput, match=r"does not divide.*3 ranks, tp 2.*evaluation\.tp"):
        gang_of(run_with(tp=2), ranks=3)


def test_tasks_of_a_model_too_large_for_a_process_are_refused_in_figures() -> None:
    metric = MetricSettings(code_ref="m:f", higher_is_better=True)
    for asked in ({"tasks": "./tasks"}, {"metrics": {"tone": metric}}):
        run = run_with(**asked)
        for way in ({"ranks": 2}, {}):
            with pytest.raises(InvalidInput, match=r"does not fit one process.*30\.1 GB.*34\.4 GB"):
                gang_of(run, weights_bytes=14 * GIB, tasks=True, **way)
        larger = [node("node-0"), node("node-1", memory_bytes=64 * GIB)]
        assert gang_of(run, nodes=larger, weights_bytes=14 * GIB, tasks=True) is None
        host = [node("node-0", gpus=1, memory_bytes=512 * GIB)]
        assert gang_of(run, nodes=host, weights_bytes=100 * GIB, tasks=True) is None, "on the CPU"
    assert gang_of(run_with(), weights_bytes=14 * GIB) is not None, "scores alone are shared"


@pytest.mark.parametrize("known", [True, False])
def test_they_are_refused_before_a_node_is_busy(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    run = run_with(tasks="./tasks")
    fleet = SimpleNamespace(nodes=lambda: NODES if known else [])
    monkeypatch.setattr(run, "fleet", lambda: nullcontext(fleet))
    endpoints = run.runtime.endpoints.model_copy(update={"scheduler_address": "tls://host:1"})
    run.runtime = run.runtime.model_copy(update={"endpoints": endpoints})
    files = [SimpleNamespace(path="model.safetensors", size=14 * GIB)]
    base = cast("Manifest", SimpleNamespace(model_id="acme/7b", version="1", files=files))
    refused = pytest.raises(InvalidInput, match=r"acme/7b 1.*evaluation\.tasks")
    with refused if known else nullcontext():
        require_one_process(run, base)


def test_a_note_says_what_stays_with_one_process() -> None:
    run = run_with()
    assert gang_of(run, ranks=2, tasks=True) is not None
    assert "tasks of lm-eval" in run.summary.notes[-1]
