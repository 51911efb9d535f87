"""Every profile loads, and a wrong key names the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import (
    Endpoints,
    Profile,
    Runtime,
    Secrets,
    load_profile,
    load_runtime,
    save_runtime,
)
from paceline.errors import InvalidProfile, NotReady

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*.toml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_loads_under_its_own_name(path: Path) -> None:
    assert load_profile(path.stem).name == path.stem
    assert load_profile(str(path)) == load_profile(path.stem)


def test_a_base_is_beside_the_profile_or_where_the_command_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile" / "mine.toml"
    path.write_text('[model]\nbase = "./base"\n')
    monkeypatch.chdir(tmp_path)
    assert load_profile(str(path)).model.base == str(tmp_path / "profile" / "base")
    typed = load_profile(str(path), {"model.base": "../other"})
    assert typed.model.base == str(tmp_path.parent / "other")
    for name in ("", "acme/tiny/1", "hf://acme/tiny", "/models/base"):
        assert load_profile(str(path), {"model.base": name}).model.base == name


def test_an_unknown_key_names_the_nearest_valid_one() -> None:
    with pytest.raises(InvalidProfile) as caught:
        load_profile("embedded", {"cluster.link_mbits": "6"})
    line = caught.value.one_line()
    assert "cluster.link_mbits" in line
    assert "link_mbit" in line
    assert "at --set cluster.link_mbits" in line, "where it was said"
    assert "Did you mean 'link_mbit'?" in line


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[training]\nsteps = -1\n")
    with pytest.raises(InvalidProfile, match=r"training.steps = -1, .*at .*mine.toml"):
        load_profile(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.nodes", "0"),
        ("cluster.nodes", '"four"'),
        ("relay.topology", '"ring"'),
        ("training.learning_rate", "-1.0"),
        ("services.s3_port", "70000"),
    ],
)
def test_a_bad_value_says_got_and_wanted(key: str, value: str) -> None:
    with pytest.raises(InvalidProfile) as caught:
        load_profile("embedded", {key: value})
    assert key in str(caught.value.got)
    assert caught.value.wanted


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(InvalidProfile, match="goes through a value"):
        load_profile("embedded", {"name.more": "1"})


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(InvalidProfile, match="embedded"):
        load_profile("embeded")


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(InvalidProfile, match=r"broken\.toml"):
        load_profile(str(path))


def test_the_runtime_comes_back_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    runtime = Runtime(
        profile=Profile(),
        state_dir=tmp_path,
        endpoints=Endpoints(coordinator_url="http://127.0.0.1:1"),
        secrets=Secrets(coordinator_token="secret-word"),
    )
    path = save_runtime(runtime)
    assert load_runtime(tmp_path) == runtime
    assert path.stat().st_mode & 0o077 == 0
    assert "secret-word" not in repr(runtime)
    assert "secret-word" not in str(runtime)


def test_the_runtime_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    runtime = Runtime(
        profile=Profile(), state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets()
    )
    path = save_runtime(runtime)
    stored = json.loads(path.read_text())
    stored["profile"]["model"]["base_steps"] = 60
    path.write_text(json.dumps(stored))
    assert load_runtime(tmp_path) == runtime
    stored["profile"]["gate"]["models"] = {'"acme/7b"': {}}  # quoted: of --set in that release
    stored["secrets"]["coordinator_token"] = "secret-word"
    path.write_text(json.dumps(stored))
    with pytest.raises(InvalidProfile, match=r"profile\.gate\.models.*acme/7b.*runtime\.json"):
        load_runtime(tmp_path)
    del stored["profile"]["gate"]["models"], stored["endpoints"]
    path.write_text(json.dumps(stored))
    with pytest.raises(InvalidProfile, match="endpoints") as refused:
        load_runtime(tmp_path)
    assert "secret-word" not in str(refused.value)
    path.write_text("[]")
    with pytest.raises(NotReady, match=r"cannot be read.*runtime\.json"):
        load_runtime(tmp_path)
