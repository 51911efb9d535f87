"""Nodes join with a group token: as many as it is for, from its networks, under new names."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.client import AccessClient, CoordinatorClient
from paceline.config import Profile, load_runtime
from paceline.coordinator import TokenRegistry, new_token
from paceline.coordinator.state import AdmitWorker, IssueToken, RevokeToken
from paceline.errors import AccessDenied, Conflict, InvalidInput
from paceline.relay import join
from paceline.relay.transport import new_request
from paceline.schemas import (
    CreateJoinToken,
    CreateToken,
    Heartbeat,
    JoinWorker,
    RegisterWorker,
    Scope,
    WorkerStatus,
    revoked_admission,
)
from tests.api.conftest import make_runtime, running
from tests.support.etcd import etcd

__all__ = ["etcd"]

pytestmark = pytest.mark.xdist_group("etcd")
PATIENCE_S = 30.0
DAY_S = 86_400.0


@pytest.fixture(scope="module", params=["sqlite", pytest.param("etcd", marks=pytest.mark.services)])
def served(request, tmp_path_factory):
    """A coordinator process, on each of the coordination stores."""
    runtime = make_runtime(tmp_path_factory.mktemp("group") / "state")
    if request.param == "etcd":
        settings = runtime.profile.model_dump()
        settings["control"] |= {
            "coordination": "etcd",
            "etcd_endpoints": list(request.getfixturevalue("etcd").access.endpoints),
            "etcd_prefix": "/tests/group",
        }
        runtime = runtime.model_copy(update={"profile": Profile.model_validate(settings)})
    with running(runtime) as server:
        yield server


def client_of(served, token):
    return AccessClient(served.url, token, patience_s=PATIENCE_S)


@pytest.fixture
def admin(served):
    with contextlib.closing(client_of(served, served.runtime.secrets.coordinator_token)) as client:
        yield client


def group(admin, nodes, **more):
    made = admin.create_join_token(CreateJoinToken(nodes=nodes, **more))
    return made.token, made.record.token_id


def shown(admin, token_id):
    return next(each for each in admin.tokens() if each.token_id == token_id)


def admit(served, token, worker_id, key=None):
    """Join by a request of its own key (or of ``key``); returns the identity and the key."""
    key, request = new_request(worker_id, key)
    with contextlib.closing(client_of(served, token)) as client:
        return client.join(JoinWorker(worker_id=worker_id, csr=request.decode())), key


def worker_of(served, identity):
    return CoordinatorClient(served.url, identity.token, patience_s=PATIENCE_S)


def register(client, worker_id):
    client.register(
        RegisterWorker(worker_id=worker_id, hostname="h", rack="r", available_storage=1)
    )


def test_nodes_at_once_never_exceed_the_uses_and_a_restart_keeps_count(served, admin):
    token, token_id = group(admin, 6)

    def one(number):
        try:
            return admit(served, token, f"many-{number}")[0].worker_id
        except AccessDenied as error:
            assert error.what == "the token is used up"
            return None

    with ThreadPoolExecutor(4) as pool:
        before = [each for each in pool.map(one, range(4)) if each]
    assert len(before) == 4
    served.end(signal.SIGKILL)
    served.start()
    assert shown(admin, token_id).joined == 4
    with ThreadPoolExecutor(8) as pool:
        after = [each for each in pool.map(one, range(4, 16)) if each]
    assert len(after) == 2
    assert (shown(admin, token_id).joined, shown(admin, token_id).nodes) == (6, 6)


def test_a_lost_answer_is_repeated_for_the_same_key_without_a_second_use(served, admin):
    token, token_id = group(admin, 1)
    first, key = admit(served, token, "lost-1")
    again, _ = admit(served, token, "lost-1", key)  # though no use is left
    assert shown(admin, token_id).joined == 1
    register(worker_of(served, again), "lost-1")
    with pytest.raises(AccessDenied):  # ended by the first use of the other
        register(worker_of(served, first), "lost-1")


def test_a_group_token_takes_no_past_present_or_planned_name_of_a_worker(served, admin):
    token, token_id = group(admin, 9)
    admit(served, token, "held-1")
    admin.create_join_token(CreateJoinToken(worker_id="promised-1"))
    admit(served, token, "out-1")
    admin.revoke_worker("out-1")
    agents = CoordinatorClient(served.url, served.runtime.secrets.agents_token)
    register(agents, "unjoined-1")
    used = shown(admin, token_id).joined
    cases = {"held-1": Conflict, "promised-1": AccessDenied, "out-1": AccessDenied}
    for worker_id, kind in (cases | {"unjoined-1": AccessDenied}).items():
        with pytest.raises(kind) as caught:
            admit(served, token, worker_id)
        assert caught.value.what == "a group token admits new names only"
        assert f"tokens join --worker-id {worker_id}" in caught.value.do
    assert shown(admin, token_id).joined == used, "what is refused uses nothing"
    # A token that is made for the name admits the host that takes its place.
    own = admin.create_join_token(CreateJoinToken(worker_id="held-1")).token
    admit(served, own, "held-1")


def test_revoking_the_group_stops_joins_and_each_node_is_taken_out_alone(served, admin):
    token, token_id = group(admin, 9)
    first, key = admit(served, token, "one-1")
    second, _ = admit(served, token, "one-2")
    admin.revoke_token(token_id)
    for request in (("one-3", None), ("one-1", key)):
        with pytest.raises(AccessDenied) as caught:
            admit(served, token, *request)
        assert "was revoked" in caught.value.what
    clients = [worker_of(served, each) for each in (first, second)]
    for client, name in zip(clients, ("one-1", "one-2"), strict=True):
        register(client, name)
    admin.revoke_worker("one-1")
    beat = Heartbeat(worker_id="one-2", status=WorkerStatus.IDLE, incarnation=1)
    assert "one-1" in clients[1].heartbeat(beat).barred
    with pytest.raises(AccessDenied):
        register(clients[0], "one-1")
    renewed = client_of(served, second.token).renew(
        JoinWorker(worker_id="one-2", csr=new_request("one-2")[1].decode())
    )
    register(worker_of(served, renewed), "one-2")


def test_joins_are_audited_with_the_group_the_worker_and_the_address(served, admin):
    token, token_id = group(admin, 1)
    admit(served, token, "audited-1")
    end_s = time.monotonic() + PATIENCE_S
    while not (rows := admin.audit(names=["change.accepted"], worker_id="audited-1")):
        assert time.monotonic() < end_s, "no row of the join"
        time.sleep(0.05)
    data = rows[0].data
    assert (data["what"], data["token_id"]) == ("POST /workers/join", token_id)
    assert (data["who"], data["address"]) == ("join of 1 nodes", "127.0.0.1")


def test_a_join_from_elsewhere_is_refused_whatever_a_header_claims(served, admin):
    token, token_id = group(admin, 1, networks=("10.0.0.0/8", "2001:db8::/32"))
    with contextlib.closing(client_of(served, token)) as client:
        call = JoinWorker(worker_id="far-1", csr=new_request("far-1")[1].decode())
        with pytest.raises(AccessDenied) as caught:
            client._call(
                type(call), "POST", "/workers/join", call, headers={"X-Forwarded-For": "10.0.0.1"}
            )
    assert (caught.value.got, caught.value.wanted) == ("127.0.0.1", "10.0.0.0/8, 2001:db8::/32")
    assert shown(admin, token_id).joined == 0
    near, _ = group(admin, 1, networks=("127.0.0.1",))
    assert admit(served, near, "near-1")[0].worker_id == "near-1"


def test_nodes_join_and_one_that_has_an_identity_keeps_it(served, admin, tmp_path):
    token, _ = group(admin, 2)
    for name in ("disk-1", "disk-2"):
        assert join(tmp_path / name, name, served.url, token) is True
        assert join(tmp_path / name, name, served.url, token) is False
    before = load_runtime(tmp_path / "disk-1")
    newer, token_id = group(admin, 2)  # an image that is rolled out carries the next one
    assert join(tmp_path / "disk-1", "disk-1", served.url, newer) is False
    assert load_runtime(tmp_path / "disk-1") == before
    with pytest.raises(Conflict):  # another host under its name
        join(tmp_path / "thief", "disk-1", served.url, newer)
    assert not (tmp_path / "thief").exists()
    admin.revoke_worker("disk-1")
    with pytest.raises(AccessDenied):  # what was taken out needs a token of its own
        join(tmp_path / "disk-1", "disk-1", served.url, newer)
    assert shown(admin, token_id).joined == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"worker_id": "w", "nodes": 2},
        {"nodes": 0},
        {"nodes": 10_001},
        {"nodes": 2, "ttl_seconds": 8 * DAY_S},
        {"nodes": 2, "ttl_seconds": None},
        {"nodes": 2, "networks": ["10.0.0.1/8"]},
        {"nodes": 2, "networks": ["10.0.0.0/33"]},
        {"nodes": 2, "networks": ["example.com"]},
        {"nodes": 2, "networks": [7]},
    ],
)
def test_group_tokens_that_make_no_sense_are_not_made(rest, body):
    answer = rest.post("/tokens/join", headers={"Authorization": f"Bearer {rest.owner}"}, json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "InvalidInput")


class Book:
    """A registry with one group token for two nodes."""

    def __init__(self, **more):
        self.registry, drawn = TokenRegistry(), new_token("0" * 64)
        self.group = drawn.token_id
        call = CreateJoinToken(nodes=2, ttl_seconds=60.0, **more)
        self.registry.handle(
            IssueToken(token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=0.0)
        )

    def admit(self, worker_id, key="1" * 64, at=1.0, address=""):
        drawn = new_token()
        event = AdmitWorker(
            spends=self.group,
            worker_id=worker_id,
            token_id=drawn.token_id,
            sha256=drawn.sha256,
            expires_at=DAY_S,
            key_sha256=key,
            at=at,
            address=address,
        )
        self.registry.handle(event)
        return drawn.token_id


@pytest.mark.parametrize(
    ("address", "accepted"),
    [
        ("10.255.0.1", True),
        ("11.0.0.1", False),
        ("::ffff:10.0.0.1", True),
        ("::ffff:11.0.0.1", False),
        ("2001:db8:1::7", True),
        ("2001:db9::7", False),
        ("", False),
        ("testclient", False),
    ],
)
def test_networks_are_of_both_versions(address, accepted):
    book = Book(networks=("10.0.0.0/8", "2001:db8::/32"))
    with contextlib.nullcontext() if accepted else pytest.raises(AccessDenied):
        book.admit("w", address=address)


def test_an_expired_group_admits_nobody():
    book = Book()
    with pytest.raises(AccessDenied) as caught:
        book.admit("w", at=60.0)
    assert "has expired" in caught.value.what


def test_no_worker_has_the_name_by_which_an_admission_is_barred():
    """Otherwise the revocation of that worker takes out the node of the admission."""
    book = Book()
    admission = book.registry.find(book.admit("w-1")).admission
    name = revoked_admission(admission)
    for call in (
        CreateJoinToken(worker_id=name),
        CreateToken(name="x", scopes=(Scope.WORKER,), worker_id=name),
    ):
        with pytest.raises(InvalidInput, match=r"is not for workers: got join\."):
            book.registry.handle(IssueToken(token_id="t", sha256="0" * 64, call=call, at=1.0))
    with pytest.raises(InvalidInput, match=r"is not for workers: got join\."):
        book.admit(name, key="2" * 64)
    assert book.registry.find(book.group).joined == 1, "what is refused uses nothing"
    book.admit("join-1", key="2" * 64)


def test_each_node_has_an_admission_of_its_own_to_be_barred_by():
    book = Book()
    book.admit("w-1")
    access = book.admit("w-2", key="2" * 64)
    book.registry.handle(RevokeToken(token_id=access, at=2.0))
    assert book.registry.barred() == ("w-2",)
    admissions = {each.admission for each in book.registry.tokens() if each.kind == "access"}
    assert len(admissions) == 2
    assert all(book.registry.find(each).kind == "join" for each in admissions)
    # Revoking the entry of one node's join revokes what was issued for it.
    book = Book()
    first = book.registry.find(book.admit("w-1"))
    book.admit("w-2")
    book.registry.handle(RevokeToken(token_id=first.admission, at=2.0))
    assert book.registry.barred() == ("w-1",)
    assert revoked_admission(first.admission) not in book.registry.barred()
