"""Which workers count as slow or corrupting, from tables of the bytes between workers."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from paceline.coordinator.state import CoordinatorSettings, Edge, PeerHealth
from paceline.plan import Standing
from paceline.schemas import EdgeTally

PATIENCE = CoordinatorSettings()
ORIGIN = "origin:s3://b/m"
LINK = 1000.0  # bytes a second that every plan here expects
TAIL, LINE, QUARANTINED = Standing.TAIL, Standing.LINE, Standing.QUARANTINED


class Scene:
    """Edges with a rate they can carry and a share of the time in which they had something to."""

    def __init__(self, standings: PeerHealth, edges: Mapping[Edge, float]) -> None:
        self.standings, self.now_s = standings, 0.0
        self.counted: dict[Edge, list[float]] = {}
        self.plan(edges)

    def plan(self, edges: Mapping[Edge, float]) -> None:
        self.expected = dict(edges)
        self.standings.follow(edges)

    def pass_s(
        self,
        seconds: float,
        carries: Mapping[Edge, float],
        busy: Mapping[Edge, float] | None = None,
        step_s: float = 0.5,
    ) -> dict[str, Standing]:
        """Let beats report for ``seconds`` and return what changed."""
        changed = {}
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s += step_s
            for edge, rate in carries.items():
                share = (busy or {}).get(edge, 1.0)
                counted = self.counted.setdefault(edge, [0.0, 0.0])
                counted[0] += rate * share * step_s
                counted[1] += share * step_s
                source, reader = edge
                teller = reader if source == ORIGIN else source
                tally = EdgeTally(
                    source=source, reader=reader, bytes=int(counted[0]), busy_s=counted[1]
                )
                self.standings.take(teller, [tally], self.now_s)
            for verdict in self.standings.judge(self.now_s):
                changed[verdict.worker_id] = verdict.standing
        return changed


def chain(*workers: str) -> dict[Edge, float]:
    """A line of workers behind the origin, each of whose edges should carry a link's worth."""
    return dict.fromkeys(zip((ORIGIN, *workers), workers, strict=False), LINK)


def slow(edges: Mapping[Edge, float], worker: str, factor: float) -> dict[Edge, float]:
    """The same edges with every one that ends at ``worker`` slower."""
    return {edge: rate * (factor if worker in edge else 1.0) for edge, rate in edges.items()}


def scene(edges: Mapping[Edge, float], workers: int = 8) -> Scene:
    return Scene(PeerHealth(workers, PATIENCE), edges)


@pytest.mark.parametrize("busy", [0.2, 0.01])
@pytest.mark.parametrize("place", range(6))
def test_a_slow_worker_anywhere_in_a_chain_is_found_within_two_seconds(
    place: int, busy: float
) -> None:
    names = [f"n{number}" for number in range(6)]
    edges = chain(*names)
    # Behind it arrives a fifth: those edges could carry all, and have nothing to carry mostly
    # (or never: small pieces vanish in a socket's buffer at once).
    starved = {edge: busy for at, edge in enumerate(edges) if at > place + 1}
    rates = slow(edges, names[place], 0.2)
    rates |= dict.fromkeys(starved, 0.2 * LINK / busy)
    assert scene(edges, 6).pass_s(2.0, rates, starved) == {names[place]: TAIL}


def test_a_slow_worker_among_stripes_is_found_though_its_children_wait() -> None:
    names = [f"n{number}" for number in range(8)]
    edges = {
        (names[(at - step) % 8], names[at]): LINK / 4 for at in range(8) for step in range(1, 5)
    }
    assert scene(edges).pass_s(2.0, slow(edges, "n3", 0.2)) == {"n3": TAIL}


def test_a_little_too_slow_takes_a_second_look_and_a_hiccup_none() -> None:
    edges = chain(*"abcd")
    hiccup = scene(edges)
    assert hiccup.pass_s(1.0, slow(edges, "c", 0.4)) == {}
    assert hiccup.pass_s(4.0, edges) == {}
    lasting = scene(edges)
    assert lasting.pass_s(1.0, slow(edges, "c", 0.4)) == {}
    assert lasting.pass_s(1.0, slow(edges, "c", 0.4)) == {"c": TAIL}


def test_one_that_recovers_stays_at_the_tail() -> None:
    edges = chain(*"abcd")
    here = scene(edges)
    assert here.pass_s(2.0, slow(edges, "c", 0.2)) == {"c": TAIL}
    moved = chain("a", "b", "d", "c")
    here.plan(moved)
    assert here.pass_s(20.0, moved) == {}
    assert here.standings.of("c") is TAIL


@pytest.mark.parametrize("factor", [0.05, 0.2, 0.45])
def test_a_network_that_is_slow_as_a_whole_demotes_no_worker(factor: float) -> None:
    edges = chain(*"abcdefgh")
    assert scene(edges).pass_s(20.0, dict.fromkeys(edges, factor * LINK)) == {}


def test_uneven_slowness_from_lack_of_cpu_demotes_no_worker() -> None:
    names = [f"n{number}" for number in range(12)]
    edges = chain(*names)
    random, here = Random(7), scene(edges, 12)
    for _ in range(20):
        carried = {edge: LINK * random.uniform(0.12, 0.22) for edge in edges}
        assert here.pass_s(1.0, carried) == {}


def test_starved_edges_say_nothing() -> None:
    edges = chain(*"abcd")
    barely = dict.fromkeys(edges, 0.05)
    assert scene(edges).pass_s(20.0, dict.fromkeys(edges, 0.1 * LINK), barely) == {}


def test_a_slow_origin_costs_its_reader_nothing_for_good() -> None:
    here = scene(chain(*"abcd"))
    rates = {edge: 0.3 * LINK if ORIGIN in edge else LINK for edge in here.expected}
    starved = {edge: 0.3 for edge in rates if ORIGIN not in edge}
    assert here.pass_s(4.0, rates, starved) == {"a": TAIL}
    here.plan(chain(*"bcda"))
    rates = {edge: 0.3 * LINK if ORIGIN in edge else LINK for edge in here.expected}
    starved = {edge: 0.3 for edge in rates if ORIGIN not in edge}
    assert here.pass_s(4.0, rates, starved) == {"a": LINE}, "the origin was it"
    here.plan(chain(*"bcda"))
    assert here.pass_s(20.0, rates, starved) == {}


def test_an_origin_that_is_slow_for_several_seeders_is_not_their_fault() -> None:
    seeders = {(ORIGIN, name): LINK / 4 for name in "abcd"}
    edges = {**seeders, **dict.fromkeys([("a", "b"), ("b", "c"), ("c", "d")], LINK / 4)}
    rates = {edge: rate * (0.2 if edge in seeders else 1) for edge, rate in edges.items()}
    assert scene(edges).pass_s(20.0, rates) == {}


def test_a_source_whose_next_reader_is_as_slow_was_the_slow_one() -> None:
    here = scene(chain(*"abcdef"))
    only_out = {edge: 0.3 * LINK if edge[0] == "b" else LINK for edge in here.expected}
    starved = dict.fromkeys([("c", "d"), ("d", "e"), ("e", "f")], 0.3)
    assert here.pass_s(4.0, only_out, starved) == {"c": TAIL}
    here.plan(chain(*"abdefc"))
    only_out = {edge: 0.3 * LINK if edge[0] == "b" else LINK for edge in here.expected}
    starved = dict.fromkeys([("d", "e"), ("e", "f"), ("f", "c")], 0.3)
    assert here.pass_s(4.0, only_out, starved) == {"b": TAIL, "c": LINE}


def test_a_parent_that_took_in_an_orphan_is_not_slow() -> None:
    edges = chain(*"abcd")
    here = scene(edges)
    # b died: c took itself to a, which now feeds two children of whom only one is planned.
    feeds = edges | {("a", "b"): 0.45 * LINK, ("a", "c"): 0.45 * LINK}
    del feeds["b", "c"]
    assert here.pass_s(10.0, feeds) == {}


def test_edges_without_an_expectation_are_not_judged() -> None:
    edges = chain(*"abcd")
    here = scene(dict.fromkeys(edges, 0.0))
    assert here.pass_s(10.0, slow(edges, "c", 0.01)) == {}


def test_counts_that_begin_again_are_a_new_process_and_no_slow_one() -> None:
    edges = chain(*"abcd")
    here = scene(edges)
    here.pass_s(5.0, edges)
    here.counted[("b", "c")] = [0.0, 0.0]
    assert here.pass_s(5.0, edges) == {}


def test_verdicts_survive_a_restart_of_the_coordinator() -> None:
    again = PeerHealth(8, PATIENCE, {"c": TAIL, "d": QUARANTINED})
    assert again.demoted() == {"c": TAIL, "d": QUARANTINED}
    edges = chain(*"abef")
    assert Scene(again, edges).pass_s(5.0, slow(edges, "e", 0.2)) == {}, "one in eight is enough"


def judged(standings: PeerHealth, source: str, reader: str, matched: int, corrupt: int):
    tally = EdgeTally(source=source, reader=reader, pieces=matched, corrupt=corrupt)
    standings.take(reader, [tally], 1.0)
    return standings.judge(1.0)


def test_a_sender_whose_corrupt_share_stands_out_is_quarantined() -> None:
    standings = PeerHealth(8, PATIENCE)
    for sender, reader in zip("abcd", "bcde", strict=True):
        assert judged(standings, sender, reader, 400, 4) == [], "one in a hundred is usual here"
    assert judged(standings, "e", "f", 60, 4) == [], "four in sixty come by chance"
    [verdict] = judged(standings, "e", "f", 100, 14)
    assert (verdict.worker_id, verdict.standing) == ("e", QUARANTINED)
    assert verdict.data["corrupt_pieces"] == 14
    assert judged(standings, "e", "f", 100, 20) == [], "told once"


def test_where_nothing_else_is_corrupt_four_pieces_are_enough() -> None:
    standings = PeerHealth(8, PATIENCE)
    assert judged(standings, "a", "b", 200, 0) == []
    assert judged(standings, "e", "f", 16, 3) == []
    [verdict] = judged(standings, "e", "f", 16, 4)
    assert verdict.standing is QUARANTINED


def test_a_sender_is_judged_once_others_have_reports() -> None:
    standings = PeerHealth(8, PATIENCE)
    assert judged(standings, "e", "f", 16, 4) == [], "nobody to compare it with"
    [verdict] = judged(standings, "a", "b", 30, 0)
    assert verdict.worker_id == "e"


def test_a_thousand_senders_on_a_bad_network_are_not_quarantined() -> None:
    random, standings = Random(3), PeerHealth(1000, PATIENCE)
    counts = {f"n{number}": [0, 0] for number in range(1000)}
    for _ in range(40):
        for name, count in counts.items():
            wrong = sum(random.random() < 0.01 for _ in range(10))
            count[0] += 10 - wrong
            count[1] += wrong
            tally = EdgeTally(source=name, reader="r", pieces=count[0], corrupt=count[1])
            standings.take("r", [tally], 1.0)
        assert standings.judge(1.0) == []


def test_no_worker_is_judged_where_all_corrupt_or_few_pieces_are_corrupt() -> None:
    everybody = PeerHealth(8, PATIENCE)
    for sender, reader in zip("abcd", "bcde", strict=True):
        assert judged(everybody, sender, reader, 95, 5) == []
    few = PeerHealth(8, PATIENCE)
    assert judged(few, "a", "b", 5_000, 5) == [], "one in a thousand"


def test_the_origin_is_never_quarantined() -> None:
    assert judged(PeerHealth(8, PATIENCE), ORIGIN, "a", 0, 50) == []


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_never_more_than_a_tenth_are_demoted(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    names = [f"n{number}" for number in range(count)]
    standings = PeerHealth(count, PATIENCE)
    here = Scene(standings, chain(*names))
    for _ in range(data.draw(st.integers(1, 4))):
        seeders = data.draw(st.integers(1, count))
        line = data.draw(st.permutations(names))
        edges = chain(*line) | dict.fromkeys([(ORIGIN, each) for each in line[:seeders]], LINK)
        here.plan(edges)
        ratio = st.floats(0.01, 1.2)
        rates = {edge: LINK * data.draw(ratio) for edge in edges}
        busy = {edge: data.draw(st.floats(0, 1)) for edge in edges}
        here.pass_s(data.draw(st.sampled_from([1.0, 3.0])), rates, busy, step_s=1.0)
        for source, reader in edges:
            if data.draw(st.booleans()):
                judged(standings, source, reader, 50, data.draw(st.integers(0, 60)))
        demoted = standings.demoted().values()
        most = max(1, count // 10)
        assert sum(each is TAIL for each in demoted) <= most
        assert sum(each is QUARANTINED for each in demoted) <= most


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(1, 40), st.floats(0.01, 3), st.floats(0, 1), st.sampled_from([0.25, 0.5, 4.0, 40.0])
)
def test_a_fleet_of_equals_demotes_no_worker(
    count: int, ratio: float, busy: float, beat_s: float
) -> None:
    edges = chain(*(f"n{number}" for number in range(count)))
    here = scene(edges, count)
    rates = dict.fromkeys(edges, ratio * LINK)
    assert here.pass_s(6 * beat_s, rates, dict.fromkeys(edges, busy), step_s=beat_s) == {}


def test_new_leader_judges_no_worker_by_rates_before_its_term() -> None:
    edges = {(f"w{number}", f"w{number + 1}"): LINK for number in range(9)} | {(ORIGIN, "w0"): LINK}
    standings = PeerHealth(10, PATIENCE)
    standings.resume(0.0)
    scene = Scene(standings, edges)
    # Counted since the beginning, most of it before: the head had waited long for the origin.
    scene.counted = {edge: [100_000.0, 100.0] for edge in edges}
    scene.counted[ORIGIN, "w0"] = [1_000.0, 100.0]
    assert scene.pass_s(12, edges) == {}
    limping = edges | {("w4", "w5"): LINK / 10, ("w5", "w6"): LINK / 10}
    assert scene.pass_s(12, limping) == {"w5": TAIL}, "who is slow under its own eyes is found"


def test_new_leader_waits_until_the_fleet_has_found_it() -> None:
    edges = {(f"w{number}", f"w{number + 1}"): LINK for number in range(9)}
    standings = PeerHealth(10, PATIENCE)
    standings.resume(0.0)
    scene = Scene(standings, edges)
    limping = edges | {("w4", "w5"): LINK / 10, ("w5", "w6"): LINK / 10}
    assert scene.pass_s(4.5, limping) == {}
    assert scene.pass_s(2, limping) == {"w5": TAIL}


def explained_slowly(standings: PeerHealth, edges: set[Edge]) -> list[tuple[str, set[Edge]]]:
    """What ``_explain`` must yield: everybody ranked anew for each, as its docstring says."""
    ends, left, found = standings._ends(edges), set(edges), []
    while left:

        def rank(name: str, left: set[Edge] = left) -> tuple[int, bool, int]:
            into, out = ends[name].slow_in & left, ends[name].slow_out & left
            score = ends[name].score(len(into), len(out))
            return score, name in standings._slow, len(into)

        best = max(sorted({end for edge in left for end in edge}), key=rank)
        if not rank(best)[0]:
            break
        explained = {edge for edge in edges if best in edge}
        left = left - explained
        found.append((best, explained))
    return found


NUMBERS = st.integers(0, 7)
EDGES = st.sets(st.tuples(NUMBERS, NUMBERS).filter(lambda ends: ends[0] != ends[1]), max_size=25)


@given(slow=EDGES, fine=EDGES, known=st.sets(NUMBERS))
@settings(max_examples=25, deadline=None)
def test_who_explains_slow_edges_is_found_by_rank(slow, fine, known):
    standings = PeerHealth(8, PATIENCE, {f"w{number}": TAIL for number in known})

    def named(edges):
        return {(f"w{source}", f"w{reader}") for source, reader in edges}

    bad, good = named(slow), named(fine - slow)
    standings.follow(dict.fromkeys(bad | good, LINK))
    for edge in good:
        standings.take(edge[0], [EdgeTally(source=edge[0], reader=edge[1])], 0.0)
        standings._counts[edge].ratio = 1.0
    wanted = explained_slowly(standings, bad)
    assert list(standings._explain(bad, standings._ends(bad))) == wanted
