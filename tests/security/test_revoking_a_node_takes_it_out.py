"""Revoking a node's token takes out the node, however often it renewed, and stays so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.api import AccessMiddleware, Authenticator
from paceline.config import Secrets, SecuritySettings
from paceline.coordinator import MAX_UNUSED, NewToken, TokenRegistry, new_token
from paceline.coordinator.state import AdmitWorker, IssueToken, RevokeToken, TokenFirstUsed
from paceline.errors import AccessDenied, NotLeading
from paceline.relay.protocol import Extent
from paceline.relay.transport import (
    Authority,
    GrpcTransport,
    TcpTransport,
    TlsSettings,
    Transport,
    issue_for_key,
    make_authority,
    new_request,
    requested_key,
)
from paceline.schemas import CreateJoinToken, revoked_admission
from tests.api.conftest import Served, make_runtime
from tests.relay.peers import Heard, Pair
from tests.security.kit import Rest, rest
from tests.support.command import Ended, paceline

__all__ = ["rest"]


def all_doors(rest: Rest, worker_id: str, token: str) -> set[int]:
    """What the worker's own routes answer to a token."""
    worker = {"worker_id": worker_id, "hostname": "h", "rack": "r", "available_storage": 1}
    lanes = f"/deployments/none/lanes?worker_id={worker_id}"
    return {
        rest.beat(worker_id, token),
        rest.call("POST", "/workers/register", token, worker).status_code,
        rest.call("GET", lanes, token).status_code,
        rest.call("GET", "/deployments/none/manifest", token).status_code,
        rest.ask("renew", worker_id, token).status_code,
    }


@pytest.mark.parametrize(
    ("which", "used"),
    [("the one before", True), ("the newest", False), ("the join token", True)],
)
def test_revoking_any_token_of_a_renewed_node_ends_them_all(
    rest: Rest, which: str, used: bool
) -> None:
    joining = rest.join_token("node-1")
    first = str(rest.ask("join", "node-1", joining).json()["token"])
    assert rest.beat("node-1", first) == 200
    second = rest.renewed("node-1", first)
    if used:
        assert rest.beat("node-1", second) == 200
    unspent = rest.join_token("node-1")
    revoked = {"the one before": first, "the newest": second, "the join token": joining}[which]
    assert rest.revoke(revoked) == 200
    for attempt in range(2):
        for token in (first, second):
            assert all_doors(rest, "node-1", token) == {401}
        assert rest.ask("join", "node-1", joining).status_code == 401
        assert rest.barred() == ("node-1",)
        if attempt == 0:
            rest.restart()
    # What was handed out for the worker before it was taken out does not let it in again.
    if which != "the join token":
        assert rest.ask("join", "node-1", unspent).status_code == 401
    anew = rest.joined("node-1")
    assert rest.beat("node-1", anew) == 200
    assert "node-1" not in rest.barred()
    # Asked once more (an answer was lost), the same call does not end what came after it.
    assert rest.revoke(revoked) == 200
    assert rest.beat("node-1", anew) == 200


def test_revoking_one_node_leaves_the_others(rest: Rest) -> None:
    one, other = rest.joined("node-1"), rest.joined("node-2")
    assert rest.revoke(one) == 200
    assert rest.beat("node-2", other) == 200
    assert rest.barred() == ("node-1",)


def test_a_predecessor_ends_when_its_successor_is_first_used(rest: Rest) -> None:
    first = rest.joined("node-1")
    assert rest.beat("node-1", first) == 200
    second = rest.renewed("node-1", first)
    assert rest.beat("node-1", first) == 200, "the answer may have been lost"
    assert rest.beat("node-1", second) == 200
    assert all_doors(rest, "node-1", first) == {401}
    rest.restart()
    assert all_doors(rest, "node-1", first) == {401}
    assert rest.beat("node-1", second) == 200
    listed = rest.call("GET", "/tokens", rest.owner).json()["tokens"]
    ended = {each["token_id"]: each["revoked_at"] for each in listed}
    assert ended[first.split("_")[1]]
    assert not ended[second.split("_")[1]]
    assert rest.barred() == (), "it renewed; nobody took it out"


def test_a_renewal_whose_answer_was_lost_is_asked_for_again(rest: Rest) -> None:
    first = rest.joined("node-1")
    assert rest.beat("node-1", first) == 200
    answers = []
    for _ in range(3 * MAX_UNUSED):
        answers.append(rest.renewed("node-1", first))
        assert rest.beat("node-1", first) == 200
    rest.restart()
    # The newest ones are good, whichever of them arrives; the first use ends all others.
    late = answers[-MAX_UNUSED]
    assert rest.beat("node-1", late) == 200
    for token in (first, *answers):
        assert rest.beat("node-1", token) == (200 if token == late else 401)
    assert rest.renewed("node-1", late)


def test_the_command_takes_out_the_worker_that_it_names(tmp_path: Path) -> None:
    from paceline.client import AccessClient
    from paceline.config import Endpoints, save_runtime
    from paceline.schemas import JoinWorker

    server = Served(make_runtime(tmp_path / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    try:
        endpoints = Endpoints(coordinator_url=server.url)
        save_runtime(server.runtime.model_copy(update={"endpoints": endpoints}))
        admin = AccessClient(server.url, server.runtime.secrets.coordinator_token)
        made = admin.create_join_token(CreateJoinToken(worker_id="node-1"))
        unspent = admin.create_join_token(CreateJoinToken(worker_id="node-1"))
        call = JoinWorker(worker_id="node-1", csr=new_request("node-1")[1].decode())
        token = AccessClient(server.url, made.token).join(call).token
        token = AccessClient(server.url, token).renew(call).token

        def revoke(*words: str) -> Ended:
            return paceline("tokens", "revoke", *words, "--state", server.runtime.state_dir)

        done = revoke("--worker-id", "node-1", "--json")
        assert done.returncode == 0, done.stderr
        ended = set(json.loads(done.stdout)["token_ids"])
        assert token.split("_")[1] in ended
        for dead in (token, made.token, unspent.token):
            with pytest.raises(AccessDenied):
                AccessClient(server.url, dead).renew(call)
        again = revoke("--worker-id", "node-1")
        assert again.returncode == 1
        assert "this worker has no token" in again.stderr
        for words in ((), ("x", "--worker-id", "node-1")):
            assert revoke(*words).returncode == 2
    finally:
        server.end()


# --- the book alone ------------------------------------------------------------------------------


class Book:
    def __init__(self) -> None:
        self.book, self.now = TokenRegistry(), 1000.0

    def join_token(self) -> NewToken:
        drawn = new_token("0" * 64)
        call = CreateJoinToken(worker_id="w", ttl_seconds=7 * 86_400)
        self.take(IssueToken, token_id=drawn.token_id, sha256=drawn.sha256, call=call)
        return drawn

    def admit(self, shown: NewToken, key: str = "1" * 64) -> NewToken:
        drawn = new_token()
        self.take(
            AdmitWorker,
            spends=shown.token_id,
            worker_id="w",
            token_id=drawn.token_id,
            sha256=drawn.sha256,
            expires_at=self.now + 30 * 86_400,
            key_sha256=key,
        )
        return drawn

    def take(self, kind: Any, **fields: object) -> None:
        self.now += 1.0
        self.book.handle(kind(at=self.now, **fields))


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_node_that_renews_without_end_fills_no_store(used: bool) -> None:
    """One worker could make the store refuse everybody else's tokens."""
    book = Book()
    joining = book.join_token()
    held = book.admit(joining)
    book.take(TokenFirstUsed, token_id=held.token_id)
    for _ in range(200):
        made = book.admit(held)
        if used:
            book.take(TokenFirstUsed, token_id=made.token_id)
            held = made
        book.admit(joining)  # its join token is answered again too
    assert len(book.book.tokens()) <= MAX_UNUSED + 4
    book.take(RevokeToken, token_id=held.token_id)
    assert book.book.barred() == ("w",)
    assert all(each.revoked_at for each in book.book.tokens())


def test_a_replaced_node_cannot_return_with_its_old_join_token() -> None:
    book = Book()
    old = book.join_token()
    book.admit(old, "1" * 64)
    new = book.admit(book.join_token(), "2" * 64)
    with pytest.raises(AccessDenied):
        book.admit(old, "1" * 64)
    assert book.book.authenticate(new.text, book.now)
    assert book.book.barred() == (revoked_admission(old.token_id),)


# --- the guard where nothing can be committed ----------------------------------------------------


def test_a_first_use_passes_where_it_cannot_be_kept_yet() -> None:
    """A standby answers reads of a token that was just renewed; the leader ends the one before."""
    book, begun, reached = Book(), [], []
    held = book.admit(book.join_token())

    def begin(token_id: str) -> None:
        begun.append(token_id)
        raise NotLeading("this replica does not lead")

    async def app(*_: object) -> None:
        reached.append(True)

    guard = AccessMiddleware(
        app,
        authenticator=Authenticator(Secrets(coordinator_token="owner"), lambda: book.book),
        security=SecuritySettings(),
        names=(),
        refused=lambda _: None,
        begin=begin,
        wall=lambda: book.now,
    )
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/deployments/d/manifest",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"authorization", b"Bearer " + held.text.encode()),
        ],
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(guard(scope, None, None))  # type: ignore[arg-type]
    assert (begun, reached) == ([held.token_id], [True])


# --- what peers do -------------------------------------------------------------------------------


class Admitted(NamedTuple):
    authority: Authority
    root: Path

    def tls(self, worker_id: str, admission: str) -> TlsSettings:
        key, request = new_request(worker_id)
        found = requested_key(request)
        pem = issue_for_key(self.authority, worker_id, found, admission=admission)
        path = self.root / f"{worker_id}-{admission}.pem"
        path.write_bytes(key + pem)
        return TlsSettings(ca=self.authority.cert, cert=path, key=path)


@pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])
def test_a_certificate_that_was_taken_back_opens_no_peer_port_again(
    tmp_path: Path, kind: type[Any]
) -> None:
    """The worker was let in again, as the same worker; its certificate of before was not."""
    issued = Admitted(make_authority(tmp_path / "ca"), tmp_path)

    def make(worker_id: str) -> Transport:
        return kind("t", issued.tls(worker_id, "aaaa"))  # type: ignore[no-any-return]

    pair = Pair(tmp_path, make)
    try:
        theirs, mine = pair.open()
        pair.hold_all(theirs)
        old, new = make("node-1"), kind("t", issued.tls("node-1", "bbbb"))
        running = Heard()
        stream = pair.reader.pull(mine, pair.address, running, transport=old)
        stream.request(Extent(0, 1))
        running.wait_pieces(1)
        pair.source.transport.barred.replace([revoked_admission("aaaa")])
        stream.request(Extent(1, 2))
        assert "taken back" in str(running.failure()), "in the middle of a stream too"
        refused = Heard()
        pair.reader.pull(mine, pair.address, refused, transport=old).request(Extent(1, 2))
        assert "taken back" in str(refused.failure())
        again = Heard()
        pair.reader.pull(mine, pair.address, again, transport=new).request(Extent(1, 2))
        again.wait_pieces(1)
    finally:
        pair.close()
