"""Build a release from a tag: wheel, sdist, a list of all parts (SBOM) and their SHA-256.

    git tag v0.2.0 && make release          (writes dist/)

The tag, the version in pyproject.toml and an entry of CHANGELOG.md must agree, and the tree must be
clean. The wheel is built from the tree and again from the sdist; a difference is an error. Building
the same tag again, on another machine, gives the same bytes: times come from the commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def git(*words: str) -> str:
    """Return what git prints for the tree."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def checked_version() -> str:
    """Return the version to release; exit with what disagrees."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tags = git("tag", "--points-at", "HEAD").split()
    wrong = []
    if f"v{version}" not in tags:
        wrong.append(f"tag: got {tags or 'none'} at HEAD, wanted v{version} (pyproject.toml)")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        wrong.append(f"tree: got changes in {changed.split()[1]}, wanted a clean checkout")
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        wrong.append(f"CHANGELOG.md: got no entry, wanted a section '## {version}'")
    if wrong:
        sys.exit("release: " + "; ".join(wrong))
    return version


def build(tree: Path, into: Path, kind: str) -> Path:
    """Build ``kind`` (wheel or sdist) of ``tree``; return the file."""
    epoch = git("log", "-1", "--format=%ct")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)],
        cwd=tree,
        env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (made,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def components() -> list[dict[str, object]]:
    """Return every locked distribution of a release with its digests, as CycloneDX components."""
    found: dict[str, dict[str, object]] = {}
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        if lock.stem in ("dev", "bootstrap", "torch-cpu"):
            continue  # not part of what a user runs
        for block in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text()):
            if (pin := PIN.match(block)) is None:
                continue
            name, version = pin.groups()
            entry = found.setdefault(
                f"{name}=={version}",
                {
                    "type": "library",
                    "name": name,
                    "version": version,
                    "purl": f"pkg:pypi/{name.lower()}@{version}",
                    # of each wheel that the lock accepts, one a platform
                    "hashes": [{"alg": "SHA-256", "content": each} for each in HASH.findall(block)],
                    "properties": [],
                },
            )
            properties = entry["properties"]
            assert isinstance(properties, list)
            properties.append({"name": "paceline:lock", "value": lock.name})
    return list(found.values())


def main() -> int:
    """Check, build, compare and list; return the exit code."""
    version = checked_version()
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for old in dist.iterdir():
        old.unlink()
    sdist, wheel = build(ROOT, dist, "sdist"), build(ROOT, dist, "wheel")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        again = build(next(Path(scratch).iterdir()), Path(scratch), "wheel")
        if again.read_bytes() != wheel.read_bytes():
            sys.exit("release: the wheel of the sdist differs from the wheel of the tree")
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "paceline", "version": version}},
        "components": components(),
    }
    (dist / f"paceline-{version}.cdx.json").write_text(json.dumps(bom, indent=1) + "\n")
    sums = [
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in sorted(dist.iterdir())
    ]
    (dist / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    sys.stdout.write("\n".join(sums) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
