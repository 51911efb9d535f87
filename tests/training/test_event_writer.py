"""A rank's lines are whole, whatever a user's own code prints in its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from paceline.training.loop import (
    MAX_PRINTED_CHARACTERS,
    MAX_PRINTED_LINES_PER_MINUTE,
    EventWriter,
    RankIdentity,
    StdoutCapture,
)

PROGRAM = """
import os
from paceline.training.loop.event_writer import RankIdentity, EventWriter
events = EventWriter(RankIdentity(1, 2, "127.0.0.1", 0, 3, "node-1"))
events.capture_stdout()
print("loading", end="")
events.emit("started")
print(" done\\nshape", (3, 4))
os.write(1, b"from C")
events.emit("result", 7)
"""


def test_what_is_printed_becomes_events_and_never_part_of_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["event"], each["data"].get("text")) for each in found] == [
        ("started", None), ("said", "loading done"), ("said", "shape (3, 4)"), ("result", None)
    ]  # fmt: skip
    assert {(each["rank"], each["attempt"]) for each in found} == {(1, 3)}
    assert done.stderr == "from C"


def test_prints_without_end_are_cut_and_counted() -> None:
    class Heard(EventWriter):
        def __init__(self) -> None:
            super().__init__(RankIdentity(0, 1, "", 0, 1, "n"))
            self.said: list[str] = []

        def emit(self, event: Any, step: int = 0, **data: object) -> None:
            self.said.append(str(data["text"]))

    events, now = Heard(), [0.0]
    printed = StdoutCapture(events, clock=lambda: now[0])
    print("x" * 10_000, file=printed)
    assert len(events.said[0]) == MAX_PRINTED_CHARACTERS
    for number in range(2 * MAX_PRINTED_LINES_PER_MINUTE):
        print(number, file=printed)
    assert len(events.said) == MAX_PRINTED_LINES_PER_MINUTE
    now[0] = 61.0
    print("later", end="", file=printed)
    print("\n", file=printed)
    assert events.said[-2:] == [
        f"({MAX_PRINTED_LINES_PER_MINUTE + 1} more lines were printed)",
        "later",
    ]
