"""Places one gang: which hosts hold its ranks, and how near to each other.

A gang runs on hosts of one kind, all of its ranks or none. The placement is the smallest unit that
holds it: one host, else one domain, one rack, one zone, the fleet; among equal units the one with
the fewest slots left over. A gang on one host shares it with others; one on several hosts takes
hosts that are empty, and leaves slots free on the last one at most, unless it asks for fewer ranks
on each. Which slots are free for a gang, and when, is decided in ``admission``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.schemas import TrainingJob, Worker

Level = Literal["host", "domain", "rack", "zone", "fleet"]
_Thing = TypeVar("_Thing")
_Key = TypeVar("_Key")
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node as its agent reports it."""

    name: str
    slots: int  # ranks that it holds at once: its accelerators, 1 for a CPU host
    kind: str = "cpu"  # accelerator kind
    memory_bytes: int = 0  # of each accelerator
    domain: str = ""  # NVLink or InfiniBand domain; "": none. Domains and racks lie in one zone
    rack: str = ""
    zone: str = ""
    pool: str = "on-demand"  # or "spot"
    labels: frozenset[str] = frozenset()  # each KEY=VALUE, rack and zone among them

    def __post_init__(self) -> None:
        """Raise InvalidInput for a host without a name or with fewer than 0 slots."""
        check(bool(self.name), "a host has no name", "", "a name", "host")
        check(self.slots >= 0, "a host's slots are negative", self.slots, "0 or more", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What a job asks for: all of its ranks at once."""

    job_id: str
    team: str
    priority: int  # higher first
    queued_at: float  # seconds; when the job was first submitted (kept over preemptions)
    ranks: int
    kind: str = ""  # "": any, but all hosts of one gang are of one kind
    min_memory_bytes: int = 0
    pool: str = ""  # "": any
    labels: frozenset[str] = frozenset()  # each KEY=VALUE, that all of its hosts have
    within: Level = "fleet"  # must fit inside one of these
    ranks_per_host: int = 0  # exactly so many (the last host may hold fewer); 0: up to its slots
    training: str = ""  # of waiting gangs with the same one only one starts; "": its own

    def __post_init__(self) -> None:
        """Raise InvalidInput for values that no fleet could serve."""
        where = f"job {self.job_id}"
        check(bool(self.job_id), "a gang has no job id", "", "an id", "gang")
        check(self.ranks >= 1, "a gang needs ranks", self.ranks, "ranks >= 1", where)
        levels, per_host = f"within = {', '.join(LEVELS)}", self.ranks_per_host
        check(self.within in LEVELS, "a gang's limit is unknown", self.within, levels, where)
        check(per_host >= 0, "ranks per host are negative", per_host, "ranks_per_host >= 0", where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a gang runs: the ranks of each host, and the smallest unit that holds all of them.

    ``score`` is the share of that unit's free slots which the gang takes, above 0 and at most 1:
    at 1.0 nothing is left over, a low score is a loose fit.
    """

    hosts: Mapping[str, int]
    level: str  # host, domain, rack, zone or fleet
    score: float


def describe(gang: Gang) -> str:
    """Return what the gang asks for, for people: "8 x a100 in one rack"."""
    memory = f" with {gang.min_memory_bytes / 1e9:g} GB" if gang.min_memory_bytes else ""
    pool = f" ({gang.pool})" if gang.pool else ""
    labels = f" on nodes with {', '.join(sorted(gang.labels))}" if gang.labels else ""
    inside = "" if gang.within == "fleet" else f" in one {gang.within}"
    per_host = f", {gang.ranks_per_host} per host" if gang.ranks_per_host else ""
    return f"{gang.ranks} x {gang.kind or 'any kind'}{memory}{pool}{labels}{inside}{per_host}"


def is_kind(asked: str, kind: str) -> bool:
    """Return whether accelerators of ``kind`` are what is asked for by their name, or a part of it.

    A kind is what nvidia-smi says; labels of Kubernetes have hyphens in place of its spaces, and
    Slurm's types underscores.
    """
    asked, kind = (re.sub(r"[\s_-]+", "-", each.lower()) for each in (asked, kind))
    return asked in kind


def hosts_of(
    workers: Sequence[Worker], settings: TrainingSettings, heard_since: float = math.inf
) -> list[Host]:
    """Return the hosts that ``workers`` are which live, or were heard ``heard_since`` (seconds
    since the epoch), by their labels and inventory.

    Slots are a host's accelerators of the kind that most are of. The labels ``domain`` (of a fast
    interconnect) and ``capacity`` (spot) are the operator's.
    """
    found = []
    for worker in workers:
        if not worker.alive and worker.last_heartbeat < heard_since:
            continue
        accelerators = worker.inventory.like_cards if worker.inventory is not None else ()
        count = sum(each.count for each in accelerators)
        labels = worker.labels.others
        found.append(
            Host(
                name=worker.worker_id,
                slots=count or settings.ranks_per_node or 1,
                kind=accelerators[0].kind if accelerators else "cpu",
                memory_bytes=min((each.memory_bytes for each in accelerators), default=0),
                domain=labels.get("domain", ""),
                rack=worker.labels.rack,
                zone=worker.labels.zone,
                pool="spot" if labels.get("capacity") == "spot" else "on-demand",
                labels=_pairs(worker.labels.named),
            )
        )
    return found


def _pairs(labels: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{key}={value}" for key, value in labels.items())


def gang_of(
    job: TrainingJob, settings: TrainingSettings, hosts: Sequence[Host], training: str = ""
) -> Gang:
    """Return what a job with these settings asks admission for: spares are hosts of the gang, too,
    and one that has a checkpoint goes on with the kind of accelerator that made it. ``training``
    is the gang's."""
    asked = job.spec.resources
    spares, kind = settings.guard.spares, asked.accelerator
    if spares and (settings.ranks_per_node or max((e.slots for e in hosts), default=1)) > 1:
        spares = 0
    if kind:
        named = {host.kind for host in hosts if is_kind(kind, host.kind)}
        # A part of one kind's name means that kind; of several, the reason names what was asked.
        kind = named.pop() if len(named) == 1 else kind
    return Gang(
        job_id=job.job_id,
        team=job.spec.team,
        priority=job.spec.priority,
        queued_at=job.created_at,
        ranks=settings.ranks + spares,
        kind=job.kind or kind,
        min_memory_bytes=asked.memory_bytes,
        pool=asked.capacity,
        labels=_pairs(asked.node_labels),
        within=asked.within,
        ranks_per_host=settings.ranks_per_node,
        training=training,
    )


def check(valid: bool, what: str, got: object, wanted: str, where: str) -> None:
    """Raise InvalidInput with these parts unless ``valid``."""
    if not valid:
        raise InvalidInput(what, got=got, wanted=wanted, where=where)


Names = Sequence[str]  # of hosts
Unit = tuple[str, ...]  # a host, domain, rack, zone or the fleet; () where a host has no such label


def unit_of(host: Host, level: str) -> Unit:
    """Return the unit of ``level`` that ``host`` is in; equal labels in two zones are two units."""
    if level in ("host", "fleet"):
        return (host.name if level == "host" else level,)
    label: str = getattr(host, level)
    return (host.zone, label) if label else ()


class Demand:
    """The hosts that gangs of one shape (kind, memory, pool, labels, within, ranks per host) can
    use.

    Gangs of the same shape share it for a round, so that a round costs little a gang.
    """

    def __init__(self, hosts: Iterable[Host], gang: Gang) -> None:
        self.ranks_per_host = gang.ranks_per_host
        usable = [
            host
            for host in sorted(hosts, key=lambda host: host.name)
            if host.slots >= 1
            and gang.kind in ("", host.kind)
            and gang.pool in ("", host.pool)
            and gang.labels <= host.labels
            and host.memory_bytes >= gang.min_memory_bytes
            and unit_of(host, gang.within)
        ]
        self.hosts = {host.name: host for host in usable}
        self.slots = {host.name: host.slots for host in usable}
        self._most: dict[int, int] = {}  # slots that a host must have → ranks of the best unit
        by_kind = group(usable, lambda host: host.kind)
        levels = LEVELS[: LEVELS.index(gang.within) + 1]
        # Per kind and level up to ``within``: the names of every unit's hosts.
        self.units = {
            kind: [_units(by_kind[kind], level, gang.within) for level in levels]
            for kind in sorted(by_kind)
        }

    def widest(self) -> list[Names]:
        """Return the hosts of every unit that the gang must fit inside."""
        return [names for levels in self.units.values() for names in levels[-1].values()]

    def per_host(self, ranks: int) -> int:
        """Return how many slots a host must have for ``ranks`` of a gang; 0: any number."""
        return min(self.ranks_per_host, ranks)

    def capacity(self, names: Names, ranks: int, slots: Mapping[str, int]) -> int:
        """Return how many ranks of a gang of ``ranks`` the ``slots`` of these hosts hold."""
        per_host = self.per_host(ranks)
        if not per_host:
            return sum(map(slots.__getitem__, names))
        return per_host * sum(slots[name] >= per_host for name in names)

    def empty(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Return the free ``slots`` of the hosts that no gang is on, and 0 for the others."""
        return {name: most if slots[name] == most else 0 for name, most in self.slots.items()}

    def most(self, ranks: int, slots: Mapping[str, int]) -> int:
        """Return how many ranks the best host holds, or the empty hosts of the best unit at the
        level that the gang must fit inside."""
        empty = self.empty(slots)
        units = max((self.capacity(names, ranks, empty) for names in self.widest()), default=0)
        return max(units, max((self.on_host(name, ranks, slots) for name in self.slots), default=0))

    def on_host(self, name: str, ranks: int, slots: Mapping[str, int]) -> int:
        """Return how many ranks of a gang of ``ranks`` the host holds beside others."""
        per_host = self.per_host(ranks)
        return slots[name] if not per_host else per_host * (slots[name] >= per_host)

    def most_of_all(self, ranks: int) -> int:
        """Return how many ranks the best unit would hold if it were empty."""
        per_host = self.per_host(ranks)
        if per_host not in self._most:
            self._most[per_host] = self.most(ranks, self.slots)
        return self._most[per_host]

    def place(self, ranks: int, slots: Mapping[str, int]) -> Placement | None:
        """Return where ``ranks`` fit in the free ``slots`` of each host, or None."""
        on_one = self.per_host(ranks) in (0, ranks)
        hosts = [
            (slots[name], host.kind, name)
            for name, host in self.hosts.items()
            if on_one and slots[name] >= ranks
        ]
        if hosts:
            free, _, name = min(hosts)
            return Placement(hosts={name: ranks}, level="host", score=round(ranks / free, 3))
        slots = self.empty(slots)
        if max((self.capacity(each, ranks, slots) for each in self.widest()), default=0) < ranks:
            return None
        for number, level in enumerate(LEVELS[1:], start=1):
            fits = [
                (sum(map(slots.__getitem__, names)), kind, unit)
                for kind, levels in self.units.items()
                for unit, names in levels[number].items()
                if self.capacity(names, ranks, slots) >= ranks
            ]
            if fits:
                free, kind, unit = min(fits)
                held = self._fill(self.units[kind][number][unit], number, ranks, slots)
                score = round(ranks / free, 3)
                return Placement(hosts=dict(sorted(held.items())), level=level, score=score)
        raise AssertionError("a unit without enough slots was chosen")

    def _fill(
        self, names: Names, number: int, ranks: int, slots: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the ranks of each host: few units of every level below, the last one tight."""
        if number == 0:
            return {names[0]: ranks}
        level = LEVELS[number - 1]  # a host without a label there is a unit alone
        parts = [
            (self.capacity(part, ranks, slots), unit, part)
            for unit, part in group(
                names, lambda name: unit_of(self.hosts[name], level) or ("", "", name)
            ).items()
        ]
        parts.sort(key=lambda part: (-part[0], part[1]))
        held: dict[str, int] = {}
        for at, (holds, _, part) in enumerate(parts):
            if holds < ranks:
                held |= self._fill(part, number - 1, holds, slots) if holds else {}
                ranks -= holds
                continue
            tightest = min(each for each in parts[at:] if each[0] >= ranks)
            return held | self._fill(tightest[2], number - 1, ranks, slots)
        raise AssertionError("a unit without enough slots was chosen")


def _units(hosts: Iterable[Host], level: str, within: str) -> dict[Unit, Names]:
    """Return the hosts of every unit of ``level``; those without such a label are left out.

    A domain may span racks: the part of it in each unit of ``within`` is a unit.
    """
    labelled = [host for host in hosts if unit_of(host, level)]
    units = group(labelled, lambda host: (*unit_of(host, level), *unit_of(host, within)))
    return {unit: tuple(host.name for host in units[unit]) for unit in sorted(units)}


def group(things: Iterable[_Thing], key: Callable[[_Thing], _Key]) -> dict[_Key, list[_Thing]]:
    """Return ``things`` by their ``key``, in their order."""
    found: dict[_Key, list[_Thing]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return found
