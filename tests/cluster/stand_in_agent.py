"""A stand-in for `paceline agent`: listens, announces itself in agent.json, waits."""

import argparse
import json
import os
import socket
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--state", type=Path, required=True)
parser.add_argument("--worker-id", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--rack", required=True)
parser.add_argument("--listen", required=True)
parser.add_argument("--die-with-parent", action="store_true")
options = parser.parse_args()
directory = options.state / "nodes" / options.worker_id
directory.mkdir(parents=True, exist_ok=True)
path = directory / "agent.json"
before = json.loads(path.read_text())["incarnation"] if path.exists() else 0
host, port = options.listen.split(":")
listener = socket.create_server((host, int(port)))
announcement = {
    "pid": os.getpid(),
    "address": f"127.0.0.1:{listener.getsockname()[1]}",
    "incarnation": before + 1,
}
temporary = path.with_suffix(".tmp")
temporary.write_text(json.dumps(announcement))
temporary.replace(path)
listener.settimeout(1)
while True:
    try:
        listener.accept()[0].close()
    except TimeoutError:
        time.sleep(0.01)
