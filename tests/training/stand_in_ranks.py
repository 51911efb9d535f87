"""Stand-ins for ranks: do as their input says, and speak as ranks do. Forked by a launcher."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time


def main() -> int:
    """Be one rank."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    orders = json.loads(sys.stdin.readline())
    spare = "PACELINE_SPARE" in os.environ
    if spare:
        _beat("spare", 0, once=True)
        os.environ.update(json.loads(sys.stdin.readline()))
        orders = json.loads(sys.stdin.readline())
    rank = int(os.environ["RANK"])
    mine = orders.get(str(rank), orders.get("all", {}))
    attempt = int(os.environ["PACELINE_ATTEMPT"])
    mine = mine.get(str(attempt), mine) if "1" in mine else mine
    stopped: list[int] = []  # not an Event: setting one in a handler can deadlock
    if mine.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    child = 0
    if mine.get("child"):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def say(event: str, step: int = 0, **data: object) -> None:
        line = {"event": event, "rank": rank, "attempt": attempt, "step": step, "data": data}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    say("started", pid=os.getpid(), child=child, spare=spare, world=os.environ["WORLD_SIZE"])
    if not mine.get("mute"):
        threading.Thread(target=_beat, args=("step", 3), daemon=True).start()
    for step in range(1, 1 + mine.get("steps", 3)):
        say("step", step, step_seconds=float(mine.get("pace_s", 0.01)))
        time.sleep(mine.get("pace_s", 0.01))
    if mine.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "fail" in mine:
        sys.stderr.write(mine["fail"] + "\n")
        return int(mine.get("code", 1))
    until = time.monotonic() + mine.get("wait_s", 0)
    while time.monotonic() < until:
        if stopped:
            say("failed", code="Stopped")
            return 143
        time.sleep(0.01)
    return 0


def _beat(phase: str, step: int, *, once: bool = False) -> None:
    began = time.monotonic()
    while True:
        since = time.monotonic() - began
        line = {"event": "beat", "phase": phase, "step": step, "since_s": since}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
        sys.stdout.flush()
        if once:
            return
        time.sleep(0.2)
