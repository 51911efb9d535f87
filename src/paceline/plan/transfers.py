"""Turns trees into transfers: which source each worker takes which chunks from.

One transfer or more per worker and stripe. Slow and quarantined workers are attached where links
have free slots, and chunks that other workers already hold are taken from them instead of from the
origin or across racks: rarest first, then the least loaded, then the nearest holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.plan.inputs import ModelLayout, PlanWorker, Standing, Stripe, rack_of
from paceline.plan.trees import NO_PARENT, ORIGIN, SLOW_LINK, Trees, WorkerLine

MAX_SPLIT_LANES = 16  # lanes that one stripe of one worker may be split into
SPLIT_DIVISOR = 16  # less than 1/16 of a transfer is not taken from the own rack
MAX_OTHER_HOLDERS = 3  # spare holders of a transfer
_ROOM = 1e-6


@dataclass(slots=True)
class Transfer:
    """``reader`` takes chunks ``first`` to ``last`` of ``stripe`` from ``source``.

    Both are places (``source`` may be ORIGIN); ``size`` is the bytes of it that the reader lacks.
    """

    reader: int
    source: int
    stripe: int
    first: int
    last: int
    size: int
    from_holder: bool = False  # the source held it before: the path begins at the source
    others: tuple[int, ...] = ()  # other places that held it before


def nearness(one: PlanWorker, other: PlanWorker) -> int:
    """Return how close two workers are: 3 host, 2 rack, 1 zone, 0 different zones."""
    ours, theirs = one.labels, other.labels
    if ours.zone != theirs.zone:
        return 0
    if ours.rack != theirs.rack:
        return 1
    return 3 if ours.host and ours.host == theirs.host else 2


def attach_leaves(line: WorkerLine, trees: Trees) -> None:
    """Choose the sources of every leaf (slow, quarantined) in ``trees``, in place.

    Fastest first, each from a worker whose link has free slots: the last of the line, whose
    children need nothing; where there are none, from a faster leaf.
    """
    leaves = [place for place in line.leaves if not line.workers[place].complete]
    if not leaves:
        return
    room = _free_slots(line, trees)
    pool = [place for place in (*reversed(line.core), *line.beside) if room.get(place, 0) > _ROOM]
    pool.sort(key=lambda place: room[place] < 1)  # whole slots first
    stripes = len(trees.up)
    for leaf in leaves:
        worker = line.workers[leaf]
        share = leaf_link_share(line, worker) * trees.slots / stripes
        taken: list[int] = []
        for stripe in range(stripes):
            source = _place_with_room(line, worker, share, pool, room, taken)
            if source is None:  # every link is full: take the least loaded
                source = max(room, key=lambda place: (room[place], place), default=None)
            if source is None:
                trees.up[stripe][leaf] = ORIGIN
                continue
            trees.up[stripe][leaf] = source
            room[source] -= share
            taken.append(source)
        pool = [place for place in pool if room[place] > _ROOM]
        if worker.standing is not Standing.QUARANTINED:
            room[leaf] = share * stripes
            pool.append(leaf)


def _free_slots(line: WorkerLine, trees: Trees) -> dict[int, float]:
    """Return the free slots of every place that may feed others; a complete worker uses none."""
    room = {
        place: float(trees.slots)
        for place in (*line.core, *line.beside)
        if line.feeds(place) and (place >= line.length or trees.up[0][place] != NO_PARENT)
    }
    for up in trees.up:
        for place, source in enumerate(up):
            if source >= 0 and source in room and not line.workers[place].complete:
                room[source] -= 1
    return room


def leaf_link_share(line: WorkerLine, worker: PlanWorker) -> float:
    """Return which fraction of a whole link a leaf is expected to take."""
    by_link = min(1.0, worker.link_mbit / line.link_mbit)
    return min(by_link, SLOW_LINK) if worker.standing is Standing.TAIL else by_link


def _place_with_room(
    line: WorkerLine,
    worker: PlanWorker,
    share: float,
    pool: Sequence[int],
    room: dict[int, float],
    taken: Iterable[int],
) -> int | None:
    """Return a place with ``share`` free: the nearest of the first 16, places in ``taken`` last."""
    able = []
    for place in pool:
        if room[place] >= share - _ROOM:
            able.append(place)
            if len(able) == 16:
                break
    known = set(taken)
    return max(
        able,
        key=lambda place: (place not in known, nearness(line.workers[place], worker)),
        default=None,
    )


class TransferBuilder:
    """Builds the transfers of one plan."""

    def __init__(
        self,
        line: WorkerLine,
        trees: Trees,
        layout: ModelLayout,
        stripes: Sequence[Stripe],
        *,
        scarce: bool = False,
        from_peers: bool = False,
    ) -> None:
        """``scarce``: the origin budget does not cover everything, so slow and quarantined workers
        are sources as well. ``from_peers``: chunks that others in the rack hold need not cross into
        it.
        """
        self._line = line
        self._trees = trees
        self._cargo = layout
        self._stripes = stripes
        self._from_peers = from_peers
        self.missing = [layout.missing(worker, stripes) for worker in line.workers]
        self._room = _free_slots(line, trees)
        self._racks = [rack_of(worker) for worker in line.workers]
        # Places whose holdings may be used; the slow and quarantined only where the budget is
        # scarce.
        self._complete: list[int] = []
        self._partial: list[int] = []
        self._complete_in: dict[tuple[str, str], list[int]] = {}
        self._partial_in: dict[tuple[str, str], list[int]] = {}
        self._held_in: dict[tuple[str, str], set[int]] = {}
        self._held: set[int] = set()
        for place, worker in enumerate(line.workers):
            good, rack = line.feeds(place), self._racks[place]
            if line.is_gone(place) or not (good or scarce):
                continue
            if worker.complete:
                self._complete.append(place)
                # A worker that became complete in the line no longer changes the lanes of others.
                if good and place >= line.length:
                    self._complete_in.setdefault(rack, []).append(place)
            elif worker.held_chunks:
                self._partial.append(place)
                self._held |= worker.held_chunks
                if good:
                    self._partial_in.setdefault(rack, []).append(place)
                    self._held_in.setdefault(rack, set()).update(worker.held_chunks)
        self._burden: dict[int, int] = {}  # planned bytes that each place sends

    def transfers(self) -> list[Transfer]:
        """Return the transfers of every stripe, each worker's after its source's."""
        made = [
            Transfer(place, self._trees.up[number][place], number, stripe.first, stripe.last, size)
            for number, stripe in enumerate(self._stripes)
            for place in self._trees.top_down(number)
            if not (self._line.workers[place].complete or self._line.is_gone(place))
            for size in (self.missing[place][number],)
        ]
        for transfer in made:
            if transfer.source >= 0:
                transfer.from_holder = self._line.workers[transfer.source].complete
                self._burden[transfer.source] = self._burden.get(transfer.source, 0) + transfer.size
        # Readers of the origin choose complete workers first, then transfers that cross racks.
        for transfer in sorted(made, key=lambda transfer: transfer.source != ORIGIN):
            if transfer.source == ORIGIN or (transfer.size and self._crosses(transfer)):
                self._from_complete(transfer)
        return [
            part
            for transfer in made
            for part in (
                self._from_partial(transfer)
                if transfer.size
                and (transfer.source == ORIGIN or (self._from_peers and self._crosses(transfer)))
                else (transfer,)
            )
        ]

    def _crosses(self, transfer: Transfer) -> bool:
        return self._racks[transfer.source] != self._racks[transfer.reader]

    def _from_complete(self, transfer: Transfer) -> None:
        """Move ``transfer`` to a complete worker: any instead of the origin, one in the same rack
        instead of a crossing.
        """
        holder = self._complete_holder(transfer.reader, transfer.source == ORIGIN)
        if holder is None:
            return
        if transfer.source in self._room:
            self._room[transfer.source] += 1
        self._room[holder] = self._room.get(holder, 0.0) - 1
        transfer.source, transfer.from_holder = holder, True

    def _from_partial(self, transfer: Transfer) -> list[Transfer]:
        """Return ``transfer`` split so that held chunks come from their holders: any instead of the
        origin, the same rack's instead of a crossing.
        """
        at_origin = transfer.source == ORIGIN
        rack = self._racks[transfer.reader]
        held = self._held if at_origin else self._held_in.get(rack, set())
        own = self._line.workers[transfer.reader].held_chunks
        wanted = [
            chunk
            for chunk in range(transfer.first, transfer.last + 1)
            if chunk in held and chunk not in own
        ]
        # In mid-transfer neighbours are ahead by a chunk here and there: taking each from another
        # one loads links that are full, and gives every rack new lanes with every plan.
        few = not at_origin and len(wanted) * SPLIT_DIVISOR < transfer.last - transfer.first + 1
        if not wanted or few:
            return [transfer]
        return self._split(transfer, wanted, self._partial if at_origin else self._partial_in[rack])

    def _complete_holder(self, reader: int, at_origin: bool) -> int | None:
        worker = self._line.workers[reader]
        if at_origin:
            found = self._complete
        else:
            found = [
                place
                for place in self._complete_in.get(self._racks[reader], ())
                if self._room.get(place, 0.0) >= 1 - _ROOM
            ]
        return min(
            found,
            key=lambda place: (
                self._line.out[place],
                self._room.get(place, 0.0) < 1 - _ROOM,
                -nearness(worker, self._line.workers[place]),
                -self._room.get(place, 0.0),
                place,
            ),
            default=None,
        )

    def _split(
        self, transfer: Transfer, wanted: Sequence[int], holders: Sequence[int]
    ) -> list[Transfer]:
        """Return ``transfer`` cut into runs of chunks: some from holders, the rest as before."""
        workers = self._line.workers
        by_chunk = {
            chunk: tuple(
                place
                for place in holders
                if chunk in workers[place].held_chunks and place != transfer.reader
            )
            for chunk in wanted
        }
        runs: list[tuple[int, int, tuple[int, ...]]] = []
        for chunk in wanted:
            if runs and runs[-1][1] == chunk - 1 and runs[-1][2] == by_chunk[chunk]:
                runs[-1] = (runs[-1][0], chunk, runs[-1][2])
            else:
                runs.append((chunk, chunk, by_chunk[chunk]))
        runs = [run for run in runs if run[2]]
        longest = sorted(runs, key=lambda run: (run[0] - run[1], run[0]))[: MAX_SPLIT_LANES // 2]
        reader = workers[transfer.reader]
        cuts = []
        for first, last, able in sorted(longest, key=lambda run: (len(run[2]), run[0])):
            size = self._cargo.size_of(first, last)
            holder = min(
                able,
                key=lambda place: (
                    self._line.out[place],
                    self._burden.get(place, 0),
                    -nearness(reader, workers[place]),
                    place,
                ),
            )
            self._burden[holder] = self._burden.get(holder, 0) + size
            others = tuple(place for place in able if place != holder)[:MAX_OTHER_HOLDERS]
            cuts.append(
                Transfer(transfer.reader, holder, transfer.stripe, first, last, size, True, others)
            )
        return self._around(transfer, sorted(cuts, key=lambda cut: cut.first))

    def _around(self, transfer: Transfer, cuts: Sequence[Transfer]) -> list[Transfer]:
        """Return ``cuts`` and the parts of ``transfer`` between them, in order."""
        left = max(0, transfer.size - sum(cut.size for cut in cuts))
        own = self._line.workers[transfer.reader].held_chunks
        made: list[Transfer] = []
        at = transfer.first
        for stop, cut in [*((cut.first, cut) for cut in cuts), (transfer.last + 1, None)]:
            if at < stop:
                lacking = sum(self._cargo.sizes[n] for n in range(at, stop) if n not in own)
                size = min(left, lacking)
                left -= size
                made.append(
                    Transfer(transfer.reader, transfer.source, transfer.stripe, at, stop - 1, size)
                )
            if cut is not None:
                made.append(cut)
                at = cut.last + 1
        return made
