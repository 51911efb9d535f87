"""All that needs ranks, in one launch: right layouts, planted mistakes, hooks, precisions.

``main`` prints one JSON object: name of the job → what rank 0 answered; with the word ``nightly``,
those of ``NIGHTLY``. tests/training/parallel/test_same_losses.py holds it to its promises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.layouts.layouts import CPU, LAYOUTS, SINGLES, Layout, Run, batch_of, mesh
from benchmarks.layouts.ranks import Job, run_jobs
from benchmarks.same_losses import layout_job
from paceline.errors import InvalidInput
from paceline.models import new_model
from paceline.training.parallel import (
    MeshSpec,
    Pipelined,
    clipping,
    open_mesh,
    parallelise,
    sharded,
    timeout_of,
)
from paceline.training.parallel.context import HeadExchange

STEPS = 2
PRECISION = "float64"
RIGHT = (
    "dp2",
    "dp3, uneven shares",
    "shard2",
    "tp2",
    "tp2, whole sequences",
    "pp2",
    "pp2, GPipe",
    "pp4, 5 microbatches of 8 rows",
    "local SGD, step 1",
    "shard3, uneven shares, accumulation 2",
    "dp2, accumulation 3",
    "single, accumulation 3",
    "single, recomputed",
    "cp2",
    "dp2 x cp2, accumulation 2",
    "shard2 x cp2, recomputed",
    "untied cp2 x tp2",
    "untied tp2 x pp2",
)
STAGES = "shard2 x pp2"
NIGHTLY = {  # a part or a kind of each is in another job
    "dp2 x cp2, accumulation 2 float64",
    "shard2 x cp2, recomputed float64",
    "untied cp2 x tp2 float64",
    "untied tp2 x pp2 float64",
    "documents apart: shard2 x tp2, recomputed",
    "tp2, whole sequences float64",
    "shard2 x pp2 float16",
    "tp2 bfloat16",
    "shard2 bfloat16",
    "evaluated: shard2 x pp2",
    "evaluated: tp2",
    "evaluated: cp2",
    "hook: none",
    "hook: bf16",
    "documents apart: pp4, 5 microbatches of 8 rows",
    "shard3, uneven shares, accumulation 2 float64",
}
EVALUATED = ("single", "dp2", "shard2", "tp2", "cp2", "pp2", "shard2 x pp2")
BY_NAME = {each.name: each for each in (*SINGLES, *LAYOUTS)}


def planted(name: str, layout: str, around: Callable[[], object]) -> Job:
    """A layout with a mistake in it."""
    right = layout_job(BY_NAME[layout], PRECISION, STEPS)
    return dataclasses.replace(right, name=f"planted: {name}", around=around)


def apart(layout: str) -> Job:
    """A layout that attends to documents one by one: they are long enough for that here."""
    return dataclasses.replace(
        layout_job(BY_NAME[layout], PRECISION, STEPS),
        name=f"documents apart: {layout}",
        around=lambda: mock.patch.dict("paceline.models.attention.CALL_PAIRS", cpu=16),
    )


APART = ("single", "cp2", "shard2 x tp2, recomputed", "pp4, 5 microbatches of 8 rows")
PLANTED = (
    planted(
        "the tied embedding is not added up",
        "pp2",
        lambda: mock.patch.object(Pipelined, "_add_tied", lambda self: None),
    ),
    planted(
        "the tied embedding counts twice in the norm",
        "pp2",
        lambda: mock.patch.object(clipping, "clip", clip_all),
    ),
    planted(
        "copies of a tensor count each in the norm",
        "tp2",
        lambda: mock.patch.object(clipping, "copies", lambda parameter, mesh: 1),
    ),
    planted(
        "shards average instead of adding up",
        "shard2",
        lambda: mock.patch.object(sharded, "sharded_parts", lambda model: ()),
    ),
    planted(
        "parts of rows do not exchange their heads",
        "cp2",
        lambda: mock.patch.object(HeadExchange, "_swap", lambda self, part: part.contiguous()),
    ),
)
_clip = clipping.clip


def clip_all(parameters, mesh, max_norm, unscale=1.0, skipped=frozenset()):
    return _clip(parameters, mesh, max_norm, unscale)


def evaluated(name: str) -> Job:
    """Evaluate, train a step, evaluate again: the same numbers as a step's own loss."""
    layout = dataclasses.replace(BY_NAME[name], accumulation=1)

    def run() -> dict[str, object]:
        its = Run.of(layout, PRECISION)

        def mean(step: int) -> float:
            sums = its.parallel.evaluate(its.parts(step)[0])
            return its.mean(float(sums.loss), sums.weight)

        before = mean(0)
        (first,) = its.train(1)
        after = mean(1)
        shapes = {
            parameter_name: list(each.shape)
            for part in its.parallel.modules
            for parameter_name, each in part.named_parameters()
        }
        return {"before": before, "first": first, "after": after, "shapes": shapes}

    return Job(f"evaluated: {name}", layout.ranks, run)


def hooked(hook: str) -> Job:
    """Train two replicas that compress their gradients."""
    layout = Layout(f"dp2, {hook}", mesh(dp=2, hook=hook, powersgd_rank=1))

    def run() -> dict[str, object]:
        its = Run.of(layout, "float32")
        losses = its.train(14)
        parameters = [each for part in its.parallel.modules for each in part.parameters()]
        return {
            "losses": losses,
            "bytes": its.parallel.bytes_reduced,
            "gradient_bytes": 14 * sum(each.numel() * 4 for each in parameters),
        }

    return Job(f"hook: {hook}", 2, run)


def halved(name: str, precision: str) -> Job:
    """Train with products in half precision; masters must stay whole."""
    layout = BY_NAME[name]

    def run() -> dict[str, object]:
        its = Run.of(layout, precision)
        losses = its.train(STEPS)
        parameters = [each for part in its.parallel.modules for each in part.parameters()]
        types = {str(each.dtype) for each in parameters}
        types |= {str(each.grad.dtype) for each in parameters if each.grad is not None}
        return {"losses": losses, "types": sorted(types)}

    return Job(f"{name} {precision}", layout.ranks, run)


def sharded_stages() -> dict[str, object]:
    """Train shards of stages; look at both ends, and at how long each group waits for a rank."""
    its = Run.of(BY_NAME[STAGES], PRECISION)
    losses = its.train(STEPS)
    (stage,) = its.parallel.modules
    tied = stage.get_parameter("model.embed_tokens.weight")
    mine = hashlib.sha256(tied.to_local().detach().numpy().tobytes()).hexdigest()
    every: list[str] = [""] * 4
    dist.all_gather_object(every, mine)
    mesh = its.parallel._mesh
    rows = open_mesh(MeshSpec(shard=2, cp=2)).group("cp")
    groups = [dist.group.WORLD, rows, *(mesh.group(axis) for axis in mesh.spec.axes)]
    return {
        "losses": losses,
        "norms": its.norms,
        "ends_equal": every[:2] == every[2:],
        "shards_differ": every[0] != every[1],
        "timeouts_s": [timeout_of(each).total_seconds() for each in groups],
    }


def from_meta() -> dict[str, float]:
    """Build shards without values, load them by name, and take the loss of the first step."""
    layout = BY_NAME["tp2"]
    its = Run.of(layout, PRECISION)
    with torch.device("meta"):
        empty = new_model(layout.config, 0).__class__(layout.config)
    parallel = parallelise(empty, open_mesh(its.spec), its.settings, its.workload)
    whole = new_model(layout.config, 0).double().state_dict()
    with torch.no_grad():
        for part in parallel.modules:
            for name, each in part.named_parameters():
                assert isinstance(each, DTensor)
                each.copy_(distribute_tensor(whole[name], each.device_mesh, each.placements))
    loaded = dataclasses.replace(its, parallel=parallel)
    return {"loss": loaded.gradients(0), "norm": loaded.norms[0]}


def odd_sequence() -> dict[str, str]:
    """A row that tp does not divide is refused on every rank, before anything is sent."""
    its = Run.of(BY_NAME["tp2"], PRECISION)
    inputs = its.workload.inputs(batch_of(0), CPU)
    odd = dataclasses.replace(inputs, args=(inputs.args[0][:, :23],))
    try:
        its.parallel.accumulate([odd], 1.0)
    except InvalidInput as error:
        return {"refused": error.one_line()}
    return {}


def shorter_batches() -> dict[str, list[float]]:
    """Rows of another length, as length buckets have, through a pipeline."""
    found = []
    for layout in ("pp2", "single"):
        if layout == "single" and dist.get_rank() == 1:
            continue
        its = Run.of(BY_NAME[layout], PRECISION)
        for length in (24, 16, 24):
            batch = batch_of(length)
            inputs = its.workload.inputs(batch, CPU)
            cut = dataclasses.replace(
                inputs,
                args=(inputs.args[0][:, :length],),
                kwargs={name: each[:, :length] for name, each in inputs.kwargs.items()},
                targets=tuple(each[:, :length].contiguous() for each in inputs.targets),
            )
            sums = its.parallel.accumulate([cut], 1.0)
            loss = torch.tensor([float(sums.loss)], dtype=torch.float64)
            if layout == "pp2":
                dist.all_reduce(loss)
            found.append(float(loss))
    return {"staged": found[:3], "single": found[3:]}


def changing_shares() -> dict[str, list[float]]:
    """Shares of 5 and 3 rows, then 4 and 4: a new shape is tried on all ranks or on none."""
    found = []
    for layout in (STAGES, "single"):
        if layout == "single" and dist.get_rank() > 0:
            continue
        its = Run.of(BY_NAME[layout], PRECISION)
        for step, rows in enumerate((slice(0, 5), slice(0, 4), slice(0, 5))):
            taken = rows if its.parallel.data_rank == 0 else slice(rows.stop, None)
            taken = taken if layout != "single" else slice(None)
            inputs = its.workload.inputs(batch_of(step), CPU)
            share = dataclasses.replace(
                inputs,
                args=(inputs.args[0][taken],),
                kwargs={name: each[taken] for name, each in inputs.kwargs.items()},
                targets=tuple(each[taken] for each in inputs.targets),
            )
            its.parallel.accumulate([share], 1e-3)
            found.append(its.parallel.clip(1e9))
    return {"staged": found[:3], "single": found[3:]}


def jobs() -> list[Job]:
    return [
        *(layout_job(each, PRECISION, STEPS) for each in SINGLES),
        *(layout_job(BY_NAME[name], PRECISION, STEPS) for name in RIGHT),
        *PLANTED,
        *(apart(name) for name in APART),
        *(evaluated(name) for name in EVALUATED),
        layout_job(SINGLES[0], "float32", 14),
        *(hooked(hook) for hook in ("none", "fp16", "bf16", "powersgd")),
        *(halved(name, "bfloat16") for name in ("single", "dp2", "shard2", "tp2", "pp2")),
        halved("shard2 x pp2", "float16"),
        halved("single", "float16"),
        Job(f"{STAGES} {PRECISION}", 4, sharded_stages),
        Job("from meta", 2, from_meta),
        Job("odd sequence", 2, odd_sequence),
        Job("shorter batches", 2, shorter_batches),
        Job("changing shares", 4, changing_shares),
    ]


def main() -> None:
    nightly = sys.argv[1:] == ["nightly"]
    found = run_jobs([e for e in jobs() if (e.name in NIGHTLY) is nightly], deadline_s=200)
    answers = {each["job"]: each["answer"] | {"s": each["s"]} for each in found}
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
