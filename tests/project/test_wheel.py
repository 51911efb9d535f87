"""One wheel: a node installs its base alone, and an extra that is missing is named."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from paceline.cli import COMMANDS
from paceline.errors import MissingExtra
from paceline.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE_MB = 120

# Modules of base packages that need an extra, because a profile chooses them.
CHOSEN = {
    "paceline.coordinator.stores.etcd": "grpc",
    "paceline.coordinator.stores.postgres_audit": "stores",
    "paceline.coordinator.stores.redis_progress": "stores",
    "paceline.relay.transport.grpc_": "grpc",
}
# Packages whose modules may need an extra.
ON_EXTRAS = {
    "data": "train", "evaluation": "train", "models": "train", "training": "train",
    "simulation": "simulation", "flows": "flows", "tasks": "flows",
}  # fmt: skip


def on_base(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``-c CODE``, or commands as JSON, where only the base is installed."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.base_install", *words],
        capture_output=True, text=True, timeout=100, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def commands_on_base(commands: list[list[str]], cwd: Path) -> list[tuple[int, str, str]]:
    """Return exit status, stdout and stderr of each command; one start of Python for all."""
    done = on_base(json.dumps(commands), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def build_wheel(folder: Path) -> Path:
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("paceline-*.whl")
    return wheel


def test_the_table_of_extras_agrees_with_pyproject() -> None:
    declared = dict(PROJECT["optional-dependencies"])
    assert "all" in declared
    (everything,) = map(Requirement, declared.pop("all"))
    assert everything.extras | {"grpc"} == set(EXTRAS) == set(declared), "stores brings grpc"
    owners = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        listed = [Requirement(each) for each in declared[extra]]
        names = {name for each in listed for name in (each.name, *each.extras)}
        for module in modules:
            # a GPU's library is installed only where make setup finds the wheel
            found = {each.replace("_", "-") for each in owners.get(module, ["nvidia-ml-py"])}
            assert names & found, f"{module} of {extra}"


def test_an_import_that_needs_an_extra_names_it_in_python_too() -> None:
    code = (
        "from paceline.errors import MissingExtra\n"
        "try:\n    import paceline.flows.train\n"
        "except MissingExtra as error:\n    print(error.one_line())\n"
        "try:\n    import torch\n"
        "except ModuleNotFoundError as error:\n    print(type(error).__name__)\n"
    )
    first, second = on_base("-c", code).stdout.splitlines()
    assert "extra flows" in first and "paceline-*.whl)[flows]" in first
    assert second == "ModuleNotFoundError", "other packages' imports are left alone"


def test_base_modules_load_no_library_of_an_extra() -> None:
    code = (
        "import importlib, json, pkgutil, paceline\n"
        "from paceline.errors import MissingExtra\n"
        "needs = {}\n"
        "skip = lambda _: None\n"
        "for each in pkgutil.walk_packages(paceline.__path__, 'paceline.', onerror=skip):\n"
        "    try:\n"
        "        importlib.import_module(each.name)\n"
        "    except MissingExtra as error:\n"
        "        needs[each.name] = error.do\n"
        "print(json.dumps(needs))\n"
    )
    done = on_base("-c", code)
    assert done.returncode == 0, done.stderr
    for name, do in json.loads(done.stdout.splitlines()[-1]).items():
        extra = next((x for start, x in CHOSEN.items() if name.startswith(start)), None)
        extra = extra or ON_EXTRAS.get(name.split(".")[1])
        assert extra is not None, f"{name} belongs to the base: {do}"
        either = {extra, "train"} if extra == "flows" else {extra}  # these need both
        assert any(f"[{each}]" in do for each in either), name


def test_a_command_names_the_extra_that_it_lacks(tmp_path: Path) -> None:
    lacking = {
        "flows,train": ["demo"],
        "train": ["train"],
        "simulation": ["simulate", "--workers", "3", "--size", "9MB", "--link", "1Gbps"],
    }
    ends = commands_on_base(list(lacking.values()), tmp_path)
    for extras, (code, _, said) in zip(lacking, ends, strict=True):
        assert code == MissingExtra.exit_code, said
        (line,) = said.splitlines()
        assert f"paceline-*.whl)[{extras}]" in line
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_the_base_alone_plans_publishes_and_distributes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(os.urandom(300_000))
    calls = [
        ["plan", "--workers", "9", "--size", "1GB", "--link", "10Gbps"],
        ["distribute", "model", "--into", "nodes", "--workers", "3", "--model", "m",
         "--as-version", "1"],
        ["init", "--state", "fleet", "--coordinator", "http://127.0.0.1:7000"],
    ]  # fmt: skip
    ends = commands_on_base(calls, tmp_path)
    assert [code for code, _, _ in ends] == [0, 0, 0], [said for _, _, said in ends]
    assert len(list((tmp_path / "nodes").rglob("weights.bin"))) == 3


def test_every_command_has_its_help_on_the_base_alone() -> None:
    code = (
        "from paceline.cli.main import COMMANDS, cli\n"
        "for name in COMMANDS:\n    cli.main([name, '--help'], standalone_mode=False)\n"
    )
    done = on_base("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(COMMANDS)


@pytest.mark.nightly
def test_an_installed_base_is_small_and_runs(tmp_path: Path) -> None:
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True, timeout=60)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # uv
    locks = [ROOT / "requirements" / "install.sh", env, ROOT / "requirements" / "base.lock"]
    subprocess.run(locks, check=True, timeout=100, env={**os.environ, "PATH": tools})
    wheel = build_wheel(tmp_path)
    subprocess.run(
        [env / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=60,
    )  # fmt: skip
    (site,) = env.glob("lib/*/site-packages")
    size = sum(
        each.lstat().st_blocks * 512
        for top in site.iterdir()
        if not re.match(r"(pip|setuptools|pkg_resources|_distutils)", top.name)
        for each in [top, *top.rglob("*")]
        if each.suffix != ".pyc"
    )
    assert size < BASE_MB * 1_000_000
    assert not {"flows", "tasks"} & {each.name for each in site.iterdir()}
    done = subprocess.run(
        [env / "bin" / "paceline", "plan", "--workers", "9", "--size", "1GB", "--link", "1Gbps"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
