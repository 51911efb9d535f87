"""Register the deployments of prefect.yaml on their work pool: a one-shot of every installation.

``python -m flows.register [--state DIR]`` talks to the installation's own Prefect server; without
``--state`` to the one that ``PREFECT_API_URL`` names. Safe to run again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import flows
from paceline.profile import load_runtime

POOL = "paceline"


def prefect_file() -> Path:
    """Return prefect.yaml: the source tree's, or the copy in the wheel."""
    here = Path(str(flows.__file__)).parent
    for place in (here.parent / "prefect.yaml", here / "prefect.yaml"):
        if place.is_file():
            return place
    raise FileNotFoundError(f"prefect.yaml is missing beside {here}")


def main() -> int:
    """Create the pool and register every deployment; return Prefect's own exit code."""
    parser = argparse.ArgumentParser(prog="flows.register")
    parser.add_argument("--state")
    options = parser.parse_args()
    environment = dict(os.environ)
    if options.state:
        environment |= load_runtime(options.state).prefect_environment()
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    create = ["work-pool", "create", POOL, "--type", "process", "--overwrite"]
    deploy = ["deploy", "--all", "--prefect-file", str(prefect_file())]
    for words in (create, deploy):
        done = subprocess.run([*prefect, *words], check=False, env=environment)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
