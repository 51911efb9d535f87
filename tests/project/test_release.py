"""A release is built from its tag, twice the same, with a list of its parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def git(tree: Path, *words: str) -> None:
    named = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "tag.gpgSign=false"]
    subprocess.run(["git", *named, *words], cwd=tree, check=True, capture_output=True)


def release(tree: Path) -> subprocess.CompletedProcess[str]:
    script = tree / "deployments" / "release.py"
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of its own."""
    made = tmp_path / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    made.mkdir()
    subprocess.run(
        f"tar -c --null --no-recursion --ignore-failed-read -T - | tar -x -C {made}",
        shell=True, cwd=ROOT, input=files, check=True,
    )  # fmt: skip
    git(made, "init", "--quiet")
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "-m", "All")
    return made


@pytest.mark.nightly
def test_a_tag_becomes_the_same_files_each_time(tree: Path) -> None:
    refused = release(tree)
    assert refused.returncode != 0
    assert re.search(r"tag: got none .*wanted v\d.*CHANGELOG.md: got no entry", refused.stderr)

    changes = tree / "CHANGELOG.md"
    version = re.search(r'(?m)^version = "(.*)"', (tree / "pyproject.toml").read_text())
    assert version is not None
    changes.write_text(changes.read_text() + f"\n## {version[1]}\n")
    git(tree, "commit", "--quiet", "--all", "-m", "Release")
    git(tree, "tag", f"v{version[1]}")
    first = release(tree)
    assert first.returncode == 0, first.stderr
    assert release(tree).stdout == first.stdout
    names = [line.split()[1] for line in first.stdout.splitlines()]
    assert sorted(Path(each).suffix for each in names) == [".gz", ".json", ".whl"]
    (wheel,) = (tree / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "paceline/cli/main.py", "paceline/py.typed", "paceline/_profiles/embedded.toml",
        "paceline/_profiles/models/pylm/config.json",
        "paceline/_kubernetes/dask.yaml",
        "paceline/flows/lifecycle.py", "paceline/flows/prefect.yaml",
        "paceline/tasks/_support/run.py",
    } <= held  # fmt: skip
    tops = {name.partition("/")[0] for name in held}
    assert {each for each in tops if not each.endswith(".dist-info")} == {"paceline"}
    listed = json.loads((tree / "dist" / f"paceline-{version[1]}.cdx.json").read_text())
    parts = {each["name"]: each for each in listed["components"]}
    assert {"boto3", "blake3", "torch", "prefect", "dask"} <= parts.keys()
    assert {"pytest", "ruff"}.isdisjoint(parts)
    assert all(each["hashes"] and each["properties"] for each in parts.values())

    changes.write_text(changes.read_text() + "\n")
    assert "tree: got changes in CHANGELOG.md" in release(tree).stderr
