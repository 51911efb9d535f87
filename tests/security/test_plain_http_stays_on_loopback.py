"""Servers without TLS listen beyond loopback only where the profile allows plaintext."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import cluster as fleet
from paceline.cluster import PLAIN, embedded_services, require_protected
from paceline.config import Endpoints, Profile, Runtime, Secrets, SecuritySettings, ServiceSettings
from paceline.errors import InvalidProfile

BEYOND = ["0.0.0.0", "::", "192.0.2.1", "host.example", "", "127.0.0.1.example"]
LOOPBACK = ["127.0.0.1", "127.0.0.2", "::1", "localhost"]


def profile(host: str, rest_tls: str = "off") -> Profile:
    security = SecuritySettings.model_validate({"rest_tls": rest_tls})
    return Profile(services=ServiceSettings(host=host), security=security)


@pytest.mark.parametrize(
    ("host", "rest_tls"), [*((host, "off") for host in BEYOND), ("192.0.2.1", "installation")]
)
def test_up_refuses_and_leaves_nothing(tmp_path: Path, host: str, rest_tls: str) -> None:
    with pytest.raises(InvalidProfile, match="plaintext-anywhere") as refused:
        fleet.start(profile(host, rest_tls), tmp_path / "state", detach=True)
    assert all(each in str(refused.value) for each in PLAIN)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_is_fine(host: str) -> None:
    require_protected(profile(host))


def test_the_profile_may_allow_plaintext() -> None:
    require_protected(profile("192.0.2.1", "plaintext-anywhere"))


def test_what_has_tls_of_its_own_is_not_refused() -> None:
    require_protected(profile("192.0.2.1"), only=("dask",))
    with pytest.raises(InvalidProfile, match="for s3,"):
        require_protected(profile("192.0.2.1"), only=("dask", "s3"))


def test_every_embedded_server_that_speaks_http_is_under_the_rule(tmp_path: Path) -> None:
    """A server added later without TLS has to join PLAIN."""
    endpoints = {
        "prefect_api_url": "http://127.0.0.1:1/api",
        "mlflow_url": "http://127.0.0.1:2",
        "s3_url": "http://127.0.0.1:3",
        "coordinator_url": "http://127.0.0.1:4",
        "scheduler_address": "tls://127.0.0.1:5",
    }
    runtime = Runtime(
        profile=Profile(),
        state_dir=tmp_path,
        endpoints=Endpoints.model_validate(endpoints),
        secrets=Secrets(prefect_auth="a:b", mlflow_auth="a:b", coordinator_token="t"),
    )
    listening = {each.name for each in embedded_services(runtime) if each.ready.port}
    assert listening - {*PLAIN, "dask"} == {"coordinator"}  # which refuses by itself
