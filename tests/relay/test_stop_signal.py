"""A request to stop always arrives, at whatever instant its signal comes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.relay import SignalEvent

DEADLINE_S = 30.0

# A signal before each line that waiting runs, one after the other: a handler that wants a lock
# which the interrupted thread holds never returns.
INTERRUPTED_AT_EVERY_LINE = """
import os, signal, sys
from paceline.relay import process as lifetime

lines = due = 0

def at(frame, event, _):
    global lines
    lines += event == "line"
    if event == "line" and lines == due:
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
    return at

stop = lifetime.StopSignal()
os.write(1, b"r")
for due in range(1, 80):
    stop._event, lines = lifetime.SignalEvent(), 0
    sys.settrace(at)
    stop.wait(0.001)
    sys.settrace(None)
    assert stop.wait(0) or lines < due
    if lines < due:
        break
assert due > 5, due
os.write(1, b".")
"""


def child(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"r"
    return process


def test_a_signal_before_any_line_of_the_waiting_is_heard() -> None:
    process = child(INTERRUPTED_AT_EVERY_LINE)
    try:
        assert process.communicate(timeout=DEADLINE_S)[0] == b"."
        assert process.returncode == 0
    finally:
        process.kill()


def test_everybody_who_waits_is_let_go_and_it_stays_set() -> None:
    event, let_go = SignalEvent(), []
    waiting = [
        threading.Thread(target=lambda: let_go.append(event.wait(DEADLINE_S))) for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    assert not event.wait(0.01)
    event.set()
    event.set()
    for thread in waiting:
        thread.join()
    assert let_go == [True] * 3
    assert event.is_set()
    assert event.wait(0)
    with pytest.raises(RuntimeError, match="taken back"):
        event.clear()


def test_its_descriptors_go_with_it() -> None:
    def open_now() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_now()
    for _ in range(100):
        SignalEvent().set()
    assert open_now() == before
