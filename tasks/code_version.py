"""Which code a run used: the commit where there is one, and a digest of the installed sources."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import paceline


@cache
def code_version() -> str:
    """Return e.g. ``paceline 0.1.0, sources 3fa4…, commit 1a2b… (modified)``.

    The source digest is there in a wheel too, where no repository is.
    """
    digest = hashlib.sha256()
    root = Path(str(paceline.__file__)).parent
    # In a source tree `paceline/flows` and `paceline/tasks` are links, which rglob does not follow.
    for folder in (root, root / "flows", root / "tasks"):
        for path in sorted(folder.glob("**/*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return f"paceline {paceline.__version__}, sources {digest.hexdigest()[:16]}{_commit()}"


def _commit() -> str:
    root = Path(str(paceline.__file__)).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return ""  # git is not installed: the source digest says enough
    return f", commit {commit[:12]}{' (modified)' if changed else ''}"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
