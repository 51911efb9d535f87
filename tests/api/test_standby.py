"""Tokens on two replicas of one etcd: what one makes or ends, the other opens for or refuses."""

import contextlib
import time

import pytest

from paceline.api import create_app
from paceline.config import Profile
from tests.api.conftest import TestClient, make_runtime
from tests.support.etcd import etcd

__all__ = ["etcd"]
pytestmark = [pytest.mark.services, pytest.mark.xdist_group("etcd")]
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def replicas(etcd, tmp_path_factory):
    """The leader and the standby: in one process, but with nothing in common except etcd."""
    first = make_runtime(tmp_path_factory.mktemp("standby") / "state")
    settings = first.profile.model_dump()
    settings["control"] |= {
        "coordination": "etcd",
        "etcd_endpoints": list(etcd.access.endpoints),
        "etcd_prefix": "/tests/tokens",
        "lease_s": 15.0,  # a busy machine shall not change who leads: that is not what is tested
    }
    runtime = first.model_copy(update={"profile": Profile.model_validate(settings)})
    with contextlib.ExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            url = f"http://127.0.0.1:{1 + len(clients)}"
            app = create_app(runtime, url=url, replica_id=name)
            client = TestClient(app, url, raise_server_exceptions=False, follow_redirects=False)
            clients.append(stack.enter_context(client))
        both = [each.app.state.coordinator for each in clients]
        until(lambda: sum(each.term is not None for each in both) == 1, "one of them leads")
        until(lambda: all(each.leader is not None for each in both), "both know who")
        leader, standby = sorted(clients, key=lambda each: each.app.state.coordinator.term is None)
        leader.owner = standby.owner = runtime.secrets.coordinator_token
        yield leader, standby


def until(check, what):
    end_s = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end_s, f"timed out waiting until {what}"
        time.sleep(0.05)


def call(rest, method, path, token, **more):
    return rest.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)


def test_a_token_made_or_revoked_at_the_leader_counts_at_the_standby(replicas):
    leader, standby = replicas
    body = {"name": "both", "scopes": ["read"]}
    made = call(leader, "POST", "/tokens", leader.owner, json=body).json()
    token, token_id = made["token"], made["record"]["token_id"]
    until(lambda: call(standby, "GET", "/workers", token).status_code == 200, "it is followed")
    assert call(standby, "GET", "/audit", token).status_code == 403
    call(leader, "DELETE", f"/tokens/{token_id}", leader.owner)
    until(lambda: call(standby, "GET", "/workers", token).status_code == 401, "its end is followed")


def test_a_standby_guards_first_and_sends_changes_on_afterwards(replicas):
    leader, standby = replicas
    body = {"name": "x", "scopes": ["read"]}
    assert call(standby, "POST", "/tokens", "wrong", json=body).status_code == 401
    sent_on = call(standby, "POST", "/tokens", standby.owner, json=body)
    assert sent_on.status_code == 307
    assert sent_on.headers["Location"] == f"{leader.app.state.coordinator.term.url}/tokens"
