"""Stores as a profile names them: opened, or refused with the setting that is missing."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.config import ControlSettings, Endpoints, Profile, Runtime, Secrets, named_secret
from paceline.coordinator.stores import Candidate, open_audit, open_coordination, open_progress
from paceline.errors import AccessDenied, InvalidInput, InvalidProfile
from tests.coordinator.stores.conftest import REAL

pytestmark = pytest.mark.xdist_group("etcd")


@pytest.fixture
def runtime(tmp_path):
    def make(**control):
        profile = Profile(control=ControlSettings(**control))
        return Runtime(
            profile=profile, state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets()
        )

    return make


def test_the_embedded_default_is_one_file_and_no_server(runtime, tmp_path):
    stores = [opened(runtime()) for opened in (open_coordination, open_progress, open_audit)]
    assert [each.backend.split()[0] for each in stores] == ["sqlite", "memory", "sqlite"]
    for each in stores:
        each.close()
    assert {each.name for each in tmp_path.iterdir()} == {"coordinator.sqlite"}


@REAL
def test_a_cluster_s_stores_are_opened(runtime, etcd, redis, postgres, monkeypatch):
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD", redis.password)
    monkeypatch.setenv("PACELINE_POSTGRES_PASSWORD", postgres.password)
    made = runtime(
        replicas=3,
        coordination="etcd",
        etcd_endpoints=etcd.access.endpoints,
        etcd_prefix="/tests/opening",
        progress="redis",
        redis_url=f"redis://127.0.0.1:{redis.port}/0",
        audit="postgres",
        postgres_url=postgres.url(postgres.schema()),
    )
    coordination, progress, audit = (
        opened(made) for opened in (open_coordination, open_progress, open_audit)
    )
    assert coordination.campaign(Candidate("r0", "u"), lambda: False).epoch == 1
    coordination.check()
    audit.check()
    assert coordination.backend.startswith("etcd 3.")
    assert audit.backend.startswith("postgresql 1")
    assert progress.get("d") == {}
    assert progress.healthy
    for each in (coordination, progress, audit):
        each.close()


def test_a_secret_may_be_in_a_file_that_is_read_each_time(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("a b\n")
    monkeypatch.setenv("SOME_PASSWORD_FILE", str(file))
    assert named_secret("SOME_PASSWORD", "control.x") == "a b"
    file.write_text("renewed")
    assert named_secret("SOME_PASSWORD") == "renewed"
    monkeypatch.setenv("SOME_PASSWORD", "other")
    with pytest.raises(InvalidInput, match=r"given twice.*SOME_PASSWORD_FILE.*Unset"):
        named_secret("SOME_PASSWORD")
    monkeypatch.delenv("SOME_PASSWORD")
    file.write_text("\n")
    assert named_secret("SOME_PASSWORD") == ""
    with pytest.raises(AccessDenied, match=r"is missing.*control\.x"):
        named_secret("SOME_PASSWORD", "control.x")
    for unreadable in (b"\xff", None):
        file.unlink() if unreadable is None else file.write_bytes(unreadable)
        with pytest.raises(AccessDenied, match=rf"cannot be read.*{file}.*SOME_PASSWORD_FILE"):
            named_secret("SOME_PASSWORD")


@pytest.mark.parametrize(
    ("opened", "control", "named"),
    [
        (open_coordination, {"replicas": 3}, "etcd"),
        (open_coordination, {"coordination": "etcd"}, "etcd_endpoints"),
        (open_coordination, {"coordination": "etcd", "etcd_endpoints": ("h:1",)}, "http"),
        (open_coordination, {"coordination": "etcd", "etcd_endpoints": ("http://h",)}, "PORT"),
        (
            open_coordination,
            {"coordination": "etcd", "etcd_endpoints": ("http://h:1", "https://h:2")},
            "all with https",
        ),
        (
            open_coordination,
            {"coordination": "etcd", "etcd_endpoints": ("https://h:1",), "etcd_ca": "no.pem"},
            "etcd_ca",
        ),
        (
            open_coordination,
            {"coordination": "etcd", "etcd_endpoints": ("https://h:1",), "etcd_cert": "c.pem"},
            "etcd_key",
        ),
        (open_progress, {"progress": "redis"}, "redis_url"),
        (open_progress, {"progress": "redis", "redis_url": "http://h"}, "redis://"),
        (open_progress, {"progress": "redis", "redis_url": "redis://:pw@h:1"}, "password"),
        (open_audit, {"audit": "postgres"}, "postgres_url"),
        (open_audit, {"audit": "postgres", "postgres_url": "postgresql://u:pw@h/d"}, "password"),
        (open_audit, {"audit": "postgres", "postgres_url": "mysql://h/d"}, "postgresql://"),
    ],
)
def test_a_missing_or_wrong_setting_is_named(runtime, opened, control, named):
    with pytest.raises(InvalidProfile, match=named) as caught:
        opened(runtime(**control))
    assert "pw" not in str(caught.value)


def test_a_user_without_a_password_is_told_which_variable_to_set(runtime, monkeypatch):
    monkeypatch.delenv("ETCD_SECRET", raising=False)
    control = {"coordination": "etcd", "etcd_endpoints": ("http://h:1",), "etcd_user": "u"}
    with pytest.raises(AccessDenied, match="ETCD_SECRET"):
        open_coordination(runtime(**control, etcd_password_env="ETCD_SECRET"))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValidationError):
        ControlSettings(coordination="zookeeper")
