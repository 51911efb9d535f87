"""One process on one node, in a process group of its own, followed to its end.

It tells by JSON lines, and nothing of it is left: at its deadline, on cancel, and when the caller
dies (the lease, see remote.py). What runs is an argv.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import WorkerLost
from paceline.fleet.claims import check_cancel
from paceline.fleet.crew import Crew, Member
from paceline.fleet.remote import Order
from paceline.text import printable

log = logging.getLogger(__name__)

TICK_S = 0.25
LAUNCH_DEADLINE_S = 20.0

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How a process ended."""

    exit_code: int  # negative: by that signal
    ended: Literal["exited", "deadline"]
    last_line: str | None  # of its standard output
    stderr_tail: str
    seconds: float


def run_process(
    fleet: Any,
    worker_id: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    input_json: str,
    on_event: OnEvent | None,
    deadline_s: float,
    cancel: threading.Event | None,
    grace_s: float,
) -> ProcessResult:
    """Run one process; see `Fleet.run_process`."""
    began = time.monotonic()
    process = Member(
        worker_id=worker_id,
        address=fleet._await_nodes([worker_id], 15.0)[worker_id],
        order=Order(
            process_id=f"process-{uuid.uuid4().hex[:12]}",
            argv=tuple(argv),
            env=dict(env),
            input_json=input_json,
            directory=str(fleet.runtime.node_dir(worker_id) / "work"),
        ),
    )
    crew = Crew(fleet, [process])
    ended: Literal["exited", "deadline"] = "exited"
    try:
        crew.start(LAUNCH_DEADLINE_S)
        while not process.over:
            deliver(crew.follow(TICK_S), on_event)
            check_cancel(cancel, worker_id)
            if time.monotonic() - began > deadline_s and not process.over:
                ended = "deadline"
                break
        if process.lost:
            raise WorkerLost(
                "the process was lost with its node", got=process.lost, where=worker_id
            )
    finally:
        crew.end(grace_s)
    code = process.news.exit_code
    return ProcessResult(
        exit_code=-9 if code is None else code,
        ended=ended,
        last_line=process.last_line,
        stderr_tail=process.news.stderr_tail,
        seconds=time.monotonic() - began,
    )


def deliver(lines: Sequence[tuple[Member, str]], on_event: OnEvent | None) -> None:
    """Hand each line that is a JSON object to ``on_event``; log the others."""
    for member, line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            log.info("%s: %s", member.worker_id, printable(line, 500))
        elif on_event is not None:
            on_event(event)
