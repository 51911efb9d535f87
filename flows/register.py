"""Register the deployments of prefect.yaml on their work pool: a one-shot of every installation.

``python -m paceline.flows.register [--state DIR]`` calls the installation's own Prefect server;
without ``--state`` the one that ``PREFECT_API_URL`` names. Safe to run again: an installation that
has been given this very file keeps what a person changed since (a schedule that was switched on).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import paceline
from paceline import flows
from paceline.config import load_runtime

POOL = "paceline"
DEADLINE_S = 300.0  # of each command; both together take some 10 s
STAMP = "registered"  # beside Prefect's database, so that both go together


def prefect_file() -> Path:
    """Return prefect.yaml: the source tree's, or the copy in the wheel."""
    here = Path(str(flows.__file__)).resolve().parent
    for place in (here.parent / "prefect.yaml", here / "prefect.yaml"):
        if place.is_file():
            return place
    raise FileNotFoundError(f"prefect.yaml is missing beside {here}")


def main() -> int:
    """Create the pool and register every deployment; return Prefect's own exit code."""
    parser = argparse.ArgumentParser(prog="paceline.flows.register")
    parser.add_argument("--state")
    options = parser.parse_args()
    environment = dict(os.environ)
    stamp: Path | None = None
    if options.state:
        runtime = load_runtime(options.state)
        environment |= runtime.prefect_environment()
        stamp = runtime.state_dir / "prefect" / STAMP
        if stamp.is_file() and stamp.read_text() == _content():
            return 0
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    create = ["work-pool", "create", POOL, "--type", "process", "--overwrite"]
    deploy = ["deploy", "--all", "--prefect-file", str(prefect_file())]
    for words in (create, deploy):
        done = subprocess.run([*prefect, *words], check=False, env=environment, timeout=DEADLINE_S)
        if done.returncode:
            return done.returncode
    if stamp is not None:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(_content())
    return 0


def _content() -> str:
    """Return what a registration depends on: the file, and where Python and Paceline are."""
    text = prefect_file().read_bytes() + f"\0{sys.prefix}\0{paceline.__version__}".encode()
    return hashlib.sha256(text).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
