"""The network as a fluid model: position and rate of each flow, the next change, and the clock.

A *flow* carries consecutive bytes of the model from a source to a reader. It may read what its
source has (``static``) and what the source itself is receiving, ``lag`` bytes behind the flow that
delivers it there (its *leader*). So a flow is *free*, it *follows*, or it *waits* until the edge
reaches it. Between two changes all of this is linear in time. No pieces, sessions or faults here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# Max-min fair rates of flows over shared links.
#
# Progressive filling (Bertsekas and Gallager, Data Networks, 6.5), with one addition: a flow that
# has caught up with the growing edge of what its source receives *follows* that flow and is never
# faster.
#
# Instead of one bottleneck a round, every resource that is a bottleneck among its neighbours
# freezes its flows at once; thousands of workers take a handful of rounds.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ROUNDS = 64  # after that, remaining flows get a safe share, which may be a little low
_TINY = 1e-9


def max_min_rates(capacity: Floats, uses: Ints, leader: Ints, stopped: Flags) -> Floats:
    """Return each flow's rate.

    ``capacity[r]`` is the capacity of resource r (inf: no limit), ``uses[:, f]`` are the resources
    of flow f (fill up with one without a limit), ``leader[f]`` is the flow that it follows or -1
    (no cycles), and flows with ``stopped[f]`` carry nothing.
    """
    flows = uses.shape[1]
    rate = np.zeros(flows)
    frozen = stopped.copy()
    residual = capacity.astype(np.float64, copy=True)
    jumps = _jump_tables(leader)
    for turn in range(ROUNDS):
        live = np.flatnonzero(~frozen)
        if not live.size:
            break
        mine = uses[:, live]
        count = np.bincount(mine.ravel(), minlength=residual.size)
        share = np.full(residual.size, np.inf)
        used = count > 0
        share[used] = np.maximum(residual[used], 0.0) / count[used]
        own = share[mine].min(axis=0)
        above, fixed = _along_paths(jumps, frozen, rate, live, own)
        # No flow is faster than its path to the root; where the path is frozen, so is the flow.
        wish = np.minimum(above, fixed)
        lowest = np.full(residual.size, np.inf)
        for row in mine:
            np.minimum.at(lowest, row, wish)
        tight = used & (lowest >= share * (1 - _TINY)) & np.isfinite(share)
        now = tight[mine].any(axis=0) | (fixed <= above)
        if turn == ROUNDS - 1:
            now[:] = True
        chosen = live[now]
        rate[chosen] = wish[now]
        frozen[chosen] = True
        for row in mine[:, now]:
            residual -= np.bincount(row, weights=wish[now], minlength=residual.size)
    return rate


def _jump_tables(leader: Ints) -> list[Ints]:
    """Return each flow's ancestor 1, 2, 4, … steps up; ``len(leader)`` where there is none."""
    if not (leader >= 0).any():
        return []
    end = leader.size
    table = np.append(np.where(leader >= 0, leader, end), end)
    tables = []
    while (table[:-1] != end).any():
        tables.append(table)
        table = table[table]
    return tables


def _along_paths(
    jumps: list[Ints], frozen: Flags, rate: Floats, live: Ints, own: Floats
) -> tuple[Floats, Floats]:
    """Return two minima over each live flow's path to the root, itself included.

    The first is the least share of the live flows, the second the least rate of the frozen ones.
    """
    if not jumps:
        return own, np.full(own.size, np.inf)
    above = np.full(frozen.size + 1, np.inf)
    fixed = np.full(frozen.size + 1, np.inf)
    above[live] = own
    fixed[:-1][frozen] = rate[frozen]
    for table in jumps:
        np.minimum(above, above[table], out=above)
        np.minimum(fixed, fixed[table], out=fixed)
    return above[live], fixed[live]


MOST_MORE = 64.0  # a flow may use at most this multiple of its share of what others leave unused
NEAR = 1e-3  # bytes: positions closer than this are the same
_FLOATS = ("pos", "stop", "static", "edge", "rate", "lag", "carried", "busy_s", "moved_s", "over")
_COLUMNS: dict[str, type] = {
    **dict.fromkeys(_FLOATS, np.float64),
    **dict.fromkeys(("leader", "pair"), np.int64),
    **dict.fromkeys(("moving", "parked", "used", "noted", "idle"), np.bool_),
}
USES = 4  # NIC in, NIC out, uplink out, uplink in


class Network:
    """Resources and the flows that share them."""

    pos: Floats
    stop: Floats  # end of the present run of wanted bytes
    static: Floats  # the source has everything before it
    edge: Floats  # next position to report to the caller
    rate: Floats
    lag: Floats
    carried: Floats  # bytes, and the time with something to send: the counts of edge tallies
    busy_s: Floats
    moved_s: Floats  # when it last moved
    over: Floats  # bytes that it could have carried in this step beyond the end of its run
    leader: Ints  # or -1
    pair: Ints
    moving: Flags
    parked: Flags
    used: Flags  # slots that hold a flow
    noted: Flags  # set by the caller, like ``idle``
    idle: Flags

    def __init__(self) -> None:
        self.now_s = 0.0
        self._capacity: list[float] = [np.inf]  # number 0: no limit
        self._size = 0
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(0, kind))
        self.uses: Ints = np.zeros((USES, 0), np.int64)
        self._unused: list[int] = []
        self._grow(64)
        self._dirty = True
        self._slots: Ints = np.zeros(0, np.int64)  # of moving flows, as of ``_share_out``
        self._potential: Floats = np.zeros(0)  # what each flow's connection could carry
        self._state: NDArray[np.int8] = np.zeros(0, np.int8)

    # ── resources and flows ──────────────────────────────────────────────────────────────────────

    def resource(self, bytes_s: float) -> int:
        """Add a resource that carries ``bytes_s`` and return its number."""
        self._capacity.append(bytes_s)
        return len(self._capacity) - 1

    def limit(self, resource: int, bytes_s: float) -> None:
        self._capacity[resource] = bytes_s
        self._dirty = True

    def capacity(self, resource: int) -> float:
        """Return a resource's capacity in bytes/s."""
        return self._capacity[resource]

    def add(self, uses: tuple[int, ...], lag: float, pair: int = 0) -> int:
        """Add a flow that does not move yet and return its slot.

        Flows of one ``pair`` of hosts share a connection.
        """
        if not self._unused:
            self._grow(self._size)
        slot = self._unused.pop()
        self.uses[:, slot] = 0
        self.uses[: len(uses), slot] = uses
        self.lag[slot], self.pair[slot] = lag, pair
        self.leader[slot] = -1
        self.used[slot] = True
        self.moving[slot] = self.noted[slot] = self.idle[slot] = False
        self.rate[slot] = self.carried[slot] = self.busy_s[slot] = self.over[slot] = 0.0
        self.moved_s[slot] = self.now_s
        return slot

    def remove(self, slot: int) -> None:
        self.halt(slot)
        self.used[slot] = False
        self._unused.append(slot)

    def start(self, slot: int, at: float, stop: float, static: float, leader: int) -> None:
        """Start a flow over ``[at, stop)``, with the time that its last run left of the step."""
        limit = static if leader < 0 else max(static, self.pos[leader] - self.lag[slot])
        spent = max(0.0, min(self.over[slot], stop - at, limit - at))
        self.over[slot] -= spent
        self.carried[slot] += spent
        at += spent
        self.pos[slot], self.stop[slot], self.static[slot] = at, stop, static
        self.leader[slot] = leader
        self.moving[slot] = True
        self.parked[slot] = False
        self._dirty = True

    def resume(self, slot: int, static: float, leader: int) -> None:
        """Continue a parked flow: its source has more bytes, or is receiving them."""
        self.static[slot] = max(self.static[slot], static)
        self.leader[slot] = leader
        self.parked[slot] = False
        self._dirty = True

    def let_go(self, slot: int, static: float) -> None:
        """Detach a flow from its leader; its source has everything up to ``static``."""
        self.static[slot] = max(self.static[slot], static)
        self.leader[slot] = -1
        self._dirty = True

    def halt(self, slot: int) -> None:
        if self.moving[slot]:
            self.moving[slot] = False
            self.rate[slot] = 0.0
            self._dirty = True

    def _grow(self, more: int) -> None:
        self._unused = list(range(self._size + more - 1, self._size - 1, -1))
        self._size += more
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.append(getattr(self, name), np.zeros(more, kind)))
        self.uses = np.append(self.uses, np.zeros((USES, more), np.int64), axis=1)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def next_s(self) -> float:
        """Return when a flow next reaches an edge, a stop or its leader; inf for never."""
        if self._dirty:
            self._share_out()
        slots = self._slots
        if not slots.size:
            return np.inf
        rate, pos, leader = self.rate[slots], self.pos[slots], self.leader[slots]
        led = leader >= 0
        ahead = np.where(led, self.rate[leader] * self.moving[leader], 0.0)
        edge = np.where(led, self.pos[leader] - self.lag[slots], -np.inf)
        static = self.static[slots]
        with np.errstate(divide="ignore", invalid="ignore"):
            # A flow reaches its edge or stop.
            todo = np.minimum(self.edge[slots], self.stop[slots]) - pos
            wait_s = np.where(rate > 0, np.maximum(todo, 0.0) / rate, np.inf)
            # Free flows reach the end of what the source has, or catch up with their leader.
            room = np.maximum(edge, static) - pos
            closing = rate - np.where(edge >= static, ahead, 0.0)
            free = (self._state == FREE) & (closing > 0)
            wait_s = np.where(free, np.minimum(wait_s, room / closing), wait_s)
            # Waiting flows begin when the edge reaches them.
            waits = (self._state == WAITING) & (ahead > 0)
            wait_s = np.where(waits, (pos - edge) / ahead, wait_s)
        return float(self.now_s + max(0.0, wait_s.min()))

    def advance(self, to_s: float) -> Ints:
        """Advance to ``to_s`` and return the slots that need attention, furthest positions first.

        Those are at an edge, at a stop, or at the end of what their source has.
        """
        if self._dirty:
            self._share_out()
        step_s, self.now_s = to_s - self.now_s, to_s
        slots = self._slots
        if not slots.size:
            return slots
        if step_s > 0:
            self._move(slots, step_s, to_s)
        pos = self.pos[slots]
        due = pos >= np.minimum(self.edge[slots], self.stop[slots]) - NEAR
        leader = self.leader[slots]
        dry = (leader < 0) & (pos >= self.static[slots] - NEAR) & ~self.parked[slots]
        hit = slots[due | dry]
        return hit[np.argsort(-self.pos[hit], kind="stable")]

    def _move(self, slots: Ints, step_s: float, to_s: float) -> None:
        stop, before = self.stop[slots], self.pos[slots]
        leader, lag, static = self.leader[slots], self.lag[slots], self.static[slots]
        led = np.flatnonzero(leader >= 0)
        most = np.where(leader < 0, np.minimum(stop, static), stop)
        own = self.rate[slots] * step_s
        more = self._left_over(slots, own, np.maximum(most - before, 0.0), step_s)
        wish = before + own if more is None else before + own + more
        self.pos[slots] = np.minimum(wish, np.maximum(most, before))
        # A step may be longer than it takes to catch up, or to begin: correct the flows that have a
        # leader, from the front to the back, until nothing changes.
        # Behind a leader that is at the end of its run, followers use the rest of the step, too:
        # ``far`` is where the leader would be by now if its run went on.
        far = self.pos.copy()
        far[slots] = np.where(self.pos[slots] >= stop - NEAR, np.maximum(wish, before), far[slots])
        mine, lead, limit_lag = slots[led], leader[led], lag[led]
        floor, ends, since = static[led], stop[led], before[led]
        waiting = self._state[led] == WAITING
        while mine.size:
            # No flow moves back, not even where a new leader is behind it.
            reach = np.minimum(far[lead] - limit_lag, self.pos[lead])
            limit = np.minimum(np.maximum(reach, floor), ends)
            limit = np.maximum(limit, since)
            at = self.pos[mine]
            wrong = (at > limit + NEAR) & ~waiting | (waiting & (limit > at + NEAR))
            if not wrong.any():
                break
            if waiting[wrong].any():
                self._dirty = True
            self.pos[mine[wrong]] = limit[wrong]
            behind = np.where(limit >= ends - NEAR, np.maximum(far[lead] - limit_lag, limit), limit)
            far[mine[wrong]] = behind[wrong]
            waiting = waiting & ~wrong
            if not self._behind(wrong, mine, lead):
                break
        moved = self.pos[slots] - before
        self.over[:] = 0.0
        over = np.maximum(before + own - self.pos[slots], 0.0)
        self.over[slots] = over if more is None else self._still_over(slots, over, moved, step_s)
        going = moved > NEAR
        self.moved_s[slots[going]] = to_s
        self.carried[slots] += moved
        potential = self._potential
        with np.errstate(divide="ignore", invalid="ignore"):
            took_s = np.where(potential > 0, moved / potential, 0.0)
        self.busy_s[slots] += np.minimum(took_s, step_s)
        if not self._dirty and (self._states(slots) != self._state).any():
            self._dirty = True

    def _left_over(self, slots: Ints, own: Floats, room: Floats, step_s: float) -> Floats | None:
        """Return what each flow may carry beyond its ``own`` share; None for nothing.

        There is more where other flows ended within the step. Without this a repair of one piece
        costs its neighbours half of a step.
        """
        ended = room < own - NEAR
        if not ended.any():
            return None
        uses = self.uses[:, slots]
        left = np.asarray(self._capacity) * step_s
        demand = np.zeros(left.size)
        carried, able = np.minimum(own, room), np.where(ended, 0.0, own)
        for row in uses:
            left -= np.bincount(row, weights=carried, minlength=left.size)
            demand += np.bincount(row, weights=able, minlength=left.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(demand > 0, np.maximum(left, 0.0) / demand, 0.0)
        share[0] = np.inf
        more: Floats = able * np.minimum(share[uses].min(axis=0), MOST_MORE)
        return np.minimum(more, room - carried)

    def _still_over(self, slots: Ints, over: Floats, moved: Floats, step_s: float) -> Floats:
        """Return the part of ``over`` that every link of a flow still had free in this step."""
        uses = self.uses[:, slots]
        left, owed = np.asarray(self._capacity) * step_s, np.zeros(len(self._capacity))
        for row in uses:
            left -= np.bincount(row, weights=moved, minlength=left.size)
            owed += np.bincount(row, weights=over, minlength=left.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(owed > 0, np.clip(left / owed, 0.0, 1.0), 1.0)
        unused: Floats = over * part[uses].min(axis=0)
        return unused

    def _behind(self, wrong: Flags, mine: Ints, lead: Ints) -> bool:
        """Return whether one of the flows corrected in this round leads another flow."""
        right = np.zeros(self._size, np.bool_)
        right[mine[wrong]] = True
        return bool(right[lead].any())

    # ── rates ────────────────────────────────────────────────────────────────────────────────────

    def _states(self, slots: Ints) -> NDArray[np.int8]:
        leader = self.leader[slots]
        edge = np.where(leader >= 0, self.pos[leader] - self.lag[slots], -np.inf)
        room = np.maximum(edge, self.static[slots]) - self.pos[slots]
        state = np.full(slots.size, FREE, np.int8)
        state[room <= NEAR] = FOLLOWING
        state[room < -NEAR] = WAITING
        state[(leader < 0) & (room <= NEAR)] = WAITING
        # At the static edge with the leader still behind it: such a flow waits, too.
        state[(state == FOLLOWING) & (edge < self.static[slots] - NEAR)] = WAITING
        return state

    def _share_out(self) -> None:
        """Recompute every rate."""
        self._dirty = False
        slots = self._slots = np.flatnonzero(self.moving)
        if not slots.size:
            self._state, self._potential = np.zeros(0, np.int8), np.zeros(0)
            return
        state = self._state = self._states(slots)
        where = np.full(self._size + 1, -1, np.int64)
        where[slots] = np.arange(slots.size)
        leader = self.leader[slots]
        follows = state == FOLLOWING
        leads = np.where(follows, where[leader], -1)
        stopped = (state == WAITING) | (follows & (leads < 0))
        capacity = np.asarray(self._capacity)
        uses = self.uses[:, slots]
        rate = max_min_rates(capacity, uses, leads, stopped)
        self.rate[slots] = rate
        left = capacity.copy()
        for row in uses:
            left -= np.bincount(row, weights=rate, minlength=left.size)
        spare: Floats = np.maximum(np.where(follows, left[uses].min(axis=0), 0.0), 0.0)
        together = np.bincount(self.pair[slots], weights=rate).astype(np.float64)
        self._potential = together[self.pair[slots]] + spare


FREE, FOLLOWING, WAITING = 0, 1, 2


class Clock:
    """A virtual clock with scheduled callbacks; callbacks due at one time run in FIFO order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Schedule ``what`` at a virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule ``what`` after ``delay_s`` of virtual time."""
        self.at(self.now_s + delay_s, what)

    @property
    def next_s(self) -> float:
        """Return when the next callback is due; inf for never."""
        return self._heap[0][0] if self._heap else float("inf")

    def happen(self, until_s: float, then: Callable[[], None]) -> None:
        """Run every callback due by ``until_s``, and ``then`` after each."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, what = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, at_s)
            what()
            then()
