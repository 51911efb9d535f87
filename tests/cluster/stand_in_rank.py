"""A stand-in for a rank: does as its standard input says, and tells by JSON lines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

orders = json.load(sys.stdin)
rank = int(os.environ.get("RANK", "0"))
mine = orders.get(str(rank), orders.get("all", {}))


def say(event: str, **data: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "rank": rank, "data": data}) + "\n")
    sys.stdout.flush()


if mine.get("mute"):
    time.sleep(600)
if mine.get("ignore_term"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = 0
if mine.get("child"):  # a grandchild in a session of its own: only a subreaper finds it
    child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
if mine.get("listen"):
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
kept = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PACELINE_ATTEMPT")
say("started", pid=os.getpid(), child=child, **{each: os.environ.get(each) for each in kept})
for number in range(mine.get("lines", 0)):
    say("step", number=number)
time.sleep(mine.get("sleep", 0))
if mine.get("hang"):
    sys.stderr.write("about to hang\n")
    time.sleep(600)
if mine.get("stop"):
    os.kill(os.getpid(), signal.SIGSTOP)
if mine.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
until = time.monotonic() + mine.get("beat_s", 0)
while time.monotonic() < until:
    say("beat")
    time.sleep(0.1)
if "fail" in mine:
    sys.stderr.write(mine["fail"] + "\n")
    sys.exit(1)
