"""A node that fetches with aria2c when told: a torrent (and goes on seeding), or S3 objects by URL.

Reads its order (JSON), "go" and "end" from standard input; says {"ready"}, {"finished_at"} and
{"ended"}. A seeder starts at once and is ready when its tracker knows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LOOK_S = 0.02


def say(**what: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Take part."""
    order = json.loads(sys.stdin.readline())
    directory = Path(order["save_path"])
    done = Path(order["done"])
    argv = ["aria2c", "--dir", str(directory), "--quiet=true", "--no-conf=true", *order["options"]]
    if order["seed"]:
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr) as seeder:
            time.sleep(1.0)
            say(ready=True)
            sys.exit(seeder.wait())
    say(ready=True)
    sys.stdin.readline()
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr) as fetching:
        while not done.exists() and fetching.poll() is None:
            time.sleep(LOOK_S)
        if fetching.returncode:
            sys.exit(fetching.returncode)
        say(finished_at=time.time())
        sys.stdin.readline()
        if fetching.poll() is None:
            fetching.terminate()
    say(ended=True)


if __name__ == "__main__":
    main()
