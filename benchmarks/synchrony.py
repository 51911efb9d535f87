"""Speed against accuracy: what replicas gain by sending less or waiting less, and what it costs.

The same model, the same text, the same tokens, two replicas: gradients averaged at every step as
they are, as fp16, bf16 and PowerSGD; local SGD that averages weights every 1, 4 and 16 steps; and
an asynchronous parameter server with its standby. For each: tokens a second, bytes that a replica
gave to the network a step, and bits per byte on held-out text after the last step.

    python benchmarks/synchrony.py [--parameters 200000] [--steps 200] [--repeats 3]
    python benchmarks/synchrony.py --plot

On one machine the network is loopback: bytes travel to a slower one, seconds do not.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import math
import os
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.models import config_for, count_parameters
from paceline.training.loop import Progress, TransformerWorkload, join_group, new_optimizer, train
from paceline.training.parallel import SERVING, Mesh, MeshSpec, open_mesh, parallelise
from paceline.training.strategies import (
    BatchReport,
    GradientComputer,
    Learner,
    LocalSgd,
    ParameterServer,
    Rendezvous,
    Task,
    Terms,
    Update,
    Worker,
)
from paceline.training.strategies.local_sgd import local_sgd

RESULTS = Path(__file__).parent / "results"
REPLICAS = 2
Settings = dict[str, Any]
METHODS: dict[str, Settings] = {
    "every step": {},
    "every step, fp16": {"mesh": {"hook": "fp16"}},
    "every step, bf16": {"mesh": {"hook": "bf16"}},
    "every step, PowerSGD": {"mesh": {"hook": "powersgd"}},
    "local SGD, 1 step": {"synchrony": {"kind": "local-sgd", "local_steps": 1}},
    "local SGD, 4 steps": {"synchrony": {"kind": "local-sgd", "local_steps": 4}},
    "local SGD, 16 steps": {"synchrony": {"kind": "local-sgd", "local_steps": 16}},
    "parameter server": {"synchrony": {"kind": "parameter-server", "max_staleness": 4}},
}


class Text:
    """Windows of the standard library's text: a global batch is a function of the step."""

    def __init__(self, asked: argparse.Namespace, share: int = 0, shares: int = 1) -> None:
        self._bytes, self._asked = library(asked.quick), asked
        self._share, self._shares = share, shares
        self._step = 0
        self.data_wait_s: float = 0.0
        self.quarantined: dict[str, str] = {}
        self.global_batch, self.context = asked.batch, asked.context

    @property
    def position(self) -> dict[str, Any]:
        """Return where the stream stands."""
        return {"step": self._step}

    def next(self) -> Batch:
        """Return this share of the next global batch."""
        self._step += 1
        return self.batch(self._step - 1)

    def batch(self, step: int, *, held_out: bool = False) -> Batch:
        """Return this share of global batch ``step``; the text's last tenth is held out."""
        edge = len(self._bytes) * 9 // 10
        low, high = (edge, len(self._bytes)) if held_out else (0, edge)
        draw = np.random.default_rng([held_out, step])
        starts = draw.integers(low, high - self.context - 1, self.global_batch)
        rows = range(
            self.global_batch * self._share // self._shares,
            self.global_batch * (self._share + 1) // self._shares,
        )
        tokens = np.stack(
            [self._bytes[s : s + self.context + 1] for s in starts[rows.start : rows.stop]]
        )
        return Batch(
            step=step,
            inputs_BT=tokens[:, :-1],
            targets_BT=tokens[:, 1:],
            weights_BT=np.ones((len(rows), self.context), np.float32),
            rows=rows,
            global_tokens=float(self.global_batch * self.context),
        )

    def close(self) -> None:
        """Nothing to end: there are no threads."""

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def library(quick: bool) -> np.ndarray:
    """Return some of the standard library's text."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))[: 20 if quick else 200]
    return np.frombuffer(b"\xff".join(each.read_bytes() for each in files), np.uint8)


def settings_of(asked: argparse.Namespace, method: str) -> TrainingSettings:
    """Return the recipe: the same for all but what the method changes."""
    plain = {
        "ranks": REPLICAS,
        "steps": asked.steps,
        "batch_sequences": asked.batch,
        "learning_rate": 3e-3,
        "warmup_steps": asked.steps // 20,
        "guard": {"spike_factor": 1e9},
    }
    return TrainingSettings.model_validate(plain | METHODS[method])


def replica(rank: int, port: int, asked: argparse.Namespace, method: str) -> dict[str, Any]:
    """Train as one of two replicas that go step by step (or some steps alone)."""
    settings = settings_of(asked, method)
    workload = TransformerWorkload(config_for(asked.parameters, asked.context))
    with join_group(rank, REPLICAS, "127.0.0.1", port, 1, asked.deadline_s) as group:
        mesh = open_mesh(MeshSpec(dp=REPLICAS))
        spread = local_sgd if settings.synchrony.kind == "local-sgd" else parallelise
        parallel = spread(workload.build(), mesh, settings, workload)
        optimizer = new_optimizer(parallel.modules, settings)
        if isinstance(parallel, LocalSgd):
            parallel.follow(optimizer, 0)
        group.sums([0.0])  # start together
        started = time.perf_counter()
        with Text(asked, rank, REPLICAS) as stream:
            train(parallel, workload, optimizer, stream, settings, group, progress=Progress())
        if isinstance(parallel, LocalSgd):
            parallel.average()
        seconds = time.perf_counter() - started
        sent = parallel.bytes_reduced
    return {
        "seconds": seconds,
        "bytes": sent,
        "bits_per_byte": score(asked, workload, parallel.modules[0]),
    }


class Timing:
    """A policy that takes every gradient and notes when."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def judge(self, report: BatchReport, norm: float) -> bool:  # noqa: ARG002
        """Take it."""
        return True

    def applied(self, update: Update) -> None:  # noqa: ARG002
        """Note when."""
        self.moments.append(time.perf_counter())

    def state(self) -> dict[str, Any]:
        """Nothing needs to be shared with the standby."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing was shared."""


class Share(Text):
    """A worker's share of the text from a task on."""

    def __init__(self, asked: argparse.Namespace, task: Task) -> None:
        super().__init__(asked, task.worker, REPLICAS)
        self._step = task.sequence - 1


def asynchronous(rank: int, port: int, asked: argparse.Namespace, method: str) -> dict[str, Any]:
    """Run one rank of the parameter server's job: 0 serves, 1 stands by, the others work."""
    settings = settings_of(asked, method)
    workload = TransformerWorkload(config_for(asked.parameters, asked.context))
    timeout = timedelta(seconds=asked.deadline_s)
    meeting = Rendezvous(TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False))
    bound = settings.synchrony.max_staleness
    terms = Terms("benchmark", REPLICAS, settings.steps, bound, silence_s=30.0)
    model = workload.build()
    if rank >= SERVING:
        open_share = functools.partial(Share, asked)
        compute = GradientComputer(model, workload, settings, REPLICAS, open_share)
        worker = Worker(rank - SERVING, meeting.servers, terms, compute)
        worker.run(compute)
        return {
            "bytes": worker.computed * 2 * 4 * compute.count,  # weights one way, gradient back
            "staleness": statistics.fmean(worker.staleness),
        }
    timing = Timing()
    server = ParameterServer(Learner(model, settings, REPLICAS), terms, meeting, timing)
    with server.listening("127.0.0.1") as address:
        meeting.publish(rank, address)
        if rank == 0:
            server.lead()
        elif server.follow(meeting.servers, asked.deadline_s) == "released":
            return {}
        server.open()
        server.until_done()
    # From the first update, so that starting processes does not count; the first is added back.
    moments = timing.moments
    seconds = (moments[-1] - moments[0]) * len(moments) / (len(moments) - 1)
    return {"seconds": seconds, "bits_per_byte": score(asked, workload, model)}


def score(asked: argparse.Namespace, workload: TransformerWorkload, model: Any) -> float:
    """Return bits per byte on held-out text."""
    text, nats, weight = Text(asked), 0.0, 0.0
    parallel = parallelise(model, Mesh(MeshSpec()), TrainingSettings(), workload)
    for step in range(asked.held_out):
        batch = text.batch(step, held_out=True)
        sums = parallel.evaluate(workload.inputs(batch, torch.device("cpu")))
        nats, weight = nats + float(sums.loss), weight + sums.weight
    return nats / weight / math.log(2)


# ---------------------------------------------------------------------------------- the processes


def together(bodies: list[Callable[[], dict[str, Any]]], deadline_s: float) -> list[dict[str, Any]]:
    """Run each body in a forked process of its own; return what they return.

    Exits with their tracebacks where one fails; one that is not done in time prints its stacks.
    """
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="synchrony-") as scratch:
        files = [Path(scratch) / str(number) for number in range(len(bodies))]
        pids = [_fork(body, file, deadline_s) for body, file in zip(bodies, files, strict=True)]
        failed = False
        running = set(pids)
        while running:  # in the order they end: the others may wait for one that failed
            pid, status = os.wait()
            running.discard(pid)
            if status and not failed:
                failed = True
                for other in running:
                    os.kill(other, 15)
        found = [json.loads(each.read_text()) if each.exists() else {} for each in files]
    errors = [each["error"] for each in found if "error" in each]
    if failed or errors:
        sys.exit("\n".join(errors) or "a rank was killed")
    return found


def _fork(body: Callable[[], dict[str, Any]], file: Path, deadline_s: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.dump_traceback_later(deadline_s + 5, exit=True)
    try:
        file.write_text(json.dumps(body()))
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
        file.write_text(json.dumps({"error": traceback.format_exc()}))
    os._exit(code)


def once(asked: argparse.Namespace, method: str) -> dict[str, Any]:
    """Run ``method`` once, and return its figures."""
    timeout = timedelta(seconds=asked.deadline_s)
    if METHODS[method].get("synchrony", {}).get("kind") == "parameter-server":
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        body, ranks, port = asynchronous, REPLICAS + SERVING, store.port
    else:
        with socket.create_server(("127.0.0.1", 0)) as held:
            body, ranks, port = replica, REPLICAS, held.getsockname()[1]
    calls = [functools.partial(body, rank, port, asked, method) for rank in range(ranks)]
    said = together(calls, asked.deadline_s)
    first = next(each for each in said if "seconds" in each)
    tokens = asked.steps * asked.batch * asked.context
    working = [each for each in said if "bytes" in each]
    return {
        "tokens_per_second": tokens / first["seconds"],
        "bits_per_byte": first["bits_per_byte"],
        "bytes_a_step": statistics.fmean(each["bytes"] for each in working) / asked.steps,
    } | {
        name: statistics.fmean(each[name] for each in working)
        for name in ("staleness",)
        if name in working[0]
    }


def plot(results: Path) -> None:
    """Draw the newest result: speed against bits per byte, with bytes a step beside each point."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    record = json.loads((results / "synchrony.json").read_text())
    figure, axes = plt.subplots(figsize=(8, 5))
    for row in record["rows"]:
        axes.plot(row["tokens_per_second"], row["bits_per_byte"], "o")
        label = f"{row['method']}, {row['bytes_a_step'] / 1024:.0f} KiB"
        axes.annotate(
            label,
            (row["tokens_per_second"], row["bits_per_byte"]),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set(
        xlabel="tokens a second, two replicas on one machine",
        ylabel="bits per byte on held-out text, after the same tokens",
        title=f"{record['parameters']:,} parameters, {record['steps']} steps; KiB sent a step",
    )
    axes.margins(x=0.25)
    figure.tight_layout()
    figure.savefig(results / "synchrony.svg")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run every method, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=32, help="batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--plot", action="store_true", help="only draw the result there is")
    asked = parser.parse_args(arguments)
    if asked.plot:
        plot(asked.results)
        return {}
    asked.deadline_s = 240.0 if asked.quick else 1800.0
    if asked.quick:
        asked.parameters, asked.context, asked.batch = 10_000, 16, 4
        asked.steps, asked.held_out, asked.repeats = 4, 1, 1
    torch.set_num_threads(1)  # before forking: a thread pool would not survive it
    runs: dict[str, list[dict[str, Any]]] = {each: [] for each in METHODS}
    for _ in range(asked.repeats):
        for method in METHODS:
            runs[method].append(once(asked, method))
    rows = [
        {"method": method}
        | {name: statistics.median(each[name] for each in found) for name in found[0]}
        for method, found in runs.items()
    ]
    record: dict[str, Any] = {
        "benchmark": "synchrony",
        "parameters": count_parameters(config_for(asked.parameters, asked.context)),
        "context": asked.context,
        "batch": asked.batch,
        "steps": asked.steps,
        "repeats": asked.repeats,
        "replicas": REPLICAS,
        "rows": rows,
    }
    for row in rows:
        sys.stderr.write(
            f"{row['method']:<22} {row['tokens_per_second']:9.0f} tokens/s  "
            f"{row['bytes_a_step'] / 1024:9.1f} KiB/step  {row['bits_per_byte']:.4f} bits/byte\n"
        )
    if not asked.quick:
        asked.results.mkdir(parents=True, exist_ok=True)
        (asked.results / "synchrony.json").write_text(json.dumps(record, indent=1) + "\n")
        plot(asked.results)
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main(sys.argv[1:])
