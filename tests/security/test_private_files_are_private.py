"""What holds a secret, and what the coordinator keeps, is its owner's only, under any umask."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import cluster as fleet
from paceline.coordinator.stores import SqliteCoordination
from paceline.errors import AccessDenied
from paceline.system import create_durably, ensure_own_directory, restrict_directory, write_private
from tests.cluster.conftest import small_profile
from tests.support.command import paceline
from tests.support.powerloss import Disk
from tests.support.servers import free_port

CLI = [sys.executable, "-m", "paceline.cli.main"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def open_to_others(root: Path) -> dict[str, str]:
    return {
        str(each.relative_to(root)): oct(mode(each))
        for each in [root, *root.rglob("*")]
        if mode(each) & 0o077
    }


@pytest.fixture
def umask() -> int:
    """The umask that removes nothing: no other may matter."""
    return 0


def test_init_and_a_coordinator_write_private_files(tmp_path: Path, umask: int) -> None:
    state, port = tmp_path / "state", free_port()
    state.mkdir(mode=0o755)
    (state / "coordinator.sqlite").touch(mode=0o644)  # of an older version
    words = ["--state", str(state), "--set", 'security.rest_tls="installation"']
    url = f"https://127.0.0.1:{port}"
    before = os.umask(umask)
    try:
        assert paceline("init", *words, "--coordinator", url).returncode == 0
    finally:
        os.umask(before)
    serve = ["coordinator", "--state", str(state), "--port", str(port)]
    with subprocess.Popen([*CLI, *serve], umask=umask) as process:
        try:
            deadline = time.monotonic() + 60
            while not (log := state / "coordinator.log").exists() or "listening" not in (
                log.read_text()
            ):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert {"coordinator.sqlite-wal", "coordinator.sqlite-shm"} <= names(state)
            assert open_to_others(state) == {}
        finally:
            process.terminate()
    assert open_to_others(state) == {}


def test_up_writes_private_files(tmp_path: Path, umask: int) -> None:
    state = tmp_path / "state"
    before = os.umask(umask)
    try:
        state.mkdir()
        fleet.start(small_profile(nodes=1), state, detach=True, only=("dask",))
        try:
            found = open_to_others(state)
        finally:
            fleet.stop(state)
    finally:
        os.umask(before)
    assert found == {}


def test_a_database_of_an_older_version_is_tightened(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("PRAGMA journal_mode=WAL")
        old.execute("CREATE TABLE t (a)")
        old.commit()
        for each in tmp_path.iterdir():
            each.chmod(0o666)
        before = os.umask(umask)
        try:
            file = SqliteCoordination(path)
        finally:
            os.umask(before)
        assert [mode(each) for each in tmp_path.iterdir()] == [0o600] * 3
        file.close()
    old.close()


def test_a_private_file_follows_no_symlink_and_leaves_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    secret = tmp_path / "secret"
    secret.symlink_to(victim)
    (tmp_path / "secret.tmp").symlink_to(victim)  # where an earlier version wrote first
    write_private(secret, b"new")
    assert victim.read_text() == "kept"
    assert secret.read_bytes() == b"new"
    assert not secret.is_symlink()
    assert mode(secret) == 0o600
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        create_durably(link, b"new")
    assert names(tmp_path) == {"link", "secret", "secret.tmp", "victim"}


def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    write_private(path, b"old")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"secret"}


def test_a_private_file_outlasts_a_power_loss(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    with disk.watching():
        write_private(root / "secret", b"new")
    for seed in range(8):
        disk.after(tmp_path / f"after-{seed}", seed)
        assert (tmp_path / f"after-{seed}" / "secret").read_bytes() == b"new"


def test_a_wider_directory_is_tightened(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    wide.chmod(0o777)
    assert restrict_directory(wide, 0o755) == os.geteuid()
    assert mode(wide) == 0o755
    ensure_own_directory(wide)
    assert mode(wide) == 0o700


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    before = mode(tmp_path)
    with pytest.raises(AccessDenied, match="another user"):
        fleet.start(small_profile(), tmp_path, detach=True, only=())
    assert mode(tmp_path) == before
    assert names(tmp_path) == set()
