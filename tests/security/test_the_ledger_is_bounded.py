"""No token fills the stores through the ledger: records, runs and the total have bounds, writing it
takes a scope of its own, and what a token changes in an hour is less than a store holds.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.api import Authenticator, create_app, middleware
from paceline.cluster import ensure_secrets
from paceline.config import load_runtime
from paceline.coordinator import (
    Coordinator,
    LedgerEntry,
    LedgerIndex,
    TokenRegistry,
    ledger as bounds,
)
from paceline.coordinator.stores import MemoryProgress, SqliteAudit
from paceline.errors import Conflict, InvalidInput, NotLeading
from paceline.schemas import Scope, StageRecord
from tests.api.conftest import make_runtime
from tests.coordinator.stores.conftest import coordination  # noqa: F401
from tests.security.test_tiny_requests_do_not_stall_an_agent import lines
from tests.support.command import paceline
from tests.support.etcd import etcd  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

DAY_S = 86_400.0
NOW = 1000 * DAY_S


def record(number: int, *, run: str = "r", size: int = 300, at: float = NOW) -> StageRecord:
    """A record of about ``size`` bytes of JSON."""
    return StageRecord(
        stage="train",
        input_digest=f"{number:064x}",
        output={"padding": "x" * (size - 300)},
        output_digest="1" * 64,
        run_id=run,
        seconds=1.0,
        finished_at=at,
    )


def line(number: int, **said: Any) -> LedgerEntry:
    return LedgerEntry.of(record(number, **said))


def filled(count: int, now: float = NOW, **said: Any) -> LedgerIndex:
    return LedgerIndex(line(number, run=f"r{number}", at=now, **said) for number in range(count))


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────


def test_a_record_has_a_size_and_a_run_id_a_length() -> None:
    book = LedgerIndex([])
    assert book.admit(line(1, size=60_000), NOW) == []
    with pytest.raises(InvalidInput, match=r"got \d+ bytes.*wanted at most 65536.*at train"):
        book.admit(line(1, size=70_000), NOW)
    with pytest.raises(InvalidInput, match="5000 characters"):
        book.admit(line(1, run="r" * 5_000), NOW)


def test_a_run_records_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_RUN_RECORDS", 5)
    monkeypatch.setattr(bounds, "MAX_RUN_BYTES", 10_000)
    book = LedgerIndex([line(number) for number in range(5)])
    with pytest.raises(Conflict, match=r"got 6 records.*at run r"):
        book.admit(line(5), NOW)
    assert book.admit(line(5, run="other"), NOW) == []
    assert book.admit(line(4, size=1_000), NOW) == [], "in place of one of its own"
    with pytest.raises(Conflict, match="of 10000"):
        book.admit(line(4, size=9_900), NOW)


@pytest.mark.parametrize("bound", ["MAX_RECORDS", "MAX_BYTES"])
def test_old_records_make_room_and_young_ones_do_not(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = [line(number, run=f"r{number}") for number in range(6)]
    old = [line(90 + n, run=f"o{n}", at=NOW - (31 + n) * DAY_S) for n in range(4)]
    most = 10 if bound == "MAX_RECORDS" else sum(each.size for each in (*young, *old))
    monkeypatch.setattr(bounds, bound, most)
    book = LedgerIndex([*young, *old])
    for oldest in reversed(old):
        new = line(200 + old.index(oldest), run="n")
        dropped = book.admit(new, NOW)
        assert dropped == [oldest]
        book.keep(new, dropped)
    with pytest.raises(Conflict, match=r"the ledger is full.*wanted at most.*30 days"):
        book.admit(line(300, run="n"), NOW)
    again = line(200, run="n")
    assert book.admit(again, NOW) == [], "what is replaced takes no more room"
    book.keep(again, [])
    assert book.admit(line(300, run="n"), NOW + 31 * DAY_S)


def test_a_refusal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [line(n, run=f"o{n}", at=NOW - 40 * DAY_S) for n in range(3)]
    large = [line(10 + n, run=f"y{n}", size=5_000) for n in range(3)]
    monkeypatch.setattr(bounds, "MAX_BYTES", sum(each.size for each in (*small, *large)))
    book = LedgerIndex([*small, *large])
    for _ in range(2):
        with pytest.raises(Conflict, match="the ledger is full"):
            book.admit(line(50, size=20_000), NOW)
    assert len(book.admit(line(51, size=400), NOW)) == 2, "the old ones are still there to go"


def test_one_that_was_too_full_already_becomes_less_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_RECORDS", 10)
    monkeypatch.setattr(bounds, "DROPPED_AT_ONCE", 4)
    book, left = filled(50, NOW - 40 * DAY_S), []
    for _ in range(12):
        new = line(100, run="n")
        dropped = book.admit(new, NOW)
        book.keep(new, dropped)
        left.append(len(dropped))
    assert left == [4] * 10 + [1, 0]


def test_a_full_ledger_refuses_at_a_constant_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(count: int) -> int:
        monkeypatch.setattr(bounds, "MAX_RECORDS", count)
        book = filled(count)

        def refused() -> None:
            with pytest.raises(Conflict):
                book.admit(line(10**6, run="n"), NOW)

        return lines(refused)

    assert refusal(2_000) < 1.5 * refusal(200)


def test_replacing_a_record_for_ever_takes_no_memory() -> None:
    book = LedgerIndex([])
    for at in range(2_000):
        new = line(1, at=NOW + at)
        book.keep(new, book.admit(new, NOW))
    assert len(book._by_age) < 1_100


# ── every store ──────────────────────────────────────────────────────────────────────────────────


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def leader(
    coordination: Any,  # noqa: F811
    tmp_path: Path,
) -> Iterator[Callable[[], tuple[Coordinator, Any, Clock]]]:
    audits = []

    def made() -> tuple[Coordinator, Any, Clock]:
        store, term = coordination.led()
        audits.append(SqliteAudit(tmp_path / f"audit-{len(audits)}.sqlite"))
        clock = Clock()
        coordinator = Coordinator(
            store,
            progress=MemoryProgress(),
            audit=audits[-1],
            resolve_source=lambda _url: pytest.fail("no deployment is made"),
            wall=clock,
        )
        coordinator.lead(term)
        return coordinator, store, clock

    yield made
    for each in audits:
        each.close()


def test_the_stores_hold_no_more_than_the_bound(
    leader: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_RECORDS", 8)
    coordinator, store, clock = leader()
    for number in range(8):
        coordinator.save_stage(record(number, run=f"r{number}", size=5_000, at=NOW + number))
    with pytest.raises(Conflict, match="the ledger is full"):
        coordinator.save_stage(record(9, run="n"))
    assert {each.input_digest for each in store.ledger()} == {f"{n:064x}" for n in range(8)}
    assert sorted(store.ledger(), key=lambda each: each.input_digest)[3] == LedgerEntry.of(
        record(3, run="r3", size=5_000, at=NOW + 3)
    )
    coordinator.save_stage(record(7, run="r7", size=400, at=NOW + 7))
    clock.now = NOW + 30 * DAY_S + 1.5  # two are old enough by now
    for number in (9, 10):
        coordinator.save_stage(record(number, run="n", at=clock.now))
    with pytest.raises(Conflict, match="the ledger is full"):
        coordinator.save_stage(record(11, run="n", at=clock.now))
    kept = {2, 3, 4, 5, 6, 7, 9, 10}
    assert {each.input_digest for each in store.ledger()} == {f"{n:064x}" for n in kept}
    assert coordinator.stage("train", f"{0:064x}") is None
    assert coordinator.stage("train", f"{10:064x}") == record(10, run="n", at=clock.now)
    if store.standbys:
        store.resign(store.leader())
    after, other, clock = leader()
    clock.now = NOW
    with pytest.raises(Conflict, match="got 9 records"):
        after.save_stage(record(12, run="n"))
    assert len(list(other.ledger())) == 8
    with pytest.raises(NotLeading):
        coordinator.save_stage(record(10, run="n"))


# ── the routes ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Any]:
    runtime = make_runtime(tmp_path / "state")
    with TestClient(
        create_app(runtime), "http://127.0.0.1", raise_server_exceptions=False
    ) as client:
        client.runtime = runtime
        yield client


def call(rest: Any, method: str, path: str, token: str, **more: Any) -> Any:
    return rest.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)


def token(rest: Any, *scopes: Scope) -> str:
    body = {"name": "flows", "scopes": [str(each) for each in scopes]}
    owner = rest.runtime.secrets.coordinator_token
    return str(call(rest, "POST", "/tokens", owner, json=body).json()["token"])


def put(rest: Any, given: str, made: StageRecord) -> Any:
    path = f"/ledger/{made.stage}/{made.input_digest}"
    return call(rest, "PUT", path, given, json=made.model_dump())


def test_a_token_that_only_deploys_does_not_write_the_ledger(rest: Any) -> None:
    deploys, flows = token(rest, Scope.DEPLOY), token(rest, Scope.DEPLOY, Scope.LEDGER)
    refused = put(rest, deploys, record(1))
    assert refused.status_code == 403
    assert refused.json()["wanted"] == "scope ledger"
    assert "paceline tokens create --scope ledger" in refused.json()["do"]
    assert put(rest, flows, record(1)).status_code == 200
    assert call(rest, "GET", f"/ledger/train/{1:064x}", flows).json()["run_id"] == "r"
    assert put(rest, rest.runtime.secrets.agents_token, record(1)).status_code == 403


def scopes_of_flows(secrets: Any) -> frozenset[Scope]:
    shown = [b"Bearer " + secrets.coordinator_token.encode()]  # what tasks/_support/run.py shows
    return Authenticator(secrets, TokenRegistry).authenticate(shown, NOW).scopes


def test_the_installations_own_flows_write_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "embedded").mkdir()
    assert Scope.LEDGER in scopes_of_flows(ensure_secrets(tmp_path / "embedded"))
    where = tmp_path / "replicas"
    url = "http://127.0.0.1:8750"
    made = paceline("init", "--coordinator", url, "--state", where, "--json")
    assert json.loads(made.stdout)["status"] == "initialised", made.stderr
    assert Scope.LEDGER in scopes_of_flows(load_runtime(where).secrets)


def test_a_full_ledger_is_a_clear_409_and_the_file_stops_growing(
    rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_BYTES", 1024 * 1024)
    flows = token(rest, Scope.DEPLOY, Scope.LEDGER)
    now = time.time()
    answers = [put(rest, flows, record(n, run=f"r{n}", size=30_000, at=now)) for n in range(60)]
    assert [each.status_code for each in answers[:34]] == [200] * 34
    assert {each.status_code for each in answers[35:]} == {409}
    problem = answers[-1].json()
    assert (problem["code"], problem["detail"]) == ("Conflict", "the ledger is full")
    assert problem["got"] and problem["wanted"] and problem["where"] and problem["do"]
    directory = rest.runtime.state_dir
    size = sum(each.stat().st_size for each in directory.rglob("*.sqlite*"))
    assert size < 6 * 1024 * 1024  # with the write-ahead log, which holds each page twice
    too_large = put(rest, flows, record(1, size=80_000))
    assert (too_large.status_code, too_large.json()["code"]) == (422, "InvalidInput")


def test_what_a_token_changes_in_an_hour_is_bounded(
    rest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert middleware.CHANGE_BYTES_AT_ONCE + 3600 * middleware.CHANGE_BYTES_PER_S < 2**30
    buckets: Any = rest.app.middleware_stack
    while not isinstance(buckets, middleware.AccessMiddleware):
        buckets = buckets.app if hasattr(buckets, "app") else buckets._app
    monkeypatch.setattr(buckets, "_bodies", middleware.TokenBuckets(1.0, 100_000.0))
    flows, other = (token(rest, Scope.DEPLOY, Scope.LEDGER) for _ in range(2))
    answers = [put(rest, flows, record(1, size=30_000)) for _ in range(6)]
    assert [each.status_code for each in answers] == [200] * 3 + [429] * 3
    assert int(answers[-1].headers["Retry-After"]) > 1_000
    assert answers[-1].json()["code"] == "TooManyCalls"
    assert call(rest, "GET", f"/ledger/train/{1:064x}", flows).status_code == 200
    assert put(rest, other, record(1, size=30_000)).status_code == 200

    def endless() -> Iterator[bytes]:
        yield b"{}"  # its length is not announced: it counts as the longest

    path = f"/ledger/train/{1:064x}"
    assert call(rest, "PUT", path, other, content=endless()).status_code == 429
