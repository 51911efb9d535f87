"""Words of peers, servers and workers steer no terminal and begin no line of a log."""

from __future__ import annotations

import io
import json
import logging
import pickle
import socket
import subprocess
import sys
from types import SimpleNamespace

import grpc
import pytest

from paceline.client import error_of
from paceline.cluster import Member, Order, events_in
from paceline.errors import PacelineError, PeerLost, TrainingFailed
from paceline.relay.transport import GrpcPullStream, Kind, PlainChannel, encode_payload, read_frame
from paceline.schemas import Failure, Problem, RegisterWorker
from paceline.storage import from_client_error
from paceline.text import OneLine, has_password, printable, without_passwords

EVIL = (
    "gone\r\n2026-01-01 00:00:00 INFO promoted model=m\x1b[2J\x1b]0;title\x07"
    "\x9b31m\x85\u2028\u202eecilA\u2066\u200f\x00\x7f\ud800"
)


def harmless(text: str) -> bool:
    return text.isprintable() and len(text) < 20_000


def logged(*arguments: object, form: str = "%s") -> str:
    """Return what a process without a formatter of its own would log."""
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    logger.warning(form, *arguments)
    return stream.getvalue().removesuffix("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://ann:secret@host/m", "s3://ann:***@host/m"),
        ("redis://:se@cret@host:1", "redis://:***@host:1"),
        ("git+https://secret@host/r.git@abc", "git+https://***@host/r.git@abc"),
        ("HTTPS://secret:x-oauth-basic@host, oci://secret@h", "HTTPS://***@host, oci://***@h"),
        ("https://host/team/r@1", None),
        ("hf://org/name@main and models:/m@champion", None),
        ("ssh://git@host/r, postgresql://ann@host/d", None),
        ('{"url":"https://host","mail":"ann@host"}', None),
    ],
)
def test_secrets_of_urls_are_hidden_and_nothing_else(text: str, shown: str | None) -> None:
    assert without_passwords(text) == (shown or text)
    assert has_password(text) == (shown is not None)


def test_a_tcp_peers_error_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        said = EVIL.encode("utf-8", "replace") + b"\xff\x1b[1m"
        theirs.sendall(encode_payload(Kind.ERROR, said))
        with pytest.raises(PacelineError) as caught:
            read_frame(PlainChannel(ours, 1.0), 1e12, Kind.CHALLENGE)
    assert "gone" in str(caught.value)
    assert harmless(logged(caught.value))


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL])
def test_a_grpc_peers_details(code: grpc.StatusCode) -> None:
    stream = SimpleNamespace(_pull=SimpleNamespace(key="node-1"), _silent=False, _welcomed=True)
    call = SimpleNamespace(details=lambda: EVIL, code=lambda: code)
    error = GrpcPullStream._failure(stream, call)  # type: ignore[arg-type]
    assert "gone" in str(error)
    assert harmless(logged(error))


@pytest.mark.parametrize(
    "body",
    [
        EVIL.encode("utf-8", "replace"),
        json.dumps(
            dict.fromkeys(["title", "detail", "code", "got", "wanted", "where", "do"], EVIL)
            | {"status": 409}
        ).encode("utf-8", "replace"),
    ],
)
def test_a_rest_answer(body: bytes) -> None:
    error = error_of(409, body, "POST /x")
    assert "gone" in str(error)
    assert harmless(str(error))


def test_an_s3_error() -> None:
    response = {"Error": {"Code": EVIL}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    assert harmless(str(from_client_error(response, "http://s3", "s3://b/k")))


def test_a_workers_names_and_failure() -> None:
    worker = RegisterWorker(
        worker_id="node-1",
        hostname="h\x1b[2J\n",
        rack="r\u202e",
        labels={"host": "a\r", "rack": "\x9b", "zone": "\x00"},  # type: ignore[arg-type]
        address="1.2.3.4:5\n",
        available_storage=0,
    )
    labels = (worker.labels.host, worker.labels.rack, worker.labels.zone)
    assert all(harmless(each) for each in (worker.hostname, worker.rack, worker.address, *labels))
    again = RegisterWorker.model_validate_json(worker.model_dump_json())
    assert again == worker
    failure = Failure(code="X", message=EVIL.replace("\ud800", ""))
    assert harmless(failure.message)
    problem = Problem(title="t", status=400, detail=EVIL.replace("\ud800", ""), code="\x1b")
    assert harmless(problem.detail)
    assert harmless(problem.code)


def test_a_ranks_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    order = Order(process_id="p", argv=("x",), env={}, input_json="", directory="")
    member = Member(worker_id="node-1", address="a", order=order)
    with caplog.at_level(logging.INFO):
        assert list(events_in([(member, EVIL * 100)])) == []
    (message,) = caplog.messages
    assert harmless(message)
    assert len(message) < 600


def test_anerror_of_a_remote_task_crosses_processes_and_stays_harmless() -> None:
    error = TrainingFailed(EVIL, got=EVIL * 1000, where=EVIL, do=EVIL)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (TrainingFailed, str(error))
    assert harmless(str(again))
    assert harmless(PeerLost("x", got=ValueError(EVIL)).one_line())


def test_an_event_on_the_board() -> None:
    assert harmless(printable(EVIL))


def test_a_log_line_with_a_traceback_has_no_line_that_looks_like_an_event() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.LogRecord("a", 40, "f", 1, "broke: %s", (EVIL,), sys.exc_info())
    first, *rest = OneLine("%(levelname)s %(message)s").format(record).split("\n")
    assert all(harmless(each) for each in (first, *rest))
    assert all(each.startswith("  ") for each in rest)


COMMAND = """
import sys
from paceline.cli import main
from paceline.errors import AccessDenied

evil = sys.argv.pop()
def broken(*_, **__):
    raise {error}
main.cli.main = broken
main.run()
"""


@pytest.mark.parametrize("error", ["AccessDenied(evil, got=evil)", "ValueError(evil)"])
def test_what_the_command_line_prints(error: str) -> None:
    evil = EVIL.replace("\x00", "").replace("\ud800", "")
    argv = [sys.executable, "-c", COMMAND.format(error=error), "x", "--json", evil]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode in (1, 77)
    shown = done.stdout.decode() + done.stderr.decode()
    assert "promoted" in shown
    assert all(harmless(line) for line in shown.split("\n"))
    assert not any(line.startswith("2026-01-01") for line in shown.split("\n"))


def test_printable_is_bounded_and_changes_nothing_twice() -> None:
    for text in (EVIL, "plain ü → 漢字", "\x1b" * 10_000, "x" * 10_000, ""):
        shown = printable(text, 300)
        assert shown.isprintable()
        assert len(shown) <= 300
        assert printable(shown, 300) == shown
    assert printable("plain ü → 漢字") == "plain ü → 漢字"
