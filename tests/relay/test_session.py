"""What one session decides, event by event: no clock, no network."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from paceline.errors import (
    CorruptData,
    InvalidPlan,
    OriginBudgetExceeded,
    PacelineError,
    PeerLost,
    SourceChanged,
    StorageFull,
)
from paceline.manifest import Manifest
from paceline.relay.protocol import (
    Abandon,
    Cancelled,
    Complete,
    Extent,
    Fail,
    Fetch,
    HeldPiecesCorrupt,
    LanesAssigned,
    LanesConfirmed,
    LocalFailed,
    PieceRejected,
    PiecesDurable,
    PieceVerified,
    RelaySession,
    ReportCorrupt,
    ReportSourceLost,
    Resumed,
    SessionAction,
    SessionLimits,
    SourceAlive,
    SourceFailed,
    Tick,
)
from paceline.schemas import Lane, Source, WorkerLanes, WorkerStatus
from tests.relay.kit import ORIGIN, lanes, paper_manifest, worker

MANIFEST = paper_manifest(16)
LIMITS = SessionLimits(window_bytes=4096, window_pieces=4)


def session(
    held: Iterable[int] = (), manifest: Manifest = MANIFEST, limits: SessionLimits = LIMITS
) -> RelaySession:
    return RelaySession(worker_id="me", manifest=manifest, held=held, limits=limits, seed=1)


def begun(
    *sources: Source,
    held: Iterable[int] = (),
    limits: SessionLimits = LIMITS,
    epoch: int = 1,
    budget: int | None = None,
) -> RelaySession:
    """Return a session with one lane over the whole model, from the first of ``sources``."""
    relay = session(held, limits=limits)
    mine = lanes("me", MANIFEST, *sources, epoch=epoch, budget=budget)
    relay.handle(LanesAssigned(mine), 0)
    return relay


def fetches(actions: list[SessionAction]) -> list[tuple[str, int, int]]:
    return [(a.source.key, *a.extent) for a in actions if isinstance(a, Fetch)]


def failure(actions: list[SessionAction]) -> PacelineError:
    return next(a.error for a in actions if isinstance(a, Fail))


def arrive(relay: RelaySession, key: str, first: int, stop: int, now: float) -> list[SessionAction]:
    return relay.handle(PieceVerified(key, 1, Extent(first, stop)), now)


def durable(relay: RelaySession, first: int, stop: int, now: float) -> list[SessionAction]:
    return relay.handle(PiecesDurable(Extent(first, stop)), now)


def test_only_missing_pieces_are_asked_for() -> None:
    relay = session(held=[0, 1, 5])
    actions = relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"))), 0)
    assert fetches(actions) == [("up", 2, 5), ("up", 6, 7)]


def test_the_window_is_filled_again_when_half_of_it_arrived() -> None:
    relay = session()
    assert fetches(relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"))), 0)) == [
        ("up", 0, 4)
    ]
    assert arrive(relay, "up", 0, 1, 0.1) == []
    assert fetches(arrive(relay, "up", 1, 2, 0.2)) == [("up", 4, 6)]


def test_completes_once_when_every_piece_is_durable_and_not_before() -> None:
    relay = begun(worker("up"))
    actions = arrive(relay, "up", 0, 16, 1)
    assert Complete() not in actions
    assert relay.progress().pieces_held == 0  # verified is not held (I2)
    assert Complete() not in durable(relay, 0, 15, 1)
    assert Complete() in durable(relay, 15, 16, 1)
    assert durable(relay, 15, 16, 2) == []
    assert relay.progress().chunks_received == (0, 1, 2, 3)
    assert relay.deadline_s() is None


def test_a_version_already_on_disk_is_complete_at_once() -> None:
    relay = session(held=range(16))
    assert Complete() in relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"))), 0)


def test_a_crashed_source_is_replaced_and_only_missing_pieces_refetched() -> None:
    relay = session()
    spares = worker("far"), ORIGIN
    relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), *spares)), 0)
    arrive(relay, "up", 0, 1, 0.1)
    actions = relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.2)
    assert Abandon("up", 1) in actions
    assert fetches(actions) == [("up", 1, 5)]  # it delivered: was it the connection alone?
    assert not any(isinstance(a, ReportSourceLost) for a in actions)
    actions = relay.handle(SourceFailed("up", 2, PeerLost("refused")), 0.2)
    assert Abandon("up", 2) in actions
    assert any(isinstance(a, ReportSourceLost) and a.source_key == "up" for a in actions)
    assert fetches(actions) == [("far", 1, 5)]


def test_a_silent_source_is_replaced_within_the_piece_deadline() -> None:
    relay = begun(worker("up"), worker("far"))
    assert relay.deadline_s() == 1.0
    assert relay.handle(Tick(), 0.99) == []
    assert fetches(relay.handle(Tick(), 1.0)) == [("far", 0, 4)]


def test_a_source_that_waits_itself_is_not_lost() -> None:
    relay = begun(worker("up"), worker("far"))
    for tenth in range(1, 30):
        assert relay.handle(SourceAlive("up", 1), tenth / 10) == []


@pytest.mark.parametrize(("arrived", "wait_s"), [(0, SessionLimits().start_s), (1, 8.0)])
def test_a_standstill_of_living_sources_ends(arrived: int, wait_s: float) -> None:
    """Later where nothing has come yet: the last of a large fleet hear late of their plan."""
    relay = begun(worker("up"), ORIGIN)
    if arrived:
        relay.handle(PieceVerified("up", 1, Extent(0, arrived)), 0)
    asked: list[tuple[str, int, int]] = []
    now = 0.0
    while not asked and now < 60:
        now += 0.25
        asked = fetches(relay.handle(SourceAlive("up", 1), now))
    assert asked[0][0] == ORIGIN.key
    assert now == pytest.approx(wait_s)


def test_the_origin_is_asked_last_and_within_its_budget() -> None:
    relay = session()
    spares = ORIGIN, worker("far")
    mine = lanes("me", MANIFEST, worker("up"), *spares, budget=2 * 1024)
    relay.handle(LanesAssigned(mine), 0)
    actions = relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.1)
    assert fetches(actions)[0][0] == "far"
    actions = relay.handle(SourceFailed("far", 2, PeerLost("reset")), 0.2)
    assert fetches(actions) == [(ORIGIN.key, 0, 2)]


def test_a_spent_budget_stalls_with_its_reason_until_a_peer_returns() -> None:
    relay = session()
    mine = lanes("me", MANIFEST, worker("up"), ORIGIN, budget=1024)
    relay.handle(LanesAssigned(mine), 0)
    relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.1)
    relay.handle(PieceVerified(ORIGIN.key, 2, Extent(0, 1)), 0.2)
    stalled = relay.progress()
    assert stalled.status is WorkerStatus.RECEIVING
    assert stalled.failure is not None
    assert stalled.failure.code == OriginBudgetExceeded.__name__
    deadline_s = relay.deadline_s()
    assert deadline_s is not None
    assert deadline_s < 1
    assert fetches(relay.handle(Tick(), deadline_s)) == [("up", 1, 5)]
    relay.handle(PieceVerified("up", 3, Extent(1, 5)), 1)
    assert relay.progress().failure is None


def test_when_every_source_stays_away_the_worker_fails_within_its_bound() -> None:
    relay = begun(worker("up"), worker("far"))
    now, stream, actions = 0.0, 0, [Fetch(worker("up"), 1, Extent(0, 4))]
    for _ in range(10_000):
        asked = [a for a in actions if isinstance(a, Fetch)]
        if asked:
            stream = asked[-1].stream
            actions = relay.handle(
                SourceFailed(asked[-1].source.key, stream, PeerLost("refused")), now
            )
            continue
        if any(isinstance(a, Fail) for a in actions):
            break
        deadline_s = relay.deadline_s()
        assert deadline_s is not None
        assert deadline_s > now  # never a busy loop
        now = deadline_s
        actions = relay.handle(Tick(), now)
    assert isinstance(failure(actions), PeerLost)
    assert now == pytest.approx(LIMITS.give_up_s)
    assert relay.deadline_s() is None


def test_a_corrupt_piece_is_asked_of_its_sender_again_and_then_elsewhere() -> None:
    relay = begun(worker("up"), worker("far"), ORIGIN)
    actions = relay.handle(PieceRejected("up", 1, Extent(2, 2 + 1)), 0.1)
    assert ReportCorrupt("up", 2) in actions
    assert relay.progress().corrupt_sources == ("up",)
    assert fetches(actions) == [("up", 2, 3)]  # at once, in the stream that is open
    assert {each.stream for each in actions if isinstance(each, Fetch)} == {1}
    actions = relay.handle(PieceRejected("up", 1, Extent(2, 2 + 1)), 0.2)
    assert ReportCorrupt("up", 2) in actions
    assert fetches(actions) == []
    deadline_s = relay.deadline_s()
    assert deadline_s is not None
    assert deadline_s > 0.2  # backed off
    assert fetches(relay.handle(Tick(), deadline_s)) == [("far", 2, 3)]
    # Everything else still comes from where it came from.
    arrive(relay, "up", 0, 2, deadline_s)
    assert all(key == "up" for key, _, _ in fetches(arrive(relay, "up", 3, 4, deadline_s)))


def test_a_sender_that_is_gone_is_not_asked_once_more() -> None:
    relay = begun(worker("up"), worker("far"))
    relay.handle(PieceRejected("up", 1, Extent(2, 3)), 0.1)
    actions = relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.15)
    assert {key for key, _, _ in fetches(actions)} == {"far"}
    assert ("far", 2, 3) in fetches(actions)


def test_a_piece_always_corrupt_at_the_origin_fails_the_worker_by_name() -> None:
    relay = begun(ORIGIN, worker("down"))
    arrive(relay, ORIGIN.key, 0, 2, 0.0)
    arrive(relay, ORIGIN.key, 3, 16, 0.0)
    now = 0.0
    actions = relay.handle(PieceRejected(ORIGIN.key, 1, Extent(2, 2 + 1)), now)
    assert fetches(actions) == [(ORIGIN.key, 2, 3)]
    actions = relay.handle(PieceRejected(ORIGIN.key, 1, Extent(2, 2 + 1)), now)
    for _ in range(3):
        assert not any(isinstance(a, Fail) for a in actions)
        now = relay.deadline_s() or 0.0
        said = relay.handle(Tick(), now)
        assert fetches(said) == [(ORIGIN.key, 2, 3)]  # nobody else can have it from elsewhere
        stream = next(each.stream for each in said if isinstance(each, Fetch))
        actions = relay.handle(PieceRejected(ORIGIN.key, stream, Extent(2, 2 + 1)), now)
    assert not any(isinstance(a, Fail) for a in actions)  # somebody may have it from elsewhere
    now = relay.deadline_s() or 0.0
    assert fetches(relay.handle(Tick(), now)) == [("down", 2, 3)]
    actions = []
    while not any(isinstance(a, Fail) for a in actions) and now < 60:
        now += 0.25
        actions = relay.handle(Tick(), now)
    error = failure(actions)
    assert isinstance(error, CorruptData)
    assert ORIGIN.url in error.one_line()
    assert "piece 2" in error.one_line()


def test_a_repair_parked_at_a_peer_without_the_piece_goes_on_elsewhere() -> None:
    relay = begun(worker("up"), worker("far"), ORIGIN)
    for _ in range(2):
        relay.handle(PieceRejected("up", 1, Extent(2, 2 + 1)), 0.0)
    now = relay.deadline_s() or 0.0
    assert fetches(relay.handle(Tick(), now)) == [("far", 2, 3)]
    asked: list[tuple[str, int, int]] = []
    while not asked and now < 30:
        now += 0.25
        said = relay.handle(SourceAlive("up", 1), now)
        asked = fetches(said + relay.handle(SourceAlive("far", 2), now))
    # Who sent it corrupt has it all the same; the origin is asked when nobody else is left.
    assert asked == [("up", 2, 3)]


def test_a_source_that_only_sends_corrupt_pieces_is_left() -> None:
    relay = begun(worker("up"), worker("far"))
    relay.handle(PieceRejected("up", 1, Extent(0, 0 + 1)), 0.1)
    relay.handle(PieceRejected("up", 1, Extent(1, 1 + 1)), 0.1)
    assert Abandon("up", 1) not in relay.handle(PieceRejected("up", 1, Extent(2, 3)), 0.1)
    actions = relay.handle(PieceRejected("up", 1, Extent(3, 4)), 0.1)
    assert Abandon("up", 1) in actions
    assert fetches(actions) == [("far", 0, 4), ("far", 4, 8)]


def test_a_spare_is_asked_for_no_more_than_lets_the_way_back_be_probed() -> None:
    manifest = paper_manifest(400)
    limits = SessionLimits(window_pieces=200, window_bytes=1 << 40, on_spare_pieces=8)
    relay = session(manifest=manifest, limits=limits)
    planned = lanes("me", manifest, worker("up"), worker("far"))
    assert fetches(relay.handle(LanesAssigned(planned), 0)) == [("up", 0, 200)]
    gone = relay.handle(SourceFailed("up", 1, PeerLost("gone")), 0.1)
    assert fetches(gone) == [("far", 0, 8)]


def test_newer_lanes_replace_older_ones_and_keep_what_is_held() -> None:
    relay = begun(worker("up"), epoch=1)
    arrive(relay, "up", 0, 2, 0.1)
    actions = relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("far"), epoch=3)), 0.2)
    assert Abandon("up", 1) in actions
    assert fetches(actions) == [("far", 2, 6)]
    assert relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), epoch=2)), 0.3) == []
    assert relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), epoch=3)), 0.3) == []
    assert relay.epoch == 3


def test_newer_lanes_from_the_same_source_keep_the_stream() -> None:
    relay = begun(worker("up"), epoch=1)
    actions = relay.handle(
        LanesAssigned(lanes("me", MANIFEST, worker("up"), worker("far"), epoch=2)), 0.2
    )
    assert actions == []


def test_late_news_of_an_abandoned_stream_changes_nothing() -> None:
    relay = begun(worker("up"))
    relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.1)
    now = relay.deadline_s() or 0.0
    assert fetches(relay.handle(Tick(), now)) == [("up", 0, 4)]  # as stream 2
    assert relay.handle(SourceFailed("up", 1, PeerLost("reset")), now) == []


def test_duplicates_change_nothing() -> None:
    relay = begun(worker("up"))
    arrive(relay, "up", 0, 1, 0.1)
    assert arrive(relay, "up", 0, 1, 0.2) == []
    assert relay.progress().pieces_verified == 1


def test_marks_fewer_than_the_plan_knew_are_fetched_all_the_same() -> None:
    partial = lanes("me", MANIFEST, worker("up"))
    partial = partial.model_copy(
        update={"lanes": (partial.lanes[0].model_copy(update={"first_chunk": 2}),)}
    )
    relay = session(limits=SessionLimits())
    assert sorted(fetches(relay.handle(LanesAssigned(partial), 0))) == [
        ("up", 0, 8),
        ("up", 8, 16),
    ]


def test_a_replaced_source_object_fails_the_head_at_once() -> None:
    relay = begun(ORIGIN, worker("down"))
    actions = relay.handle(SourceFailed(ORIGIN.key, 1, SourceChanged("replaced")), 0.1)
    assert isinstance(failure(actions), SourceChanged)
    actions = relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), epoch=2)), 0.2)
    assert fetches(actions) == [("up", 0, 4)]  # a new plan revives it


def test_a_piece_rotten_on_its_own_disk_is_refetched_before_completion() -> None:
    relay = begun(worker("up"), limits=SessionLimits())
    arrive(relay, "up", 0, 15, 0.1)
    durable(relay, 0, 15, 0.1)
    assert fetches(relay.handle(HeldPiecesCorrupt(Extent(3, 4)), 0.2)) == [("up", 3, 4)]
    arrive(relay, "up", 15, 16, 0.3)
    assert Complete() not in durable(relay, 15, 16, 0.3)
    arrive(relay, "up", 3, 4, 0.3)
    assert Complete() in durable(relay, 3, 4, 0.3)


def test_a_full_disk_fails_the_worker_and_stops_its_streams() -> None:
    relay = begun(worker("up"))
    actions = relay.handle(LocalFailed(StorageFull("full")), 0.1)
    assert Abandon("up", 1) in actions
    assert isinstance(failure(actions), StorageFull)
    assert relay.progress().status is WorkerStatus.FAILED


def test_after_a_cancel_nothing_is_fetched_completed_or_revived() -> None:
    relay = begun(worker("up"))
    assert relay.handle(Cancelled(), 0.1) == [Abandon("up", 1)]
    arrive(relay, "up", 0, 16, 0.2)
    assert durable(relay, 0, 16, 0.2) == []
    assert relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), epoch=2)), 0.3) == []
    assert relay.deadline_s() is None


def test_lanes_of_another_model_or_worker_are_refused() -> None:
    other = paper_manifest(3)
    actions = session().handle(LanesAssigned(lanes("me", other, worker("up"))), 0)
    assert isinstance(failure(actions), InvalidPlan)
    actions = session().handle(LanesAssigned(lanes("you", MANIFEST, worker("up"))), 0)
    assert isinstance(failure(actions), InvalidPlan)


def test_a_worker_never_asks_itself() -> None:
    relay = session()
    mine = lanes("me", MANIFEST, worker("me"), worker("up"))
    assert fetches(relay.handle(LanesAssigned(mine), 0)) == [("up", 0, 4)]


# ── several lanes ────────────────────────────────────────────────────────────────────────────────


def striped(*sources: str, spares: tuple[Source, ...] = (), rate: float = 0.0) -> WorkerLanes:
    """Return one lane from each of ``sources``, each of as many of the four chunks."""
    plain, chunks = lanes("me", MANIFEST, worker("unused")), 4 // len(sources)
    made = tuple(
        Lane(
            source=ORIGIN if key == "origin" else worker(key),
            spares=spares,
            first_chunk=lane * chunks,
            last_chunk=(lane + 1) * chunks - 1,
            expected_bytes_s=rate,
        )
        for lane, key in enumerate(sources)
    )
    return plain.model_copy(update={"lanes": made})


def test_every_lane_pulls_from_its_own_source_at_once() -> None:
    relay = session()
    actions = relay.handle(LanesAssigned(striped("a", "b", "c", "d")), 0)
    assert fetches(actions) == [("a", 0, 4), ("b", 4, 8), ("c", 8, 12), ("d", 12, 16)]


def test_lanes_of_one_source_share_its_window_evenly() -> None:
    relay = session(limits=SessionLimits(window_bytes=8192, window_pieces=8))
    wide = lanes("me", MANIFEST, worker("a"))
    halves = tuple(
        wide.lanes[0].model_copy(update={"first_chunk": first, "last_chunk": first + 1})
        for first in (0, 2)
    )
    actions = relay.handle(LanesAssigned(wide.model_copy(update={"lanes": halves})), 0)
    assert fetches(actions) == [("a", 0, 4), ("a", 8, 12)]


def test_a_lost_source_is_replaced_in_its_own_lane_only() -> None:
    relay = session()
    relay.handle(LanesAssigned(striped("a", "b", "c", "d", spares=(worker("far"),))), 0)
    actions = relay.handle(SourceFailed("b", 2, PeerLost("reset")), 0.1)
    assert fetches(actions) == [("far", 4, 8)]
    assert [a.source_key for a in actions if isinstance(a, Abandon)] == ["b"]


def test_a_source_with_nothing_for_one_lane_goes_on_with_the_other() -> None:
    relay = session()
    relay.handle(LanesAssigned(striped("a", "b", spares=(worker("a"), worker("far")))), 0)
    actions = relay.handle(SourceFailed("b", 2, PeerLost("reset")), 0.1)
    assert fetches(actions) == [("a", 8, 10)]  # the nearest spare serves two lanes now
    now, said = 0.1, []
    while not fetches(said):
        now += 0.05
        said = relay.handle(SourceAlive("a", 1), now)
    assert fetches(said) == [("far", 8, 12)]
    assert now < 1.0
    assert not [a for a in said if isinstance(a, Abandon | ReportSourceLost)]


def test_lanes_share_the_origins_budget() -> None:
    relay = session(limits=SessionLimits())
    mine = striped("origin", "origin").model_copy(update={"origin_budget_bytes": 6 * 1024})
    asked = fetches(relay.handle(LanesAssigned(mine), 0))
    assert sum(stop - first for _, first, stop in asked) == 6


@pytest.mark.parametrize(("counted", "more"), [(None, 2), (4 * 1024, 2), (2 * 1024, 0)])
def test_a_grant_goes_on_from_what_was_reported_when_it_was_made(
    counted: int | None, more: int
) -> None:
    """Four pieces came and four are on their way; new lanes allow six beyond what was told."""
    relay = begun(ORIGIN, worker("down"))
    arrive(relay, ORIGIN.key, 0, 4, 0.1)
    granted = lanes("me", MANIFEST, ORIGIN, worker("down"), epoch=2, budget=6 * 1024)
    newer = granted.model_copy(update={"origin_counted_bytes": counted})
    asked = fetches(relay.handle(LanesAssigned(newer, origin_read_bytes=4 * 1024), 0.2))
    asked += fetches(arrive(relay, ORIGIN.key, 4, 8, 0.3))
    assert sum(stop - first for key, first, stop in asked if key == ORIGIN.key) == more


def test_a_thawed_worker_reads_the_origin_only_once_lanes_are_confirmed() -> None:
    """Somebody else may have been planned in its place, and the fuse is one for all (I6)."""
    relay = session()
    begun = relay.handle(LanesAssigned(striped("origin", "w2")), 0)
    assert fetches(begun) == [(ORIGIN.key, 0, 4), ("w2", 8, 12)]
    relay.handle(Resumed(5.0, replaced=True), 5.0)
    actions = arrive(relay, ORIGIN.key, 0, 4, 5.0)  # it was on its way
    actions += relay.handle(Tick(), 8.0)
    assert ORIGIN.key not in {key for key, *_ in fetches(actions)}
    held_up = relay.progress().failure
    assert held_up is not None
    assert (held_up.code, "was suspended" in held_up.message) == ("ServiceUnavailable", True)
    # Lanes that were under way before count for nothing: they may be as old.
    newer = striped("origin", "w2").model_copy(update={"epoch": 2})
    assert ORIGIN.key not in {k for k, *_ in fetches(relay.handle(LanesAssigned(newer), 8.1))}
    assert ORIGIN.key in {key for key, *_ in fetches(relay.handle(LanesConfirmed(), 8.2))}


def test_who_stood_still_does_not_believe_others_dead_for_its_own_sleep() -> None:
    """A minute later than its sources' deadlines, and than its own: they get what was left."""
    relay = session()
    relay.handle(LanesAssigned(striped("w1", "w2")), 0)
    due_s = relay.deadline_s()
    assert due_s is not None
    assert fetches(relay.handle(Resumed(90.0), 90.2)) == []
    then_s = relay.deadline_s()
    assert then_s is not None
    assert then_s == pytest.approx(due_s + 90.0)
    said = arrive(relay, "w1", 0, 1, 0.1)  # before it slept, told only now
    said += relay.handle(Tick(), then_s - 0.1)
    assert (said, relay.progress().lost_sources) == ([], ())
    assert relay.progress().status is WorkerStatus.RECEIVING
    for step in range(40):
        relay.handle(Tick(), then_s + 0.1 + step / 10)
    assert set(relay.progress().lost_sources) >= {"w1", "w2"}, "who is silent now is silent"


def test_when_the_origins_budget_is_spent_the_peers_are_asked_at_once() -> None:
    relay = begun(ORIGIN, worker("far"), budget=4 * 1024)
    relay.deadline_s()
    said = [
        action for piece in range(4) for action in arrive(relay, ORIGIN.key, piece, piece + 1, 0.1)
    ]
    assert fetches(said) == [("far", 4, 8)]


def test_what_is_on_its_way_from_the_origin_comes_out_of_a_new_budget() -> None:
    relay = begun(ORIGIN, budget=16 * 1024)
    newer = lanes("me", MANIFEST, ORIGIN, budget=6 * 1024, epoch=2)
    assert fetches(relay.handle(LanesAssigned(newer), 0.1)) == []
    assert fetches(arrive(relay, ORIGIN.key, 0, 4, 0.2)) == [(ORIGIN.key, 4, 6)]


# ── windows, deadlines and hedges ─────────────────────────────────────────────────────────────────


def test_the_window_is_a_second_at_the_planned_rate_or_several_pieces() -> None:
    for rate, pieces in ((8 * 1024, 8), (100.0, 4), (0.0, 16), (1e9, 16)):
        relay = session(limits=SessionLimits())
        mine = lanes("me", MANIFEST, worker("up"))
        lane = mine.lanes[0].model_copy(update={"expected_bytes_s": rate})
        asked = fetches(relay.handle(LanesAssigned(mine.model_copy(update={"lanes": (lane,)})), 0))
        assert asked == [("up", 0, pieces)]


def test_an_orphan_finds_who_has_its_pieces_within_a_second() -> None:
    relay = session()
    spares = (worker("behind"), worker("too"), worker("ahead"), ORIGIN)
    relay.handle(LanesAssigned(lanes("me", MANIFEST, worker("up"), *spares)), 0)
    said = relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.1)
    assert fetches(said) == [("behind", 0, 4)]
    now, asked = 0.1, [said[-1]]
    while not any(isinstance(a, Fetch) and a.source.key == "ahead" for a in asked):
        now += 0.05
        for key, stream in (("behind", 2), ("too", 3)):  # they live, and only wait
            asked += relay.handle(SourceAlive(key, stream), now)
    assert now < 1.4
    assert relay.progress().lost_sources == ("up",)  # who is behind is not lost


def test_a_spare_that_moves_bytes_is_given_time() -> None:
    relay = begun(worker("up"), worker("far"), ORIGIN)
    relay.handle(SourceFailed("up", 1, PeerLost("reset")), 0.1)
    for tenth in range(2, 38):
        assert relay.handle(SourceAlive("far", 2, moving=True), tenth / 10) == []


def test_late_last_pieces_are_asked_twice_and_the_first_sender_wins() -> None:
    relay = begun(
        worker("up"),
        worker("far"),
        ORIGIN,
        held=range(10),
        limits=SessionLimits(window_bytes=8192, window_pieces=8),
    )
    now, asked = 0.0, []
    while not asked and now < 5:
        now += 0.1
        asked = fetches(relay.handle(SourceAlive("up", 1), now))
    assert asked == [("far", 10, 16)]
    assert now == pytest.approx(1.0, abs=0.11)
    relay.handle(PieceVerified("far", 2, Extent(10, 14)), now)
    assert relay.progress().pieces_verified == 14
    relay.handle(PieceVerified("up", 1, Extent(10, 16)), now)
    assert relay.progress().pieces_verified == 16


def test_a_source_on_time_is_not_hedged() -> None:
    relay = begun(worker("up"), worker("far"), held=range(8))
    said: list[SessionAction] = []
    for number, piece in enumerate(range(8, 16), 1):
        said += arrive(relay, "up", piece, piece + 1, 0.7 * number)
    assert {key for key, _, _ in fetches(said)} == {"up"}


def test_a_hedge_whose_first_source_dies_is_not_asked_again() -> None:
    relay = begun(worker("up"), worker("far"), ORIGIN, held=range(12))
    now, asked = 0.0, []
    while not asked:
        now += 0.1
        asked = fetches(relay.handle(SourceAlive("up", 1), now))
    assert asked == [("far", 12, 16)]
    assert fetches(relay.handle(SourceFailed("up", 1, PeerLost("reset")), now)) == []
    relay.handle(PieceVerified("far", 2, Extent(12, 16)), now)
    assert Complete() in durable(relay, 12, 16, now)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_corrupt_run_is_one_repair_one_request_and_one_report() -> None:
    relay = begun(worker("up"), worker("far"), limits=SessionLimits())
    actions = relay.handle(PieceRejected("up", 1, Extent(3, 11)), 0.1)
    assert actions == [ReportCorrupt("up", 3, 8), Fetch(worker("up"), 1, Extent(3, 11))]
    assert relay.progress().corrupt_pieces == 8
    actions = relay.handle(PieceRejected("up", 1, Extent(3, 11)), 0.1)
    assert actions == [ReportCorrupt("up", 3, 8)]
    now = relay.deadline_s() or 0.0
    assert fetches(relay.handle(Tick(), now)) == [("far", 3, 11)]
    assert fetches(relay.handle(PieceRejected("far", 2, Extent(5, 7)), now)) == []
    relay.handle(PieceVerified("far", 2, Extent(3, 5)), now)
    relay.handle(PieceVerified("far", 2, Extent(7, 11)), now)
    again = relay.deadline_s() or 0.0
    asked = fetches(relay.handle(Tick(), again))
    assert [(first, stop) for _, first, stop in asked] == [(5, 7)]


def test_one_corrupt_transfer_in_a_hundred_does_not_cost_a_stream() -> None:
    manifest = paper_manifest(4000)
    relay = session(manifest=manifest, limits=SessionLimits())
    actions = relay.handle(LanesAssigned(lanes("me", manifest, worker("up"), worker("far"))), 0)
    random, now, streams = Random(1), 0.0, set()
    waiting = [a for a in actions if isinstance(a, Fetch)]
    while waiting:
        fetch = waiting.pop(0)
        streams.add((fetch.source.key, fetch.stream))
        for piece in range(*fetch.extent):
            now += 0.001
            kind = PieceRejected if random.random() < 0.01 else PieceVerified
            event = kind(fetch.source.key, fetch.stream, Extent(piece, piece + 1))
            waiting += [a for a in relay.handle(event, now) if isinstance(a, Fetch)]
        if not waiting and relay.progress().pieces_verified < 4000:
            now = relay.deadline_s() or now
            waiting = [a for a in relay.handle(Tick(), now) if isinstance(a, Fetch)]
    assert relay.progress().pieces_verified == 4000
    assert [key for key, _ in streams].count("up") == 1


def test_a_vouched_source_needs_no_signs_of_life() -> None:
    relay = begun(worker("up"), worker("far"))
    relay.handle(SourceAlive("up", 1, until_s=float("inf")), 0.1)
    assert relay.handle(Tick(), 50.0) == []
    arrive(relay, "up", 0, 1, 50.0)
    relay.handle(SourceAlive("up", 1), 50.0)
    assert relay.deadline_s() == 51.0
    assert fetches(relay.handle(Tick(), 51.0)) == [("far", 1, 5)]
