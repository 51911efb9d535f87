"""Register the deployments of prefect.yaml and run a process worker for them.

``python -m flows.serve --state DIR --pool NAME`` is what an embedded installation runs; it replaces
itself with Prefect's own worker once the deployments are registered.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import flows


def prefect_file() -> Path:
    """Return prefect.yaml: the source tree's, or the copy in the wheel."""
    here = Path(str(flows.__file__)).parent
    for place in (here.parent / "prefect.yaml", here / "prefect.yaml"):
        if place.is_file():
            return place
    raise FileNotFoundError(f"prefect.yaml is missing beside {here}")


def main() -> int:
    """Create the pool, register every deployment, then become the worker."""
    parser = argparse.ArgumentParser(prog="flows.serve")
    parser.add_argument("--state", required=True)
    parser.add_argument("--pool", default="paceline")
    options = parser.parse_args()
    os.environ["PACELINE_STATE"] = options.state  # flow runs find the installation by it
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    create = ["work-pool", "create", options.pool, "--type", "process", "--overwrite"]
    deploy = ["deploy", "--all", "--prefect-file", str(prefect_file())]
    worker = ["worker", "start", "--pool", options.pool, "--type", "process"]
    for words in (create, deploy):
        done = subprocess.run([*prefect, *words], check=False)
        if done.returncode:
            return done.returncode
    return os.execv(sys.executable, [*prefect, *worker])  # never returns


if __name__ == "__main__":
    sys.exit(main())
