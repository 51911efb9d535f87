"""A join token pins one certificate, and that certificate is all that a node trusts."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509

from paceline.api import IdentityIssuer
from paceline.client import CoordinatorClient, Follower
from paceline.cluster import security_of
from paceline.config import Secrets, load_runtime, one_certificate, read_certificate
from paceline.coordinator import new_token
from paceline.errors import AccessDenied, InvalidInput, ServiceUnavailable
from paceline.relay import Renewal, join
from paceline.relay.transport import (
    Authority,
    GrpcTransport,
    TcpTransport,
    TlsSettings,
    fingerprint,
    issue_for_key,
    issue_identity,
    issue_server,
    make_authority,
    requested_key,
)
from paceline.schemas import WorkerIdentity
from tests.api.conftest import make_runtime
from tests.support.web import Call, Web, serving


class Two(NamedTuple):
    ours: Authority
    theirs: Authority

    @property
    def bundle(self) -> bytes:
        """Return the genuine certificate first, which the fingerprint covers, and another."""
        return self.ours.cert.read_bytes() + self.theirs.cert.read_bytes()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    made = [make_authority(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs")]
    return Two(*made)


@contextmanager
def coordinator(
    answers: dict[str, Callable[[dict[str, str]], bytes]], tls: tuple[Path, Path] | None = None
) -> Iterator[Web]:
    """A server that gives these answers."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)

    def answer(call: Call) -> tuple[int, bytes]:
        return 200, answers[call.path](json.loads(call.body) if call.body else {})

    with serving(answer, context) as web:
        yield web


def identity(ca: bytes, by: Authority, asked: dict[str, str], **more: object) -> WorkerIdentity:
    key = requested_key(asked["csr"].encode())
    fields: dict[str, object] = {
        "worker_id": asked["worker_id"],
        "certificate": issue_for_key(by, asked["worker_id"], key).decode(),
        "ca": ca.decode(),
        "certificate_expires_at": 4e9,
        "token": "pl_x",
        "token_expires_at": 4e9,
        "peer_token": "p",
        "renew_at": 1.0,
        "coordinator_urls": (),
        "profile": {},
    }
    return WorkerIdentity.model_validate(fields | more)


def trusted_block(pem: bytes) -> bytes:
    return pem.replace(b"BEGIN CERT", b"BEGIN TRUSTED CERT").replace(
        b"END CERT", b"END TRUSTED CERT"
    )


def in_one_block(two: Two) -> bytes:
    """Both certificates' DER in one PEM block."""
    pems = [each.cert.read_text() for each in two]
    der = b"".join(ssl.PEM_cert_to_DER_cert(each) for each in pems)
    body = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n"


MORE = {
    "another certificate": lambda two: two.bundle,
    "another kind of block": lambda two: (
        two.ours.cert.read_bytes() + trusted_block(two.theirs.cert.read_bytes())
    ),
    "both in one block": in_one_block,
    "the key too": lambda two: two.ours.cert.read_bytes() + two.ours.key.read_bytes(),
    "more than it takes": lambda two: two.ours.cert.read_bytes() + b" " * 70_000,
    "nothing": lambda _two: b"",
    "a key alone": lambda two: two.ours.key.read_bytes(),
}


@pytest.mark.parametrize("case", MORE)
def test_anything_but_one_certificate_is_refused_wherever_it_is_read(
    two: Two, tmp_path: Path, case: str
) -> None:
    pem = MORE[case](two)
    path = tmp_path / "ca.pem"
    path.write_bytes(pem)
    own = issue_identity(two.ours, "node-1", tmp_path)
    runtime = make_runtime(tmp_path / "state")
    authority = runtime.state_dir / "authority"
    authority.mkdir(parents=True)
    (authority / "ca.pem").write_bytes(pem)
    dask = Secrets(tls_ca=str(path), tls_cert=str(own.cert), tls_key=str(own.key))
    readers: dict[str, Callable[[], object]] = {
        "the record": lambda: one_certificate(pem),
        "the file": lambda: read_certificate(path),
        "the fingerprint": lambda: fingerprint(pem),
        "a client": lambda: CoordinatorClient("https://127.0.0.1:1", "t", ca=path),
        "a client with the text": lambda: CoordinatorClient("https://127.0.0.1:1", "t", ca=pem),
        "a follower": lambda: Follower(["https://127.0.0.1:1"], "t", ca=str(path)),
        "peers over tcp": lambda: TcpTransport(
            "t", TlsSettings(ca=path, cert=own.cert, key=own.key)
        ),
        "peers over grpc": lambda: GrpcTransport(
            "t", TlsSettings(ca=path, cert=own.cert, key=own.key)
        ),
        "dask": lambda: security_of(runtime.model_copy(update={"secrets": dask})),
        "joining": lambda: join(
            tmp_path / "node", "node-1", "https://127.0.0.1:1", new_token("0" * 64).text, ca=path
        ),
        "issuing": lambda: issue_identity(
            Authority(cert=path, key=two.ours.key), "node-2", tmp_path / "more"
        ),
    }
    for name, read in readers.items():
        if name == "a client with the text" and not pem:
            continue  # no text is no authority of one's own
        with pytest.raises(InvalidInput) as caught:
            read()
        assert caught.value.wanted or caught.value.got, name
    admission = IdentityIssuer(runtime, None)  # type: ignore[arg-type]
    for show in (admission.ca_pem, admission.ca_sha256):
        with pytest.raises(ServiceUnavailable):
            show()  # the coordinator's own file is no fault of its caller's
    assert not (tmp_path / "node").exists()


def test_what_is_trusted_is_encoded_again(two: Two) -> None:
    pem = two.ours.cert.read_bytes()
    around = b"subject=/CN=ours\r\n" + pem.replace(b"\n", b"\r\n") + b"\r\nand more text\r\n"
    assert one_certificate(around) == one_certificate(pem) == pem
    assert x509.load_pem_x509_certificates(one_certificate(around)) == [
        x509.load_pem_x509_certificate(pem)
    ]


@pytest.mark.parametrize("case", ["another certificate", "another kind of block"])
def test_a_bundle_behind_the_pin_never_gets_the_token(two: Two, tmp_path: Path, case: str) -> None:
    """The genuine certificate and the attacker's: the attacker's server would be believed."""
    token = new_token(fingerprint(two.ours.cert.read_bytes())).text
    tls = issue_server(two.theirs, ["127.0.0.1"], tmp_path, valid_days=1)
    answers = {
        "/ca.pem": lambda _: MORE[case](two),
        "/workers/join": lambda asked: (
            identity(two.theirs.cert.read_bytes(), two.theirs, asked).model_dump_json().encode()
        ),
    }
    with coordinator(answers, tls) as heard:
        with pytest.raises(InvalidInput) as caught:
            join(tmp_path / "node", "node-1", heard.url, token)
    assert caught.value.where == f"{heard.url}/ca.pem"
    assert [each.path for each in heard.calls] == ["/ca.pem"]
    assert not any(token in each.headers.get("Authorization", "") for each in heard.calls)
    assert not (tmp_path / "node").exists(), "nothing is left behind"


@pytest.mark.parametrize("field", ["ca", "rest_ca"])
@pytest.mark.parametrize("sent", ["bundle", "theirs"])
def test_an_identity_with_another_authority_is_not_kept(
    two: Two, tmp_path: Path, field: str, sent: str
) -> None:
    """The pin holds for what peers are checked against too, whichever way the port is trusted."""
    pem = two.bundle if sent == "bundle" else two.theirs.cert.read_bytes()
    token = new_token(fingerprint(two.ours.cert.read_bytes())).text
    ca = pem if field == "ca" else two.ours.cert.read_bytes()
    more = {"rest_ca": pem.decode()} if field == "rest_ca" else {}

    def answer(asked: dict[str, str]) -> bytes:
        return identity(ca, two.ours, asked, **more).model_dump_json().encode()

    node = tmp_path / "node"
    with coordinator({"/workers/join": answer}) as heard:
        if (field, sent) == ("rest_ca", "theirs"):
            assert join(node, "node-1", heard.url, token)  # the port's may be another one
            assert (node / "identity" / "rest-ca.pem").read_bytes() == pem
            return
        with pytest.raises(AccessDenied if sent == "theirs" else InvalidInput):
            join(node, "node-1", heard.url, token)
    assert not node.exists()


def test_a_renewal_does_not_exchange_the_authority(two: Two, tmp_path: Path) -> None:
    token = new_token(fingerprint(two.ours.cert.read_bytes())).text
    cas = [two.ours, two.theirs]

    def answer(asked: dict[str, str]) -> bytes:
        by = cas[0]
        return identity(by.cert.read_bytes(), by, asked).model_dump_json().encode()

    node = tmp_path / "node"
    with coordinator({"/workers/join": answer, "/workers/renew": answer}) as heard:
        join(node, "node-1", heard.url, token)
        before = {each: each.read_bytes() for each in (node / "identity").iterdir()}
        cas.reverse()
        renewal = Renewal(load_runtime(node), on_renewed=lambda _: None)
        with pytest.raises(AccessDenied):
            renewal.renew_if_due()
        assert {each: each.read_bytes() for each in (node / "identity").iterdir()} == before
        cas.reverse()
        assert renewal.renew_if_due()


@pytest.mark.parametrize("leader", ["ours", "theirs", "plain"])
def test_a_join_at_a_follower_goes_only_to_a_leader_of_the_pin(
    two: Two, tmp_path: Path, leader: str
) -> None:
    """The leader's URL is not listed on a node that has yet to join: its certificate decides."""
    token = new_token(fingerprint(two.ours.cert.read_bytes())).text
    ca = two.ours.cert.read_bytes()
    by = two.theirs if leader == "theirs" else two.ours
    tls = [
        issue_server(each, ["127.0.0.1"], tmp_path / name, valid_days=1)
        for each, name in ((two.ours, "follower"), (by, "leader"))
    ]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls[0])
    answers = {
        "/workers/join": lambda asked: identity(ca, two.ours, asked).model_dump_json().encode()
    }
    with coordinator(answers, None if leader == "plain" else tls[1]) as leads:

        def follow(call: Call) -> tuple[int, bytes, dict[str, str]]:
            if call.path == "/ca.pem":
                return 200, ca, {}
            return 307, b"", {"Location": leads.url + call.path}

        with serving(follow, context) as follower:
            node = tmp_path / "node"
            if leader == "ours":
                assert join(node, "node-1", follower.url, token)
                return
            with pytest.raises(ServiceUnavailable):
                join(node, "node-1", follower.url, token)
        assert not leads.calls, "the token goes to no other server"
