"""A stand-in for a node's launcher: echoes each order, and does a few of them."""

import json
import os
import sys
import time

sys.stdout.write(json.dumps({"launcher": "ready", "pid": os.getpid()}) + "\n")
sys.stdout.flush()
for line in sys.stdin:
    order = json.loads(line)
    if order.get("do") == "exit":
        sys.stderr.write("as told\n")
        sys.exit(3)
    if order.get("do") == "sleep":
        time.sleep(600)
    sys.stdout.write(json.dumps({"launcher": "echo", **order}) + "\n")
    sys.stdout.flush()
