"""Tokens, certificate requests and certificates: no text opens anything or breaks its parser."""

from __future__ import annotations

import base64
import ssl
from typing import NamedTuple

import pytest
from cryptography import x509
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from paceline.api import Authenticator
from paceline.config import Secrets, one_certificate
from paceline.coordinator import TokenRegistry, new_token
from paceline.coordinator.state import IssueToken
from paceline.errors import AccessDenied, InvalidInput
from paceline.relay.joining import _pin_of
from paceline.relay.transport import (
    fingerprint,
    key_sha256,
    make_authority,
    new_request,
    requested_key,
)
from paceline.schemas import CreateJoinToken, CreateToken, Scope

BOUNDED = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NOW = 1000.0
PINNED = st.builds(
    "pl_{}_{}".format, st.text(max_size=9), st.text("0123456789abcdefg", min_size=62, max_size=66)
)


class Given(NamedTuple):
    book: TokenRegistry
    texts: list[str]
    certificate: bytes
    other: bytes
    key: bytes
    request: bytes


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Given:
    book, texts = TokenRegistry(), []
    calls = [
        CreateToken(name="x", scopes=(Scope.ADMIN,)),
        CreateJoinToken(worker_id="w", ttl_seconds=60.0),
    ]
    for call in calls:
        drawn = new_token("0" * 64 if isinstance(call, CreateJoinToken) else None)
        book.handle(IssueToken(token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=NOW))
        texts.append(drawn.text)
    made = [make_authority(tmp_path_factory.mktemp("ca")).cert.read_bytes() for _ in range(2)]
    key, request = new_request("w")
    return Given(book, texts, *made, key, request)


@st.composite
def edits(draw_: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """Small changes of a text: where (as a share of it), what kind, with what."""
    kinds = st.sampled_from(["flip", "cut", "insert", "repeat"])
    places = st.floats(0, 1, exclude_max=True)
    return draw_(st.lists(st.tuples(kinds, places, st.binary(min_size=1, max_size=8)), max_size=6))


def edited(text: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, piece in changes:
        at = int(share * len(text))
        if kind == "flip" and text:
            text = text[:at] + bytes([text[at] ^ (piece[0] or 1)]) + text[at + 1 :]
        elif kind == "cut":
            text = text[:at] + text[at + piece[0] :]
        elif kind == "insert":
            text = text[:at] + piece + text[at:]
        else:
            text = text[:at] + text[at:] * 2
    return text


def in_pem(pem: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """The changes made to what the PEM block holds, which reaches the parser of DER."""
    lines = pem.strip().splitlines()
    body = base64.encodebytes(edited(base64.b64decode(b"".join(lines[1:-1])), changes))
    return b"\n".join([lines[0], body.strip(), lines[-1], b""])


@BOUNDED
@given(changes=edits(), which=st.integers(0, 1))
def test_a_changed_token_opens_nothing(
    real: Given, changes: list[tuple[str, float, bytes]], which: int
) -> None:
    text = edited(real.texts[which].encode(), changes)
    assume(text != real.texts[which].encode())
    with pytest.raises(AccessDenied):
        real.book.authenticate(text.decode("latin-1"), NOW)


@BOUNDED
@given(headers=st.lists(st.binary(max_size=200), max_size=3), changes=edits())
def test_no_authorization_header_breaks_the_guard(
    real: Given, headers: list[bytes], changes: list[tuple[str, float, bytes]]
) -> None:
    authenticator = Authenticator(Secrets(coordinator_token="owner"), lambda: real.book)
    nearly = edited(b"Bearer " + real.texts[0].encode(), changes)
    for given_ in (headers, [nearly], [nearly, *headers]):
        try:
            caller = authenticator.authenticate(given_, NOW)
        except AccessDenied:
            continue
        _, _, shown = given_[0].partition(b" ")
        assert len(given_) == 1
        assert shown.decode("latin-1") in real.texts
        assert caller.token_id in shown.decode("latin-1")


@BOUNDED
@given(text=st.one_of(st.text(max_size=200), PINNED))
def test_a_pin_is_a_whole_digest_or_none(text: str) -> None:
    try:
        pin = _pin_of(text)
    except InvalidInput:
        return
    assert len(pin) == 64
    assert int(pin, 16) >= 0
    assert text.endswith("_" + pin) or text == pin


@BOUNDED
@given(changes=edits(), inside=st.booleans())
def test_what_passes_for_a_certificate_is_exactly_one(
    real: Given, changes: list[tuple[str, float, bytes]], inside: bool
) -> None:
    """Whatever comes out is one certificate, OpenSSL trusts it as one, and the pin is of it."""
    pem = (in_pem if inside else edited)(real.certificate, changes)
    for candidate in (pem, pem + real.other, real.other + pem, pem + real.key):
        try:
            found = one_certificate(candidate)
        except InvalidInput:
            continue
        assert len(x509.load_pem_x509_certificates(found)) == 1
        assert one_certificate(found) == found
        assert fingerprint(candidate) == fingerprint(found)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=found.decode())
        except ssl.SSLError:
            continue  # a certificate that no OpenSSL reads is trusted by none
        assert context.cert_store_stats()["x509"] == 1


@BOUNDED
@given(noise=st.binary(max_size=300))
def test_noise_is_no_certificate_and_no_request(noise: bytes) -> None:
    for read in (one_certificate, fingerprint, requested_key):
        with pytest.raises(InvalidInput):
            read(noise)


@BOUNDED
@given(changes=edits(), inside=st.booleans())
def test_a_changed_request_is_refused_or_is_of_the_same_key(
    real: Given, changes: list[tuple[str, float, bytes]], inside: bool
) -> None:
    """Nothing but who has the private key gets a certificate for a public one."""
    pem = (in_pem if inside else edited)(real.request, changes)
    try:
        key = requested_key(pem)
    except InvalidInput:
        return
    assert key_sha256(key) == key_sha256(requested_key(real.request))
