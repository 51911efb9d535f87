"""Which transport a profile gives an agent, and what it refuses to run unprotected."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from paceline.config import Endpoints, Profile, Runtime, Secrets
from paceline.errors import InvalidInput, InvalidProfile
from paceline.relay.transport import issue_identity, make_authority, tls_for, transport_for


def runtime(state_dir: Path, **sections: dict[str, object]) -> Runtime:
    return Runtime(
        profile=Profile.model_validate(sections),
        state_dir=state_dir,
        endpoints=Endpoints(),
        secrets=Secrets(coordinator_token="token"),
    )


FILES = {
    "peer_ca": "tls/ca.pem",
    "peer_cert": "tls/{worker_id}.pem",
    "peer_key": "tls/{worker_id}-key.pem",
}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_plain_connections_are_for_loopback(tmp_path: Path, host: str) -> None:
    assert transport_for(runtime(tmp_path), host, "node-0").name == "tcp"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "node-0.example"])
def test_beyond_loopback_the_settings_to_add_are_named(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidProfile, match="peer_ca, peer_cert and peer_key") as caught:
        transport_for(runtime(tmp_path), host, "node-0")
    assert "plaintext-anywhere" in str(caught.value)
    assert host in str(caught.value)


def test_a_profile_may_say_aloud_that_the_network_reads_along(tmp_path: Path) -> None:
    open_to_all = runtime(tmp_path, security={"peer_tls": "plaintext-anywhere", **FILES})
    assert transport_for(open_to_all, "10.0.0.1", "node-0").name == "tcp"
    assert tls_for(open_to_all, "node-0") is None


def test_beyond_loopback_workers_need_a_token_to_greet_with(tmp_path: Path) -> None:
    open_to_all = runtime(tmp_path, security={"peer_tls": "plaintext-anywhere"})
    without = open_to_all.model_copy(update={"secrets": Secrets()})
    with pytest.raises(InvalidProfile, match="no token to greet"):
        transport_for(without, "10.0.0.1", "node-0")
    assert transport_for(without, "127.0.0.1", "node-0").name == "tcp"


def test_with_its_files_named_an_agent_listens_anywhere(tmp_path: Path) -> None:
    issue_identity(make_authority(tmp_path / "tls"), "node-7", tmp_path / "tls")
    with_files = runtime(tmp_path, security=FILES)
    assert transport_for(with_files, "0.0.0.0", "node-7").name == "tcp"
    found = tls_for(with_files, "node-7")
    assert found is not None
    assert found.cert == tmp_path / "tls/node-7.pem"
    with pytest.raises(InvalidInput, match="node-8"):
        transport_for(with_files, "127.0.0.1", "node-8")


def test_half_an_identity_is_not_plain(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfile, match="peer_key"):
        transport_for(
            runtime(tmp_path, security={"peer_ca": "a", "peer_cert": "b"}), "127.0.0.1", "n"
        )
    with pytest.raises(InvalidProfile, match="peer_ca, peer_cert, peer_key"):
        transport_for(runtime(tmp_path, security={"peer_tls": "mtls"}), "127.0.0.1", "n")


def test_the_profile_picks_the_transport(tmp_path: Path) -> None:
    asked = runtime(tmp_path, relay={"transport": "grpc"})
    assert transport_for(asked, "127.0.0.1", "node-0").name == "grpc"


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_an_identity_that_peers_would_refuse_is_refused_at_home(
    tmp_path: Path, transport: str
) -> None:
    tls = tmp_path / "tls"
    authority = make_authority(tls)

    def refusal() -> str:
        with pytest.raises(InvalidInput) as caught:
            asked = runtime(tmp_path, security=FILES, relay={"transport": transport})
            transport_for(asked, "127.0.0.1", "node-7")
        assert str(tls / "node-7.pem") in str(caught.value)
        return str(caught.value)

    issue_identity(authority, "node-8", tls)
    for kind in (".pem", "-key.pem"):  # somebody copied the files of another node
        (tls / f"node-8{kind}").rename(tls / f"node-7{kind}")
    assert "another worker's certificate: got node-8, wanted node-7" in refusal()
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    issue_identity(authority, "node-7", tls, valid_from=began, valid_days=1)
    assert "expired" in refusal()
    issue_identity(authority, "node-7", tls, valid_from=began + datetime.timedelta(days=6))
    assert "not yet valid" in refusal()
    issue_identity(make_authority(tmp_path / "theirs"), "node-7", tls)
    assert "valid now" in refusal()
    issue_identity(authority, "node-7", tls)
    fine = runtime(tmp_path, security=FILES, relay={"transport": transport})
    assert transport_for(fine, "127.0.0.1", "node-7").name == transport
