"""Slow and corrupting workers, judged from the transfer counts of one deployment's edges.

A relay moves at the rate of its slowest edge, and which end of that edge is at fault shows only in
comparison: a slow worker is slow with all its peers, a slow network is slow for all workers. So the
coordinator judges, over all edges at once, never one of the two ends. Pure: no clock, plan or
deployment; expected rates and counts go in, standings come out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import sqrt

from paceline.coordinator.state.settings import CoordinatorSettings
from paceline.plan import Standing
from paceline.schemas import EdgeTally

# Corrupting senders: those whose share of corrupt pieces is far above the others'. A bad network
# corrupts a few pieces of every sender, a bad worker many of its own. Uses no edges and no plans.

MIN_SENDER_PIECES = 20  # a sender of fewer does not count towards the usual share
SENDERS_PER_PAUSE = 100  # with more senders than this, they are judged less often than each tick
BEYOND_CHANCE = 5.0  # standard deviations
LONE_SENDER_FACTOR = 4  # times as many corrupt pieces, for a sender without others to compare with


class CorruptionDetector:
    """The senders of one deployment; at most ``most`` of them are judged corrupting."""

    def __init__(self, settings: CoordinatorSettings, most: int) -> None:
        self._settings, self._most = settings, most
        self.quarantined: set[str] = set()
        self._pieces: dict[str, list[int]] = {}  # matching, corrupt
        self._count_again = False
        self._in_doubt = False  # a sender may be corrupting: other senders' counts will decide
        self._count_s = float("-inf")

    def take(self, source: str, matched: int, corrupt: int) -> None:
        """Add a reader's new piece counts of the sender ``source``."""
        if matched or corrupt:
            sender = self._pieces.setdefault(source, [0, 0])
            sender[0] += matched
            sender[1] += corrupt
            self._count_again = self._count_again or corrupt > 0 or self._in_doubt

    def close(self) -> None:
        """Clear the counts; quarantined senders stay quarantined."""
        self._pieces, self._count_again = {}, False

    def judge(self, now_s: float) -> list[tuple[str, dict[str, object]]]:
        """Return the newly quarantined senders with the reason, worst first."""
        if not self._count_again or now_s < self._count_s:
            return []
        self._count_again = False
        # Counting 10,000 takes 5 ms.
        self._count_s = now_s + len(self._pieces) // SENDERS_PER_PAUSE / 10
        return self._judge()

    def _judge(self) -> list[tuple[str, dict[str, object]]]:
        settings = self._settings
        known = {
            name: (corrupt, matched + corrupt)
            for name, (matched, corrupt) in self._pieces.items()
            if name not in self.quarantined
            and (matched + corrupt >= MIN_SENDER_PIECES or corrupt >= settings.corrupt_pieces)
        }
        shares = {name: corrupt / judged for name, (corrupt, judged) in known.items()}
        ordered = sorted(shares.values())
        all_corrupt = sum(corrupt for corrupt, _ in known.values())
        all_judged = 1 + sum(judged for _, judged in known.values())  # no division by zero
        found = []
        self._in_doubt = False
        for name in sorted(shares, key=lambda each: (-shares[each], each)):
            corrupt, judged = known[name]
            if shares[name] <= settings.corrupt_share or len(self.quarantined) >= self._most:
                break
            if corrupt < settings.corrupt_pieces or name.startswith("origin:"):
                continue
            self._in_doubt = True
            if len(known) == 1 and corrupt < LONE_SENDER_FACTOR * settings.corrupt_pieces:
                continue  # no other sender to compare it with, yet
            usual = _median_without(ordered, shares[name])
            if shares[name] <= settings.corrupt_factor * usual:
                continue
            # Where one piece in a hundred is corrupt anyway, some of thousands of senders have four
            # corrupt ones among their first sixty: the excess must be beyond chance as well.
            chance = judged * max(usual, (all_corrupt - corrupt) / (all_judged - judged))
            if corrupt < settings.corrupt_pieces + chance + BEYOND_CHANCE * sqrt(chance):
                continue
            self.quarantined.add(name)
            why: dict[str, object] = {"corrupt_pieces": corrupt}
            why |= {"share": round(shares[name], 4), "usual_share": round(usual, 4)}
            found.append((name, why))
        return found


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of ``ordered`` without its member ``one``; 0 where that leaves none."""
    middle = (len(ordered) - 2) // 2
    if middle < 0:
        return 0.0
    return ordered[middle if middle < bisect_left(ordered, one) else middle + 1]


Edge = tuple[str, str]  # source key, reader

BUSY_SHARE = 0.5  # of an interval; an edge busy for less was waiting, which is no evidence
LEAST_CARRIED = 0.05  # of the planned bytes of an interval: such a waiting edge is not slow
STALE_LOOKS = 3.0  # a flow without reports for so many intervals has ended
SETTLED_S = 5.0  # after a change of leaders, in which agents find the new one


@dataclass(frozen=True, slots=True)
class StandingChange:
    """A change of one worker's standing; ``data`` is the reason, for display."""

    worker_id: str
    standing: Standing
    data: dict[str, object]


@dataclass(slots=True)
class _EdgeCounter:
    """One edge's counters at the start of the current interval, and the last interval's result."""

    since_s: float
    bytes: int = 0
    busy_s: float = 0.0
    pieces: int = 0
    corrupt: int = 0
    rate: float = 0.0  # bytes per busy second
    flow: float = 0.0  # bytes per second
    stale_s: float = 0.0  # when that flow counts as ended, without further reports
    ratio: float | None = None  # of the planned rate
    slow_s: float = 0.0  # duration of the consecutive intervals in which it was slow


@dataclass(slots=True)
class _WorkerEdges:
    """The slow and the normal edges of one worker, as reader and as source."""

    slow_in: set[Edge] = field(default_factory=set)
    slow_out: set[Edge] = field(default_factory=set)
    fine_in: int = 0
    fine_out: int = 0

    def score(self, into: int, out: int) -> int:
        """Return how many unexplained edges (``into``, ``out``) this worker would explain."""
        return (into if len(self.slow_in) >= self.fine_in else 0) + (
            out if len(self.slow_out) >= self.fine_out else 0
        )


class PeerHealth:
    """Standings of one deployment's ``workers``; ``known`` are restored verdicts."""

    def __init__(
        self,
        workers: int,
        settings: CoordinatorSettings,
        known: Mapping[str, Standing] | None = None,
    ) -> None:
        self._settings = settings
        self._most = max(1, int(workers * settings.most_demoted + 1e-9))
        self._expected: dict[Edge, float] = {}
        self._planned_in: defaultdict[str, float] = defaultdict(float)
        self._planned_out: defaultdict[str, float] = defaultdict(float)
        self._counts: dict[Edge, _EdgeCounter] = {}
        self._senders = CorruptionDetector(settings, self._most)
        self._suspects: set[Edge] = set()
        self._slow: dict[str, set[Edge]] = {}  # slow workers, and the edges that prove it
        self._slow_origins: set[str] = set()
        self._look_again = False
        self._resumed = False  # after a restart an edge's first report is only a base
        self._from_s = float("-inf")  # slow workers are judged from here on
        for worker_id, standing in (known or {}).items():
            if standing is Standing.QUARANTINED:
                self._senders.quarantined.add(worker_id)
            elif standing is Standing.TAIL:
                self._slow[worker_id] = set()

    def of(self, worker_id: str) -> Standing:
        if worker_id in self._senders.quarantined:
            return Standing.QUARANTINED
        return Standing.TAIL if worker_id in self._slow else Standing.LINE

    def demoted(self) -> dict[str, Standing]:
        """Return every worker whose standing is not LINE."""
        return {each: self.of(each) for each in sorted({*self._slow, *self._senders.quarantined})}

    def follow(self, expected: Mapping[Edge, float]) -> None:
        """Compare with a new plan: its expected bytes per second for each edge."""
        for key, count in self._counts.items():
            if self._expected.get(key) != expected.get(key):
                count.ratio, count.slow_s = None, 0.0
        self._expected = dict(expected)
        self._planned_in, self._planned_out = defaultdict(float), defaultdict(float)
        for (source, reader), rate in expected.items():
            self._planned_out[source] += rate
            self._planned_in[reader] += rate
        self._suspects &= {key for key in self._suspects if self._counts[key].slow_s}

    def resume(self, now_s: float) -> None:
        """Start again after a change of leaders, which leaves gaps in the counts of each edge."""
        self._resumed, self._from_s = True, now_s + SETTLED_S

    def close(self) -> None:
        self._counts, self._suspects = {}, set()
        self._expected, self._look_again = {}, False
        self._senders.close()

    def take(self, reporter: str, tallies: Iterable[EdgeTally], now_s: float) -> None:
        """Add ``reporter``'s counts: bytes sent, as a source; pieces that matched, as a reader."""
        for tally in tallies:
            key = (tally.source, tally.reader)
            count = self._counts.get(key)
            if count is None:
                count = self._counts[key] = _EdgeCounter(now_s - tally.busy_s)
                if self._resumed:
                    self._counts[key] = _EdgeCounter(
                        now_s, tally.bytes, tally.busy_s, tally.pieces, tally.corrupt
                    )
                    continue
            if reporter == tally.reader:
                self._take_pieces(count, tally)
            if reporter == tally.source or tally.source.startswith("origin:"):
                self._take_bytes(key, count, tally, now_s)

    def judge(self, now_s: float) -> list[StandingChange]:
        verdicts = [
            StandingChange(name, Standing.QUARANTINED, why)
            for name, why in self._senders.judge(now_s)
        ]
        if self._look_again and now_s >= self._from_s:
            self._look_again = False
            verdicts += self._judge_rates(now_s)
        return verdicts

    # --- counting --------------------------------------------------------------------------------

    def _take_pieces(self, count: _EdgeCounter, tally: EdgeTally) -> None:
        # A restarted reader counts from zero again.
        matched = tally.pieces - (count.pieces if tally.pieces >= count.pieces else 0)
        corrupt = tally.corrupt - (count.corrupt if tally.corrupt >= count.corrupt else 0)
        count.pieces, count.corrupt = tally.pieces, tally.corrupt
        self._senders.take(tally.source, matched, corrupt)

    def _take_bytes(self, key: Edge, count: _EdgeCounter, tally: EdgeTally, now_s: float) -> None:
        carried, busy_s = tally.bytes - count.bytes, tally.busy_s - count.busy_s
        look_s = now_s - count.since_s
        if carried < 0 or busy_s < 0:  # a new process, or an overtaken heartbeat
            count.since_s, count.bytes, count.busy_s = now_s, tally.bytes, tally.busy_s
            return
        if look_s < self._settings.slow_look_s:
            return
        count.since_s, count.bytes, count.busy_s = now_s, tally.bytes, tally.busy_s
        count.flow, count.stale_s = carried / look_s, now_s + STALE_LOOKS * look_s
        expected = self._expected.get(key, 0.0)
        if expected <= 0 or (
            busy_s < BUSY_SHARE * look_s and carried < LEAST_CARRIED * expected * look_s
        ):
            return
        # An edge that mostly waits for its source is hardly ever busy: small pieces leave at once.
        count.rate = carried / busy_s if busy_s > 0 else expected
        count.ratio = min(1.0, count.rate / expected)
        limit = self._settings.slow_ratio
        slow = count.ratio < limit and busy_s >= BUSY_SHARE * look_s
        count.slow_s = count.slow_s + look_s if slow else 0.0
        # Far too slow is accepted soon; a little too slow may be a hiccup, and takes twice as long.
        believed_s = self._settings.slow_s * (1 if count.ratio < limit / 2 else 2)
        if slow and count.slow_s >= believed_s:
            self._suspects.add(key)
            self._look_again = True
        elif not slow:
            self._suspects.discard(key)

    # --- judging ---------------------------------------------------------------------------------

    def _judge_rates(self, now_s: float) -> list[StandingChange]:
        usual = _MedianRatio(self._counts, self._expected, set(self._slow))
        edges = self._unexplained_by_load(now_s)
        for reasons in self._slow.values():
            edges |= reasons  # an edge once found slow remains evidence against its source
        ends = self._ends(edges)
        verdicts: list[StandingChange] = []
        for worker_id, explained in self._explain(edges, ends):
            # A worker that read slowly from this one only is cleared.
            freed = {
                other
                for other, reasons in self._slow.items()
                if other != worker_id and reasons and reasons <= explained
            }
            if worker_id.startswith("origin:"):
                # Several workers read slowly from the origin: that is its rate.
                if len(explained) < 2:
                    continue
                self._slow_origins.add(worker_id)
            elif worker_id in self._slow:
                self._slow[worker_id] |= explained & self._suspects
                continue
            else:
                worst = min(explained & self._suspects, key=self._ratio_of, default=None)
                if worst is None or len(self._slow) - len(freed) >= self._most:
                    continue
                if not usual.stands_out(worker_id, self._ratio_of(worst), explained):
                    continue
                self._slow[worker_id] = set(explained)
                verdicts.append(StandingChange(worker_id, Standing.TAIL, self._why_slow(worst)))
            for other in sorted(freed):
                del self._slow[other]
                verdicts.append(StandingChange(other, Standing.LINE, {"source": worker_id}))
        return verdicts

    def _explain(
        self, edges: set[Edge], ends: dict[str, _WorkerEdges]
    ) -> Iterator[tuple[str, set[Edge]]]:
        """Yield the workers that explain the slow edges, in order of how many they explain.

        A single slow edge is attributed to its reader: the next source that it reads from shows
        whether the first one was slow. Between equals, a worker already found slow comes first.
        """
        left = set(edges)
        into = {name: len(each.slow_in) for name, each in ends.items()}
        out = {name: len(each.slow_out) for name, each in ends.items()}

        def rank(name: str) -> tuple[int, bool, int, str]:
            score = ends[name].score(into[name], out[name])
            return -score, name not in self._slow, -into[name], name

        # Ranks only fall as edges are explained, so an outdated one is found when it is popped;
        # with 8,000 slow edges of 1,000 workers, ranking all anew for each took 0.85 s.
        heap = [rank(name) for name in ends]
        heapify(heap)
        while heap:
            best = heap[0]
            name = best[-1]
            now = rank(name)
            if now != best:
                heapreplace(heap, now)
                continue
            if not best[0]:
                return  # the rest is slow only between workers that are fast with all others
            heappop(heap)
            explained = ends[name].slow_in | ends[name].slow_out
            for source, reader in explained & left:
                out[source] -= 1
                into[reader] -= 1
            left -= explained
            yield name, explained

    def _ends(self, edges: set[Edge]) -> dict[str, _WorkerEdges]:
        ends: dict[str, _WorkerEdges] = {end: _WorkerEdges() for edge in edges for end in edge}
        for edge in edges:
            ends[edge[0]].slow_out.add(edge)
            ends[edge[1]].slow_in.add(edge)
        for edge in self._expected:
            count = self._counts.get(edge)
            if edge in edges or count is None or count.ratio is None:
                continue
            if count.ratio >= self._settings.slow_ratio:
                if edge[0] in ends:
                    ends[edge[0]].fine_out += 1
                if edge[1] in ends:
                    ends[edge[1]].fine_in += 1
        return ends

    def _unexplained_by_load(self, now_s: float) -> set[Edge]:
        """Return the suspected edges that are slow beyond the unplanned load of their ends.

        A parent that took in an orphan feeds two at half the rate each: neither is slow.
        """
        sources = {source for source, _ in self._suspects}
        readers = {reader for _, reader in self._suspects}
        out: defaultdict[str, float] = defaultdict(float)
        into: defaultdict[str, float] = defaultdict(float)
        for (source, reader), count in self._counts.items():
            unplanned = count.stale_s > now_s and (source, reader) not in self._expected
            if unplanned and (source in sources or reader in readers):
                out[source] += count.flow
                into[reader] += count.flow
        found = set()
        for edge in self._suspects:
            source, reader = edge
            left_out = 1 - out[source] / max(self._planned_out[source], 1.0)
            left_in = 1 - into[reader] / max(self._planned_in[reader], 1.0)
            limit = self._settings.slow_ratio * min(left_out, left_in)
            if source not in self._slow_origins and self._ratio_of(edge) < limit:
                found.add(edge)
        return found

    def _ratio_of(self, edge: Edge) -> float:
        count = self._counts.get(edge)
        return 1.0 if count is None or count.ratio is None else count.ratio

    def _why_slow(self, edge: Edge) -> dict[str, object]:
        return {
            "source": edge[0],
            "reader": edge[1],
            "got_bytes_s": round(self._counts[edge].rate),
            "wanted_bytes_s": round(self._expected.get(edge, 0.0)),
        }


class _MedianRatio:
    """The median ratio of actual to planned rate, over the edges of other workers."""

    def __init__(
        self, counts: Mapping[Edge, _EdgeCounter], expected: Mapping[Edge, float], slow: set[str]
    ) -> None:
        self._ratios = {
            edge: count.ratio
            for edge, count in counts.items()
            if count.ratio is not None
            and edge in expected
            and edge[0] not in slow
            and edge[1] not in slow
        }
        self._sorted = sorted(self._ratios.values())

    def stands_out(self, worker_id: str, ratio: float, edges: set[Edge]) -> bool:
        """Return whether ``ratio`` is less than half of the median over edges without
        ``worker_id``; False where there are none.
        """
        own = [each for edge in edges if (each := self._ratios.get(edge)) is not None]
        own += [
            each for edge, each in self._ratios.items() if worker_id in edge and edge not in edges
        ]
        others = list(self._sorted)
        for each in own:
            del others[bisect_left(others, each)]
        return bool(others) and ratio < 0.5 * others[len(others) // 2]
