"""A stand-in for a server: listens, or misbehaves as told, with a child in a session of its own."""

import argparse
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--ready", type=Path)
parser.add_argument("--marker", default="")  # only to be found by, in the list of processes
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--fail", default="")
parser.add_argument("--crash-once", type=Path)
parser.add_argument("--order", type=Path)
options = parser.parse_args()
if options.fail:
    sys.exit(options.fail)
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif options.order:

    def stop(*_: object) -> None:
        with options.order.open("a") as file:
            file.write(options.marker.rsplit("/", 1)[-1] + "\n")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
again = [sys.executable, "-S", "-c", "import time; time.sleep(600)", options.marker]
subprocess.Popen(again, start_new_session=True)
if options.port:
    server = socket.create_server(("127.0.0.1", options.port))
if options.ready:
    options.ready.write_text("ready")
if options.crash_once and not options.crash_once.exists():
    options.crash_once.write_text("crashed")
    time.sleep(0.3)
    sys.exit("crashed on purpose")
time.sleep(600)
