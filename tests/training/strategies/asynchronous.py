"""Ranks of asynchronous jobs on random rows, forked from one process that holds torch.

Each line on standard input is a request: a list of specs starts one rank each (their pids are the
answer), a pid asks for its exit code (null: it runs). A rank appends JSON lines to its own file.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.models import config_for
from paceline.training.loop import TransformerWorkload
from paceline.training.parallel import SERVING
from paceline.training.strategies import (
    BatchReport,
    GradientComputer,
    Learner,
    ParameterServer,
    Rendezvous,
    Task,
    Terms,
    Update,
    Worker,
)

CONTEXT, WORKERS = 16, 2


def share_of(share: int, shares: int, first: int) -> Iterator[Batch]:
    """Two rows for each share of each step, a pure function of (share, step)."""
    step = first
    while True:
        rows = np.random.default_rng([share, step]).integers(97, 105, (2, CONTEXT + 1))
        rows = rows.astype(np.uint8)
        yield Batch(
            step=step,
            inputs_BT=rows[:, :-1],
            targets_BT=rows[:, 1:],
            weights_BT=np.ones((2, CONTEXT), np.float32),
            rows=range(2 * share, 2 * share + 2),
            global_tokens=float(2 * shares * CONTEXT),
        )
        step += 1


class Logging:
    """A policy that takes every gradient and logs it."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log

    def judge(self, report: BatchReport, norm: float) -> bool:
        return True

    def applied(self, update: Update) -> None:
        names = ("version", "worker", "sequence", "base")
        self._log(**{each: getattr(update, each) for each in names}, loss=update.report.loss)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Shares:
    """The batches of a share from a task on."""

    data_wait_s, position, quarantined = 0.0, None, {}

    def __init__(self, task: Task) -> None:
        self._batches = share_of(task.worker, WORKERS, task.sequence - 1)

    def next(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        pass


def run(spec: dict[str, Any]) -> None:
    """Run one rank; log each update, then how it ended."""
    file = Path(spec["log"]).open("w", buffering=1)  # noqa: SIM115 - the process ends with it

    def log(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")

    rank, settings = spec["rank"], TrainingSettings.model_validate(spec["settings"])
    timeout = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", spec["port"], None, False, timeout, wait_for_workers=False)
    meeting = Rendezvous(PrefixStore(spec["gang"], store))
    bound = settings.synchrony.max_staleness
    terms = Terms("of-this-gang", WORKERS, settings.steps, bound, silence_s=2.5)
    workload = TransformerWorkload(config_for(10_000, CONTEXT))
    model = workload.build()
    if rank >= SERVING:
        compute = GradientComputer(model, workload, settings, WORKERS, Shares)
        worker = Worker(rank - SERVING, meeting.servers, terms, compute)
        worker.run(compute)
        log(ended="worker", applied=len(worker.staleness), computed=worker.computed)
        return
    server = ParameterServer(Learner(model, settings, WORKERS), terms, meeting, Logging(log))
    with server.listening("127.0.0.1") as address:
        meeting.publish(rank, address)
        if rank == 0:
            server.lead()
        elif server.follow(meeting.servers, 60.0) == "released":
            return
        server.open()
        server.until_done()
    log(ended="leader", at=server.ledger.version)


def start(spec: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(spec)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
        Path(f"{spec['log']}.error").write_text(traceback.format_exc())
    os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, list):
            answer: Any = [start(each) for each in asked]
        else:
            pid, status = os.waitpid(asked, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
