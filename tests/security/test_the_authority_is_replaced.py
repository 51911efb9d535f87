"""The authority is replaced in three steps; nodes follow, and accept none that is not endorsed."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli.authority import authority
from paceline.client import AccessClient, CoordinatorClient
from paceline.config import Endpoints, load_runtime, save_runtime
from paceline.errors import AccessDenied, Conflict, InvalidInput
from paceline.relay import Renewal, add_authority, endorse, join, switch_authority
from paceline.relay.transport import (
    authorities,
    ensure_authority,
    fingerprint,
    issue_for_key,
    make_authority,
    requested_key,
    tls_for,
    transport_for,
)
from paceline.schemas import (
    CreateJoinToken,
    Heartbeat,
    RegisterWorker,
    WorkerIdentity,
    WorkerStatus,
)
from tests.api.conftest import PATIENT, Served, make_runtime


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    runtime = make_runtime(tmp_path / "state")
    security = runtime.profile.security.model_copy(update={"rest_tls": "installation", **PATIENT})
    profile = runtime.profile.model_copy(update={"security": security})
    server = Served(runtime.model_copy(update={"profile": profile}))
    runtime.state_dir.mkdir()
    server.start()
    known = Endpoints(coordinator_url=server.url, coordinator_ca="authority/ca.pem")
    server.runtime = server.runtime.model_copy(update={"endpoints": known})

    save_runtime(server.runtime)
    yield server
    if server.process is not None:
        with contextlib.suppress(ProcessLookupError):
            server.end(signal.SIGKILL)


class Node:
    """A joined node, played by the test."""

    def __init__(self, state: Path, served: Served, worker_id: str) -> None:
        self.state, self.worker_id = state, worker_id
        admin = AccessClient.of(served.runtime)
        token = admin.create_join_token(CreateJoinToken(worker_id=worker_id)).token
        assert join(state, worker_id, served.url, token)
        self.renewal = Renewal(load_runtime(state), on_renewed=lambda _: None)
        call = RegisterWorker(
            worker_id=worker_id, hostname="h", rack="r", available_storage=1, incarnation=1
        )
        self.client.register(call)

    @property
    def client(self) -> CoordinatorClient:
        return CoordinatorClient.of(load_runtime(self.state), worker=True)

    def beat(self) -> bool:
        """Send a heartbeat; return whether the answer has the identity renewed."""
        beat = Heartbeat(worker_id=self.worker_id, status=WorkerStatus.IDLE, incarnation=1)
        return self.client.heartbeat(beat).renew

    def trusted(self) -> list[str]:
        held = [self.state / "identity" / each for each in ("ca.pem", "ca.other.pem")]
        return [fingerprint(each.read_bytes()) for each in held if each.exists()]

    def renew(self) -> None:
        assert self.renewal.renew_if_due(now=True)
        assert not self.beat()


def meet(one: Node, other: Node) -> None:
    """Both sides of a peer connection accept each other; raises ssl.SSLError."""
    settings = [tls_for(load_runtime(each.state), each.worker_id) for each in (one, other)]
    assert all(settings)
    pairs = [ssl.MemoryBIO() for _ in range(2)]
    server = settings[0].context(server=True).wrap_bio(pairs[0], pairs[1], server_side=True)
    client = settings[1].context(server=False).wrap_bio(pairs[1], pairs[0])
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def type_it(served: Served, step: str) -> dict[str, object]:
    done = CliRunner().invoke(
        authority,
        [step, "--state", str(served.runtime.state_dir), "--json"],
        catch_exceptions=True,
        standalone_mode=False,
    )
    if done.exception is not None:
        raise done.exception
    return dict(json.loads(done.output))


def test_two_authorities_are_trusted_until_every_node_has_the_new_one(
    served: Served, tmp_path: Path
) -> None:
    one, other = (Node(tmp_path / name, served, name) for name in ("node-1", "node-2"))
    assert not one.beat()
    old = type_it(served, "show")["signing"]
    assert one.trusted() == [old]
    with pytest.raises(Conflict):
        type_it(served, "switch")  # there is no next one
    new = type_it(served, "add")["beside"]
    with pytest.raises(Conflict):
        type_it(served, "add")
    until_told(one)
    with pytest.raises(Conflict) as refused:
        type_it(served, "switch")
    assert "node-1" in str(refused.value.got)
    one.renew()
    assert one.trusted() == [old, new]
    meet(one, other)  # one trusts both, the other the old one alone
    other.beat()
    other.renew()
    assert type_it(served, "switch")["signing"] == new
    with pytest.raises(Conflict):
        type_it(served, "retire")  # certificates of the old one are in use
    until_told(one)
    one.renew()
    assert one.trusted() == [new, old]
    meet(one, other)  # of the new one and of the old one
    meet(other, one)
    other.renew()
    with pytest.raises(Conflict) as refused:
        type_it(served, "retire")
    assert refused.value.where == served.url, "its own certificate is the old one's"
    served.end(signal.SIGTERM)
    served.start()
    late = Node(tmp_path / "late", served, "node-3")
    assert late.trusted() == [new, old]
    for each in (one, other):
        each.client.register(
            RegisterWorker(
                worker_id=each.worker_id,
                hostname="h",
                rack="r",
                available_storage=1,
                incarnation=2,
            )
        )
    directory = served.runtime.state_dir / "authority"
    old_key = (directory / "ca-key.pem").read_bytes()
    assert type_it(served, "retire")["beside"] is None
    assert not any(each.read_bytes() == old_key for each in directory.iterdir() if each.is_file())
    for each in (one, other, late):
        each.renewal.renew_if_due(now=True)
        assert each.trusted() == [new]
        transport_for(load_runtime(each.state), "127.0.0.1", each.worker_id)  # OpenSSL takes it
    meet(one, late)
    assert type_it(served, "show")["signing"] == new


def until_told(node: Node) -> None:
    end_s = time.monotonic() + 30
    while not node.beat():  # the coordinator looks at its files every two seconds
        assert time.monotonic() < end_s, "no heartbeat has the node renew"
        time.sleep(0.1)


def test_a_copy_of_the_directory_needs_no_deletion(tmp_path: Path) -> None:
    """`scp -rp` adds and overwrites only; at each step the replica agrees with the operator."""
    import shutil

    from paceline.relay import retire_authority, trusted_set

    ours, copy = tmp_path / "ours", tmp_path / "copy"
    make_authority(ours)
    steps = [add_authority, switch_authority, retire_authority] * 2
    for step in steps:
        step(ours)
        shutil.copytree(ours, copy, dirs_exist_ok=True)
        assert trusted_set(copy) == trusted_set(ours)
        signing = ensure_authority(copy)
        assert signing.cert.read_bytes() == ensure_authority(ours).cert.read_bytes()
    (copy / "ca-key.pem").write_bytes(make_authority(tmp_path / "else").key.read_bytes())
    for leftover in ("ca.other.pem", "ca-key.other.pem"):
        (copy / leftover).unlink()
    add_authority(ours)
    switch_authority(ours)
    for name in ("ca.pem", "ca.other.pem", "signing"):  # half of a copy
        shutil.copy(ours / name, copy / name)
    with pytest.raises(InvalidInput):
        authorities(copy)


@pytest.mark.parametrize("signed_by", ["nobody", "the new one itself", "a stranger"])
def test_an_authority_that_no_trusted_one_endorsed_is_not_accepted(
    tmp_path: Path, signed_by: str
) -> None:
    from paceline.relay import require_trusted
    from paceline.relay.transport import new_request

    held, evil, stranger = (make_authority(tmp_path / name) for name in "abc")
    pems = {each: each.cert.read_bytes() for each in (held, evil, stranger)}
    by = {"the new one itself": evil, "a stranger": stranger}.get(signed_by)
    key = requested_key(new_request("node-1")[1])

    def identity(first: bytes, second: bytes, signatures: tuple[str, ...]) -> WorkerIdentity:
        return WorkerIdentity(
            worker_id="node-1",
            certificate=issue_for_key(held, "node-1", key).decode(),
            ca=first.decode(),
            other_ca=second.decode(),
            endorsements=signatures,
            certificate_expires_at=4e9,
            token="pl_x",
            token_expires_at=4e9,
            peer_token="p",
            renew_at=1.0,
            coordinator_urls=(),
            profile={},
        )

    known = {fingerprint(pems[held])}
    forged = endorse(pems[evil], by) if by else ""
    for answer in (
        identity(pems[held], pems[evil], ("", forged)),
        identity(pems[evil], pems[held], (forged, "")),
        identity(pems[evil], pems[stranger], (forged, forged)),
    ):
        with pytest.raises(AccessDenied):
            require_trusted(answer, known)
    good = endorse(pems[evil], held)
    require_trusted(identity(pems[held], pems[evil], ("", good)), known)
    require_trusted(identity(pems[evil], pems[held], (good, "")), known)
    with pytest.raises(AccessDenied):
        require_trusted(identity(pems[evil], pems[stranger], (good, good)), known)


def test_a_node_that_was_taken_out_joins_with_a_new_token(served: Served, tmp_path: Path) -> None:
    """The same start, with another token in its place; the spent one spends nothing."""
    admin = AccessClient.of(served.runtime)
    state = tmp_path / "node"
    first = admin.create_join_token(CreateJoinToken(worker_id="node-1")).token
    assert join(state, "node-1", served.url, first)
    assert not join(state, "node-1", served.url, first)
    admin.revoke_worker("node-1")
    assert not join(state, "node-1", served.url, first)
    second = admin.create_join_token(CreateJoinToken(worker_id="node-1")).token
    assert join(state, "node-1", served.url, second)
    client = CoordinatorClient.of(load_runtime(state), worker=True)
    beat = Heartbeat(worker_id="node-1", status=WorkerStatus.IDLE, incarnation=1)
    assert "node-1" not in client.heartbeat(beat).barred
