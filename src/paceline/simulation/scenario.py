"""Inputs of a simulation: the fleet, the model, the delays of software and disks, the faults."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from paceline.coordinator import CoordinatorSettings
from paceline.errors import InvalidInput
from paceline.manifest import Chunk, FileEntry, Manifest, choose_sizes
from paceline.schemas import Labels, Record, Topology

# Faults are seeded, or read from a schedule file, for example one recorded on real machines.
#
# A schedule file is a JSON list of objects: ``{"at_s": 12.5, "worker": "node-3", "kind": "kill"}``.
#
# kind     what happens
# kill     the process dies; its peers see a reset at once (restart_s: it restarts after so long)
# silence  the host vanishes: it sends and receives nothing, and its peers see no reset
# freeze   the process stops for ``for_s`` seconds and continues (0: it never does, like silence)
# rate     its link carries ``value`` Mbit/s from then on
# corrupt  the share ``value`` of the pieces that it sends from then on is corrupt

Kind = Literal["kill", "silence", "freeze", "rate", "corrupt"]
MOST_FAULTS = 100_000


class Fault(Record):
    """One fault, ``at_s`` seconds after the plan was accepted."""

    at_s: float = Field(ge=0, lt=1e9)
    worker: str
    kind: Kind
    for_s: float = 0.0
    restart_s: float | None = None
    value: float = 0.0


_SCHEDULE = TypeAdapter(Annotated[tuple[Fault, ...], Field(max_length=MOST_FAULTS)])


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the schedule in ``path``; raises InvalidInput."""
    try:
        faults = _SCHEDULE.validate_python(json.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
        raise InvalidInput(
            "cannot read the fault schedule",
            got=_said(error)[:300],
            wanted='a JSON list such as [{"at_s": 1, "worker": "node-0", "kind": "kill"}], of at '
            f"most {MOST_FAULTS} faults",
            where=path,
        ) from error
    return faults


def _said(error: Exception) -> str:
    """Return one line that names the bad fault, its field and the reason."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors(include_url=False)[0]
    line, *field = first["loc"] or ("",)
    where = f"fault {line + 1}" if isinstance(line, int) else "the file"
    return " ".join([f"{where}:", *map(str, field), first["msg"]])


def seeded_deaths(
    names: list[str], *, share: float, within_s: float, random: Random
) -> list[Fault]:
    """Return kill and silence faults for ``share`` of the workers, uniform over ``within_s``."""
    victims = random.sample(names, min(len(names) - 1, round(share * len(names))))
    return [
        Fault(
            at_s=random.random() * within_s,
            worker=victim,
            kind="silence" if random.random() < SILENT else "kill",
        )
        for victim in victims
    ]


MOST_WORKERS = 20_000  # limit of one deployment
MBIT = 1e6 / 8  # bytes a second
BEATS_PER_SECOND = 1000.0
SILENT = 0.2  # share of deaths without a reset (fault kind ``silence``)
STRAGGLERS_RATE = 0.2  # of a slow worker's link, as a share of the others'
USUAL_RACK = 32  # workers


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Delays that software and disks add, in seconds; measured on agents over loopback."""

    latency_s: float = 0.0005  # until a peer sees a reset
    connect_s: float = 0.002  # a new stream: connection, handshake, first request
    hop_s: float = 0.001  # from a piece's last byte to its first byte on the next hop
    group_s: float = 1.0  # verified pieces become durable together,
    commit_s: float = 0.02  # after an fsync of this length
    publish_s: float = 0.02  # fsync and rename of a whole version
    call_s: float = 0.005  # one REST call,
    calls_per_second: float = 1000.0  # when all workers request lanes at once
    prepare_s: float = 0.01  # opening and preallocating the files
    tick_s: float = 0.15  # interval of the coordinator's ticks


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One deployment to simulate. Rates are goodput in Mbit/s."""

    workers: int
    size_bytes: int
    link_mbit: float
    external_mbit: float | None = None  # None: as one worker's link
    racks: int = 0  # of equal size; 0: 32 workers each
    oversubscription: float = 1.0  # a rack's uplink carries its hosts' links divided by this
    topology: Topology = Topology.AUTO
    piece_bytes: int = 0  # 0: chosen from the size
    chunk_bytes: int = 0
    disk_mbit: float | None = None
    seed: int = 0
    fail: float = 0.0  # share of workers that die for good, uniformly over the transfer
    corrupt: float = 0.0  # share of transfers of pieces that arrive corrupt
    straggle: float = 0.0  # share of workers whose link is slow from the beginning
    faults: tuple[Fault, ...] = ()
    timing: Timing = Timing()
    # None: the default, with a beat that grows with the fleet.
    settings: CoordinatorSettings | None = None
    coalesce_pieces: int = 0  # pieces reported to a session at once; 0: by the fleet's size
    step_s: float = -1.0  # least interval of network updates; negative: by the fleet's size

    def __post_init__(self) -> None:
        _between("workers", self.workers, 1, MOST_WORKERS)
        _between("model size in bytes", self.size_bytes, 1, 1 << 60)
        _between("link in Mbit/s", self.link_mbit, 1e-6, 1e9)
        _between("number of racks", self.racks, 0, MOST_WORKERS)
        _between("oversubscription", self.oversubscription, 1, 1e6)
        for name in ("fail", "corrupt", "straggle"):
            _between(f"share that --{name} names", getattr(self, name), 0, 1)
        names = set(self.names())
        for fault in self.faults:
            if fault.worker not in names:
                raise InvalidInput(
                    "a fault names no worker of this fleet",
                    got=fault.worker,
                    wanted=f"{self.name(0)} to {self.name(self.workers - 1)}",
                )

    @property
    def coordinator(self) -> CoordinatorSettings:
        """Return the coordinator's timeouts and limits.

        A thousand heartbeats a second are less than half of what one core was measured to handle.
        """
        if self.settings is not None:
            return self.settings
        seconds = 4 * self.size_bytes / min(self.link_bytes_s, self.external_bytes_s)
        return CoordinatorSettings(
            beats_per_second=BEATS_PER_SECOND,
            deadline_s=600.0 + seconds,
            external_mbit=self.external_mbit,  # plans use the simulated network's figures
            oversubscription=self.oversubscription,
        )

    @property
    def link_bytes_s(self) -> float:
        """Return the capacity of one NIC each way."""
        return self.link_mbit * MBIT

    @property
    def external_bytes_s(self) -> float:
        """Return the rate of the origin."""
        return (self.external_mbit or self.link_mbit) * MBIT

    @property
    def bound_s(self) -> float:
        """Return the least time in which any worker can finish."""
        return self.size_bytes / min(self.link_bytes_s, self.external_bytes_s)

    def name(self, number: int) -> str:
        return f"node-{number:0{len(str(self.workers - 1))}d}"

    def names(self) -> list[str]:
        return [self.name(number) for number in range(self.workers)]

    @property
    def rack_count(self) -> int:
        return min(self.racks or -(-self.workers // USUAL_RACK), self.workers)

    def labels(self, number: int) -> Labels:
        """Return a worker's host and rack; racks are filled evenly, one after the other."""
        rack = number * self.rack_count // self.workers
        name = f"rack-{rack}" if self.rack_count > 1 else ""
        return Labels(host=self.name(number), rack=name)

    def manifest(self) -> Manifest:
        """Return a manifest of this size whose bytes exist nowhere."""
        sizes = choose_sizes(
            self.size_bytes,
            self.link_mbit,
            piece_bytes=self.piece_bytes,
            chunk_bytes=self.chunk_bytes,
        )
        return paper_manifest(self.size_bytes, sizes.piece_bytes, sizes.chunk_bytes)


def paper_manifest(size_bytes: int, piece_bytes: int, chunk_bytes: int) -> Manifest:
    """Return the manifest of one file that is never read; its digests are made up."""
    pieces = tuple(
        hashlib.sha256(b"%d" % piece).hexdigest() for piece in range(-(-size_bytes // piece_bytes))
    )
    chunk_bytes = max(1, round(chunk_bytes / piece_bytes)) * piece_bytes
    chunks = tuple(
        Chunk(number, at, min(chunk_bytes, size_bytes - at), pieces[number])
        for number, at in enumerate(range(0, size_bytes, chunk_bytes))
    )
    return Manifest(
        model_id="simulated",
        version="v1",
        piece_bytes=piece_bytes,
        chunk_bytes=chunk_bytes,
        files=(FileEntry("weights.bin", size_bytes, "0" * 64, pieces),),
        chunks=chunks,
    )


def _between(what: str, got: float, least: float, most: float) -> None:
    if not least <= got <= most:
        raise InvalidInput(f"bad {what}", got=got, wanted=f"{least:g} to {most:g}")
