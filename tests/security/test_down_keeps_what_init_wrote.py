"""No command removes or replaces what is a fleet's only copy of its secrets and its authority."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline import cluster as fleet
from paceline.cli import cli
from paceline.config import Profile, Runtime, Secrets, load_runtime, save_runtime
from paceline.errors import Conflict
from paceline.relay import join
from paceline.relay.transport import ensure_authority, fingerprint
from tests.cluster.conftest import small_profile

URL = "http://127.0.0.1:7600"


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, [*words])


def init(state: Path) -> Result:
    return run("init", "--state", str(state), "--coordinator", URL, "--json")


def contents(state: Path) -> dict[str, bytes]:
    files = (each for each in state.rglob("*") if each.is_file())
    return {str(each.relative_to(state)): each.read_bytes() for each in files}


@pytest.fixture
def fleet_state(tmp_path: Path) -> Path:
    state = tmp_path / "fleet"
    assert init(state).exit_code == 0
    return state


def test_down_refuses_a_directory_of_init(fleet_state: Path) -> None:
    before = contents(fleet_state)
    done = run("down", "--state", str(fleet_state))
    assert isinstance(done.exception, Conflict)
    assert "nowhere else" in str(done.exception)
    assert contents(fleet_state) == before
    assert load_runtime(fleet_state).secrets.coordinator_token


def test_down_refuses_a_directory_of_a_joined_node(tmp_path: Path) -> None:
    secrets = Secrets(worker_token="w", peer_token="p")
    save_runtime(
        Runtime(profile=Profile(), state_dir=tmp_path, endpoints={}, secrets=secrets)  # type: ignore[arg-type]
    )
    before = contents(tmp_path)
    with pytest.raises(Conflict):
        fleet.stop(tmp_path)
    assert contents(tmp_path) == before


def test_start_refuses_a_directory_of_init(fleet_state: Path) -> None:
    before = contents(fleet_state)
    with pytest.raises(Conflict, match="not made by `paceline up`"):
        fleet.start(small_profile(), fleet_state, detach=True, only=())
    assert contents(fleet_state) == before


def test_join_refuses_a_directory_of_init(fleet_state: Path) -> None:
    before = contents(fleet_state)
    with pytest.raises(Conflict, match="another installation's"):
        join(fleet_state, "node-1", URL, "token")
    assert contents(fleet_state) == before


def test_no_runtime_replaces_one_with_another_token(fleet_state: Path) -> None:
    before = contents(fleet_state)
    other = load_runtime(fleet_state).model_copy(update={"secrets": Secrets()})
    with pytest.raises(Conflict, match="another installation's"):
        save_runtime(other)
    assert contents(fleet_state) == before
    save_runtime(load_runtime(fleet_state))  # its own, again, is fine


def test_init_twice_changes_nothing(fleet_state: Path) -> None:
    before = contents(fleet_state)
    again = init(fleet_state)
    assert isinstance(again.exception, Conflict)
    assert "installation's already" in str(again.exception)
    assert contents(fleet_state) == before


def test_init_keeps_the_authority_that_is_there_and_reports_it(tmp_path: Path) -> None:
    authority = ensure_authority(tmp_path / "authority")
    before = contents(tmp_path / "authority")
    done = run("init", "--state", str(tmp_path), "--coordinator", URL)
    assert done.exit_code == 0
    assert fingerprint(authority.cert.read_bytes()) in done.output
    assert "it was there already and is kept" in done.output
    assert contents(tmp_path / "authority") == before


def test_a_lost_certificate_does_not_replace_the_authoritys_key(tmp_path: Path) -> None:
    authority = ensure_authority(tmp_path)
    key = authority.key.read_bytes()
    authority.cert.unlink()
    assert ensure_authority(tmp_path).cert.is_file()
    assert authority.key.read_bytes() == key


def test_down_removes_what_up_writes_and_init_refuses_the_rest(tmp_path: Path) -> None:
    fleet.start(small_profile(), tmp_path, detach=True, only=())
    done = run("down", "--state", str(tmp_path), "--json")
    assert json.loads(done.output)["was_running"]
    assert not (tmp_path / "runtime.json").exists(), "`up` makes it again from secrets.json"
    assert (tmp_path / "secrets.json").exists()
    assert run("down", "--state", str(tmp_path)).exit_code == 0  # again, with nothing to stop
    before = contents(tmp_path)
    assert isinstance(init(tmp_path).exception, Conflict)
    assert contents(tmp_path) == before
