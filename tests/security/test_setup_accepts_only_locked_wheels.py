"""`make setup` installs the wheels that the lock files name by SHA-256, from one index."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+)(?: ; (.*?))? \\\n"
    r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+",
    re.MULTILINE,
)


def pins(lock: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each project of a lock: normalised name, version, marker."""
    for name, version, marker in PIN.findall(lock.read_text()):
        yield normalised(name), version, marker


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "lock", [*LOCKS, *ROOT.glob("benchmarks/peers/*.lock")], ids=lambda lock: lock.name
)
def test_a_lock_holds_versions_and_hashes_alone(lock: Path) -> None:
    assert PIN.sub("", lock.read_text()) == "", "a line that is no pin with SHA-256 hashes"


def test_this_environment_holds_nothing_that_no_lock_names() -> None:
    locked = {
        name: version
        for lock in LOCKS
        for name, version, marker in pins(lock)
        if lock.name != "torch.lock" and (not marker or Marker(marker).evaluate())
    }
    installed = {normalised(each.name): each.version for each in importlib.metadata.distributions()}
    for own in ("paceline", "pip", "torch"):  # torch: one build of the version, tested below
        installed.pop(own, None)
    locked.pop("torch")
    assert {name: locked.get(name) for name in installed} == installed


def test_both_locks_of_torch_name_one_version() -> None:
    (default,) = pins(ROOT / "requirements" / "torch.lock")
    (cpu,) = pins(ROOT / "requirements" / "torch-cpu.lock")
    assert cpu[1] == f"{default[1]}+cpu"
    assert importlib.metadata.version("torch").partition("+")[0] == default[1]


def test_every_dependency_of_the_project_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    named = [
        *project["project"]["dependencies"], *(each for extra in extras for each in extra),
        *project["dependency-groups"]["dev"],
    ]  # fmt: skip
    locked = {name: version for lock in LOCKS for name, version, _ in pins(lock)}
    for each in map(Requirement, named):
        if each.name == "paceline":  # an extra of extras
            continue
        version = locked[normalised(each.name)]
        assert each.specifier.contains(version), f"{each} is locked at {version}: run `make lock`"


def test_the_oldest_python_gets_what_the_wheels_need() -> None:
    """A project may have a version for each Python: Debian's is 3.11.2."""
    oldest = {"python_full_version": "3.11.0", "python_version": "3.11", "extra": ""}
    locked = {
        name
        for lock in LOCKS
        for name, _, marker in pins(lock)
        if not marker or Marker(marker).evaluate(oldest)
    }
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    given_up = {normalised(Requirement(e).name) for e in overrides["override-dependencies"]}
    lacking = {
        f"{dist.name} needs {each.name}"
        for dist in importlib.metadata.distributions()
        for each in map(Requirement, dist.requires or ())
        if (each.marker is None or each.marker.evaluate(oldest))
        and normalised(each.name) not in locked | given_up
    }
    assert not lacking


class Shop:
    """A folder with a script and locks like ours, an index of hand-made wheels, an environment."""

    def __init__(self, root: Path) -> None:
        self.root, self.venv = root, root / "env"
        self.locks = root / "requirements"
        self.locks.mkdir()
        shutil.copy(ROOT / "requirements" / "install.sh", self.locks)
        venv.create(self.venv, with_pip=False)
        self.lock("torch", self.wheel("index", "torch", "2.0"))
        self.lock("torch-cpu", self.wheel("cpu", "torch", "2.0+cpu"))
        self.lock("base", self.wheel("index", "cargo", "1.0"))

    def wheel(self, index: str, name: str, version: str, body: str = "VALUE = 1\n") -> Path:
        """Put a wheel on an index and return its path; it replaces one of the same version."""
        folder = self.root / index / name
        folder.mkdir(parents=True, exist_ok=True)
        info = f"{name}-{version}.dist-info"
        files = {
            f"{name}.py": body,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = [f"{path},sha256={_record(text)},{len(text)}" for path, text in files.items()]
        files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for where, text in files.items():
                archive.writestr(where, text)
        links = "".join(f'<a href="{each.name}">{each.name}</a>' for each in folder.glob("*.whl"))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
        return path

    def lock(self, name: str, *wheels: Path) -> None:
        """Write a lock that accepts these wheels as they are now."""
        lines = []
        for wheel in wheels:
            project, version = wheel.name.split("-")[:2]
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lines.append(f"{project}=={version} \\\n    --hash=sha256:{digest}\n")
        (self.locks / f"{name}.lock").write_text("".join(lines))

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the set-up script against the index."""
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        tuned = ("UV_", "PIP_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(tuned)}
        return subprocess.run(
            [self.locks / each for each in ("install.sh", self.venv, "base.lock", "torch.lock")],
            env={
                **kept, "PATH": tools, "UV_CACHE_DIR": str(self.root / "cache"),
                "UV_DEFAULT_INDEX": (self.root / "index").as_uri(), **variables,
            },
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def installed(self) -> dict[str, str]:
        """Return the projects of the environment and their versions."""
        (site,) = self.venv.glob("lib/*/site-packages")
        found = importlib.metadata.distributions(path=[str(site)])
        return {each.name: each.version for each in found}


def _record(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_what_the_locks_name_is_installed(shop: Shop) -> None:
    done = shop.install()
    assert done.returncode == 0, done.stderr
    assert shop.installed() == {"cargo": "1.0", "torch": "2.0"}


def test_a_wheel_with_other_bytes_is_refused(shop: Shop) -> None:
    shop.wheel("index", "cargo", "1.0", body="VALUE = 'exchanged on the index'\n")
    done = shop.install()
    assert done.returncode == 2
    assert "ash" in done.stderr
    assert "requirements/*.lock" in done.stderr
    assert "cargo" not in shop.installed()


def test_an_exchanged_build_of_torch_is_refused(shop: Shop) -> None:
    shop.wheel("cpu", "torch", "2.0+cpu", body="VALUE = 'exchanged'\n")
    done = shop.install(PACELINE_TORCH_INDEX=(shop.root / "cpu").as_uri())
    assert done.returncode == 2
    assert "torch" not in shop.installed()


def test_an_index_for_torch_serves_torch_alone(shop: Shop) -> None:
    shop.wheel("cpu", "cargo", "1.0", body="VALUE = 'from the other index'\n")
    shop.wheel("cpu", "cargo", "99.0")
    done = shop.install(PACELINE_TORCH_INDEX=(shop.root / "cpu").as_uri())
    assert done.returncode == 0, done.stderr
    assert shop.installed() == {"cargo": "1.0", "torch": "2.0+cpu"}
    (site,) = shop.venv.glob("lib/*/site-packages")
    assert (site / "cargo.py").read_text() == "VALUE = 1\n"


def test_a_folder_of_wheels_serves_torch_alone(shop: Shop) -> None:
    shop.wheel("cpu", "cargo", "1.0", body="VALUE = 'from the folder'\n")
    folder = shop.root / "folder"
    folder.mkdir()
    for wheel in (shop.root / "cpu").glob("*/*.whl"):
        shutil.copy(wheel, folder)
    done = shop.install(UV_FIND_LINKS=str(folder))
    assert done.returncode == 0, done.stderr
    assert shop.installed() == {"cargo": "1.0", "torch": "2.0+cpu"}
    (site,) = shop.venv.glob("lib/*/site-packages")
    assert (site / "cargo.py").read_text() == "VALUE = 1\n"


def test_an_extra_index_of_the_environment_is_not_read(shop: Shop) -> None:
    shop.wheel("extra", "cargo", "1.0", body="VALUE = 'from the extra index'\n")
    shutil.rmtree(shop.root / "index" / "cargo")
    done = shop.install(UV_EXTRA_INDEX_URL=(shop.root / "extra").as_uri())
    assert done.returncode == 2
    assert "cargo" not in shop.installed()
