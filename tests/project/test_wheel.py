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


def on_base(*words: str, cwd: Path | None = None) -> str:
    """Run ``-c CODE``, or commands as JSON, where only the base is installed; return stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.base_install", *words],
        capture_output=True, text=True, timeout=100, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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


# One start of Python shows all: what only the base has takes a second to find out.
IMPORTS = """
import importlib, json, pkgutil, sys, paceline
from paceline.errors import MissingExtra
try:
    import paceline.flows.train
except MissingExtra as error:
    print(error.one_line())
try:
    import torch
except ModuleNotFoundError as error:
    print(type(error).__name__)
from paceline.cli.main import COMMANDS, cli
for name in COMMANDS:
    cli.main([name, "--help"], standalone_mode=False)
needs = {}
for each in pkgutil.walk_packages(paceline.__path__, "paceline.", onerror=lambda _: None):
    try:
        importlib.import_module(each.name)
    except MissingExtra as error:
        needs[each.name] = error.do
print(json.dumps(needs))
"""


def test_the_base_has_each_help_and_its_modules_load_no_extra() -> None:
    first, second, *helps, last = on_base("-c", IMPORTS).splitlines()
    assert "extra flows" in first and "paceline-*.whl)[flows]" in first
    assert second == "ModuleNotFoundError", "other packages' imports are left alone"
    assert sum(line.startswith("Usage:") for line in helps) == len(COMMANDS)
    for name, do in json.loads(last).items():
        extra = next((x for start, x in CHOSEN.items() if name.startswith(start)), None)
        extra = extra or ON_EXTRAS.get(name.split(".")[1])
        assert extra is not None, f"{name} belongs to the base: {do}"
        either = {extra, "train"} if extra == "flows" else {extra}  # these need both
        assert any(f"[{each}]" in do for each in either), name


def test_the_base_plans_and_distributes_and_names_the_extra_that_a_command_lacks(
    tmp_path: Path,
) -> None:
    lacking = {
        "flows,train": ["demo"],
        "train": ["train"],
        "simulation": ["simulate", "--workers", "3", "--size", "9MB", "--link", "1Gbps"],
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(os.urandom(300_000))
    calls = [
        ["plan", "--workers", "9", "--size", "1GB", "--link", "10Gbps"],
        ["distribute", "model", "--into", "nodes", "--workers", "3", "--model", "m",
         "--as-version", "1"],
        ["init", "--state", "fleet", "--coordinator", "http://127.0.0.1:7000"],
    ]  # fmt: skip
    lines = on_base(json.dumps([*lacking.values(), *calls]), cwd=tmp_path).splitlines()
    ends = [json.loads(line) for line in lines]
    for extras, (code, _, said) in zip(lacking, ends[:3], strict=True):
        assert code == MissingExtra.exit_code, said
        (line,) = said.splitlines()
        assert f"paceline-*.whl)[{extras}]" in line
    assert [code for code, _, _ in ends[3:]] == [0, 0, 0], [said for _, _, said in ends]
    assert {each.name for each in tmp_path.iterdir()} == {"model", "nodes", "fleet"}, (
        "nothing was begun"
    )
    assert len(list((tmp_path / "nodes").rglob("weights.bin"))) == 3


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
