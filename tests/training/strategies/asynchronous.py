"""Ranks of asynchronous jobs on random rows, forked from one process that holds torch.

Each line on standard input is a request: a list of specs starts one rank each (their pids are the
answer), a pid asks for its exit code (null: it runs). A rank appends JSON lines to its own file.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.models import config_for
from paceline.training.loop.workload import TransformerWorkload
from paceline.training.strategies.ranks import run_asynchronous
from paceline.training.strategies.rendezvous import FileClaims

CONTEXT = 16


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


def run(spec: dict[str, Any]) -> None:
    """Run one rank; say each update, then how it ended."""
    file = Path(spec["said"]).open("w", buffering=1)  # noqa: SIM115 - the process ends with it

    def say(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")

    settings = TrainingSettings.model_validate(spec["settings"])
    outcome = run_asynchronous(
        spec["rank"],
        spec["ranks"],
        TransformerWorkload(config_for(10_000, CONTEXT)),
        settings,
        share_of,
        addresses=[tuple(each) for each in spec["addresses"]],
        claims=FileClaims(Path(spec["claims"])),
        key="of-this-gang",
        deadline_s=90.0,
        silence_s=2.5,
        on_update=lambda update, loss: say(
            version=update.version, worker=update.worker, sequence=update.sequence,
            base=update.base, loss=loss,
        ),
    )  # fmt: skip
    told = vars(outcome.told) if outcome.told is not None else {}
    say(ended=outcome.role, led=outcome.led, at=outcome.version, told=told)


def start(spec: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(spec)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
        Path(f"{spec['said']}.error").write_text(traceback.format_exc())
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
