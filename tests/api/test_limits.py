"""What the port refuses before it listens to what is said: names, sizes, slowness, floods."""

import asyncio
import contextlib
import queue
import socket
import threading
import time

import pytest
import uvicorn

from paceline.api import (
    MOST,
    HttpProtocol,
    TokenBuckets,
    allowed_hosts,
    bounded_body,
    host_of,
    limits,
    port_protection,
    serve,
)
from paceline.config import Secrets
from paceline.errors import InvalidInput, InvalidProfile
from paceline.schemas import Problem
from tests.api.conftest import app_client, bearer, make_runtime

LONG = 24 * 1024 * 1024  # more than loopback's sockets hold


def with_security(runtime, **security):
    changed = runtime.profile.security.model_copy(update=security)
    return runtime.model_copy(
        update={"profile": runtime.profile.model_copy(update={"security": changed})}
    )


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    """A port with small allowances."""
    runtime = make_runtime(tmp_path_factory.mktemp("limits") / "state")
    runtime = with_security(
        runtime,
        rest_hosts=("fleet.example",),
        failures_per_minute=5,
        calls_per_s=5,
        beats_per_s=10,
    )
    with app_client(runtime) as client:
        yield client


# --- by which name -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]", "[::1]:80", "127.9.9.9"])
def test_loopback_names_are_known(rest, host):
    assert rest.get("/healthz", headers={"Host": host}).status_code == 200


def test_names_of_the_profile_are_known_whatever_their_case(rest):
    for host in ("fleet.example", "FLEET.example:7000"):
        assert rest.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "fleet.example.evil", "", "127.0.0.1.evil", "[::1", "a:b", "::1", "10.0.0.1"],
)
def test_other_names_are_refused_even_with_a_token(rest, host):
    answer = rest.get("/healthz", headers={"Host": host} | bearer(rest.owner))
    assert answer.status_code == 421
    problem = Problem.model_validate_json(answer.content)
    assert "rest_hosts" in problem.do


def test_two_host_headers_are_refused(rest):
    pair = [("Host", "127.0.0.1"), ("Host", "127.0.0.1")]
    assert rest.get("/healthz", headers=pair).status_code == 421


def test_a_forwarded_address_is_not_believed(rest):
    for _ in range(40):
        headers = {"X-Forwarded-For": "192.0.2.9", **bearer("wrong")}
        last = rest.get("/workers", headers=headers)
    assert last.status_code == 429, "the failures count for who really called"


def test_hosts_are_parsed_as_the_rfc_requires():
    assert host_of("A.example:80") == "a.example"
    assert host_of("[::1]:8") == "::1"
    for bad in ("", ":80", "a:", "a:x", "a:123456", "[::1]x", "[::1]:x"):
        assert host_of(bad) is None, bad


# --- how much ------------------------------------------------------------------------------------


def test_an_address_that_is_too_long_is_refused(rest):
    answer = rest.get("/workers?" + "a" * limits.MAX_TARGET_BYTES, headers=bearer(rest.owner))
    assert (answer.status_code, answer.json()["code"]) == (414, "InvalidInput")
    assert rest.get("/" + "a" * limits.MAX_TARGET_BYTES).status_code == 414


def test_headers_that_are_too_many_or_too_long_are_refused(rest):
    many = {f"X-{index}": "1" for index in range(limits.MAX_HEADERS)}
    assert rest.get("/healthz", headers=many).status_code == 431
    long = {"X-Long": "a" * limits.MAX_HEADER_BYTES}
    assert rest.get("/healthz", headers=long).status_code == 431
    assert rest.get("/healthz", headers={"X-Fine": "a" * 8000}).status_code == 200


def test_a_body_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(limits, "BODY_S", 0.05)

    async def receive():
        await asyncio.sleep(60)
        raise AssertionError("the deadline comes first")

    async def story():
        await bounded_body(receive)()

    with pytest.raises(limits.HTTPException) as caught:
        asyncio.run(story())
    assert caught.value.status_code == 408


def test_a_long_poll_is_no_slow_body(monkeypatch):
    monkeypatch.setattr(limits, "BODY_S", 0.01)
    messages = [
        {"type": "http.request", "body": b"x", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive():
        if len(messages) == 1:
            await asyncio.sleep(0.05)
        return messages.pop(0)

    async def story():
        bounded = bounded_body(receive)
        assert (await bounded())["body"] == b"x"
        assert (await bounded())["type"] == "http.disconnect"

    asyncio.run(story())


class _Impatient(HttpProtocol):
    headers_s = 0.3


@pytest.fixture(scope="module")
def slow_server():
    """A real server with a short deadline for headers, on a free port of loopback."""
    yield from _serving(_Impatient)


@pytest.fixture(scope="module")
def patient_server():
    """The same with the deadline that production has."""
    yield from _serving(HttpProtocol)


async def _slow(scope, receive, send):
    if scope["type"] == "http":
        await asyncio.sleep(0.6)  # longer than the deadline for headers
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def _serving(protocol, app=_slow):
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(20)
    listener.close()


def is_closed(sock):
    """Wait for what the server does next; whether that is to close."""
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "])
def test_a_request_that_never_ends_loses_its_connection(slow_server, begun):
    with socket.create_connection(slow_server, 20) as sock:
        sock.sendall(begun)
        assert is_closed(sock), "without an answer"


def test_headers_without_end_lose_their_connection(patient_server):
    with socket.create_connection(patient_server, 8) as sock:  # before their time is over
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        line = b"X-More: " + b"a" * 1000 + b"\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(2000):
                sock.sendall(line)
            answer = sock.recv(100)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400"), answer


def test_a_slow_answer_and_a_kept_connection_are_fine(slow_server):
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    with socket.create_connection(slow_server, 20) as sock:
        for _ in range(2):
            sock.sendall(request)
            assert sock.recv(1000).startswith(b"HTTP/1.1 204")
        sock.sendall(request[:10])
        assert is_closed(sock)


class _Untiring(HttpProtocol):
    read_s = 1.0


@pytest.fixture(scope="module")
def long_answers():
    """A server whose answers are longer than any socket holds; it says when it is done with one."""
    ended = queue.Queue()

    async def app(scope, receive, send):
        headers = [(b"content-length", b"%d" % LONG)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(LONG), "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # waits for the reader
        ended.put(None)

    for address in _serving(_Untiring, app):
        yield address, ended


def test_who_stops_reading_loses_the_connection(long_answers):
    address, ended = long_answers
    with socket.create_connection(address, 20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        ended.get(timeout=20)
        assert _read_on(sock) < LONG, "the rest was given up"


def test_who_reads_slowly_gets_everything(long_answers):
    address, _ = long_answers
    with socket.create_connection(address, 20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert _read_on(sock, pause_s=0.08) > LONG


def _read_on(sock, pause_s=0.0):
    """Read to the end, a megabyte at a time; return how many bytes came."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while some := sock.recv(1024 * 1024, socket.MSG_WAITALL):
            count += len(some)
            time.sleep(pause_s)
    return count


# --- how often -----------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_and_then_its_rate():
    buckets = TokenBuckets(rate=2.0, burst=3.0)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [0.0] * 3
    assert buckets.take("a", 0.0) == pytest.approx(0.5)
    assert buckets.take("b", 0.0) == 0.0, "others have their own"
    assert buckets.take("a", 0.5) == 0.0
    assert buckets.take("a", 0.5) == pytest.approx(0.5)
    assert [buckets.take("a", 100.0) for _ in range(3)] == [0.0] * 3
    assert buckets.take("a", 100.0) > 0
    assert buckets.take("a", 50.0) > 0, "a clock that goes back gives nothing"


def test_buckets_remember_so_many_and_no_more():
    buckets = TokenBuckets(rate=1.0, burst=1.0)
    for index in range(MOST + 500):
        buckets.take(index, 0.0)
    assert len(buckets) == MOST
    assert buckets.take(MOST + 499, 0.0) > 0, "the newest are held"


def until_refused(rest, most, method, path, token, **more):
    for count in range(most):
        answer = rest.request(method, path, headers=bearer(token), **more)
        if answer.status_code == 429:
            return count, answer
    raise AssertionError(f"{most} calls and never refused")


def test_too_many_calls_of_one_token_get_a_retry_after(rest):
    count, answer = until_refused(rest, 2000, "GET", "/workers", rest.owner)
    assert count >= 20, "the burst of four seconds"
    assert int(answer.headers["Retry-After"]) >= 1
    problem = Problem.model_validate_json(answer.content)
    assert problem.code == "TooManyCalls"
    assert problem.wanted
    assert problem.do
    # Others, and workers, are not held up by that.
    beat = {"worker_id": "w", "status": "idle"}
    answer = rest.post("/workers/heartbeat", json=beat, headers=bearer(rest.agents))
    assert answer.status_code == 200


def test_token_guessing_is_throttled_and_a_good_token_still_passes(rest):
    _, answer = until_refused(rest, 500, "GET", "/metrics", "guess")
    assert answer.json()["code"] == "TooManyCalls"
    beat = {"worker_id": "w", "status": "idle"}
    for _ in range(20):
        answer = rest.post("/workers/heartbeat", json=beat, headers=bearer(rest.agents))
        assert answer.status_code == 200


# --- where to listen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "security", "wanted"),
    [
        ("192.0.2.1", {}, ["rest_tls"]),
        ("example.org", {}, ["rest_tls"]),
        ("0.0.0.0", {}, ["rest_tls", "rest_hosts"]),
        ("", {}, ["rest_tls", "rest_hosts"]),
        ("::", {"rest_tls": "installation"}, ["rest_hosts"]),
        ("192.0.2.1", {"rest_tls": "files"}, ["rest_cert", "rest_key"]),
        ("192.0.2.1", {"rest_tls": "files", "rest_cert": "c"}, ["rest_key"]),
        ("127.0.0.1", {"rest_tls": "files"}, ["rest_cert", "rest_key"]),
    ],
)
def test_what_is_missing_to_listen_there_is_named_key_by_key(tmp_path, host, security, wanted):
    runtime = with_security(make_runtime(tmp_path), **security)
    with pytest.raises(InvalidProfile) as caught:
        serve(runtime, host, 0)
    said = str(caught.value.wanted)
    keys = ("rest_cert", "rest_hosts", "rest_key", "rest_tls")
    assert [key for key in keys if f"{key} =" in said] == sorted(wanted)
    assert caught.value.got
    assert caught.value.do
    assert not (tmp_path / "coordinator.sqlite").exists()


def test_without_any_token_nothing_is_served_anywhere(tmp_path):
    runtime = make_runtime(tmp_path).model_copy(update={"secrets": Secrets()})
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(InvalidInput) as caught:
            serve(runtime, host, 0)
        assert "coordinator_token" in str(caught.value.wanted)


def test_certificate_files_that_are_not_there_are_named(tmp_path):
    files = {"rest_tls": "files", "rest_cert": "no.pem", "rest_key": "no-key.pem"}
    with pytest.raises(InvalidProfile) as caught:
        port_protection(with_security(make_runtime(tmp_path), **files), "127.0.0.1")
    assert "no.pem" in str(caught.value.where)


def test_loopback_is_plain_by_default_and_plain_elsewhere_is_explicit(tmp_path):
    runtime = make_runtime(tmp_path)
    assert port_protection(runtime, "127.0.0.1").tls is None
    aloud = with_security(runtime, rest_tls="plaintext-anywhere", rest_hosts=("n.example",))
    protection = port_protection(aloud, "192.0.2.1")
    assert (protection.tls, protection.names) == (None, ("192.0.2.1", "n.example"))
    assert allowed_hosts(aloud, "0.0.0.0") == ("n.example",)


def test_with_a_certificate_of_the_installation_any_address_may_be_served(tmp_path):
    from cryptography import x509

    secure = with_security(
        make_runtime(tmp_path), rest_tls="installation", rest_hosts=("n.example", "192.0.2.7")
    )
    assert port_protection(secure, "0.0.0.0").tls is not None
    served = x509.load_pem_x509_certificate(
        (tmp_path / "tls" / "coordinator" / "server.pem").read_bytes()
    )
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "n.example"}
    addresses = {str(each) for each in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "::1", "192.0.2.7"}
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [], "it is no worker"
