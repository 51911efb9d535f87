"""A process knows the cores and the memory that its control group leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.system import cgroup, free_memory_bytes, usable_cores, usable_memory_bytes

MB = 1_000_000
CODE = """
import json
from paceline.system import free_memory_bytes, usable_cores, usable_memory_bytes
print(json.dumps([usable_cores(), usable_memory_bytes(), free_memory_bytes()]))
"""
V2 = {"cpu.max": "{quota} 100000", "memory.max": "{limit}", "memory.current": "{used}",
      "memory.stat": "anon 5\ninactive_file {cache}\n"}  # fmt: skip
V1 = {"cpu.cfs_quota_us": "{quota}", "cpu.cfs_period_us": "100000",
      "memory.limit_in_bytes": "{limit}", "memory.usage_in_bytes": "{used}",
      "memory.stat": "inactive_file 7\ntotal_inactive_file {cache}\n"}  # fmt: skip


@pytest.fixture(params=["v1", "v2"])
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """This process's group is slurm/job, in a tree of files of this version."""
    own = {"v1": "5:memory:/slurm/job\n4:cpu,cpuacct:/slurm/job\n0::/\n", "v2": "0::/slurm/job\n"}
    (tmp_path / "own").write_text(own[request.param])
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return str(request.param)


def write(root: Path, version: str, group: str, **values: object) -> None:
    for name, text in {"v1": V1, "v2": V2}[version].items():
        controller = name.partition(".")[0] if version == "v1" else ""
        path = root / "groups" / controller / group / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**values))


def test_the_least_of_all_groups_counts(version: str, tmp_path: Path) -> None:
    none = {"v1": {"quota": -1, "limit": 2**63 - 4096}, "v2": {"quota": "max", "limit": "max"}}
    write(tmp_path, version, "", **none[version], used=0, cache=0)
    total = usable_memory_bytes()
    assert usable_cores() == 64
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    write(tmp_path, version, "slurm", quota=350_000, limit=900 * MB, used=400 * MB, cache=100 * MB)
    write(tmp_path, version, "slurm/job", quota=1_000_000, limit=800 * MB, used=100 * MB, cache=0)
    assert usable_cores() == 4  # three and a half
    assert usable_memory_bytes() == 800 * MB
    assert free_memory_bytes() == 600 * MB  # in the group above it
    write(tmp_path, version, "slurm", quota=50_000, limit=1, used=MB, cache=0)
    assert (usable_cores(), free_memory_bytes()) == (1, 0)


def test_a_container_has_its_group_as_the_root(version: str, tmp_path: Path) -> None:
    """And may be told its path on the host, which it does not see; ``..`` leads out of it."""
    write(tmp_path, version, "", quota=200_000, limit=700 * MB, used=0, cache=0)
    assert (usable_cores(), usable_memory_bytes()) == (2, 700 * MB)
    (tmp_path / "own").write_text((tmp_path / "own").read_text().replace("/slurm", "/../.."))
    assert (usable_cores(), usable_memory_bytes()) == (2, 700 * MB)


def test_without_control_groups_the_machine_counts(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores() == 64
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "none")
    assert usable_cores() == 64
    assert usable_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def group(controller: str, **files: object) -> Iterator[Path]:
    """Make a real control group of version 1 or 2; skip where this user may not."""
    root = Path("/sys/fs/cgroup")
    root = root / controller if (root / controller).is_dir() else root
    made = root / f"paceline-test-{os.getpid()}"
    try:
        made.mkdir()
        for name, value in files.items():
            (made / f"{controller}.{name}").write_text(str(value))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no control group of {controller} can be made here: {error}")
    try:
        yield made
    finally:
        made.rmdir()


def in_group(made: Path) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
        preexec_fn=lambda: (made / "cgroup.procs").write_text("0") and None,
    )  # fmt: skip
    return list(json.loads(done.stdout))


def test_a_real_group_limits_cores() -> None:
    old = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists()
    with group("cpu", **({"cfs_quota_us": 90_000} if old else {"max": "90000 100000"})) as made:
        assert in_group(made)[0] == 1


def test_a_real_group_limits_memory() -> None:
    old = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
    with group("memory", **{"limit_in_bytes" if old else "max": 512 * 2**20}) as made:
        _, usable, free = in_group(made)
        assert usable == 512 * 2**20
        assert 0 < free <= usable
