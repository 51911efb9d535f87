"""One wheel carries everything that a scheduler, a worker and a Prefect process must import."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_flows_tasks_profiles_and_deployments(tmp_path: Path) -> None:
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("paceline-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "paceline/cli/main.py", "paceline/py.typed", "paceline/_profiles/embedded.toml",
        "paceline/flows/lifecycle.py", "paceline/flows/prefect.yaml", "paceline/tasks/run.py",
    } <= names  # fmt: skip
    tops = {name.partition("/")[0] for name in names}
    assert {each for each in tops if not each.endswith(".dist-info")} == {"paceline"}
