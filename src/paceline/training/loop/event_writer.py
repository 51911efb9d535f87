"""Rank events on standard output: one JSON line per event, heartbeats, and step reports.

A rank writes RankEvent lines and a heartbeat (phase, step, seconds since) to its launcher; rank 0
reports every step, the others at most one per ``FOLLOWER_REPORT_S``. Text printed by other code in
the process, for instance a user's model, becomes "said" events or goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import InvalidInput
from paceline.schemas import RankEvent

if TYPE_CHECKING:
    from paceline.storage import ObjectStore
    from paceline.training.checkpoint import Checkpointer
    from paceline.training.loop.loop import Progress, StepReport
    from paceline.training.metrics import Exporter


LOOPBACK = "127.0.0.1"
HEARTBEAT_S = 0.5
MAX_PRINTED_CHARACTERS = 500  # per printed line; longer lines are cut
MAX_PRINTED_LINES_PER_MINUTE = 120  # printed lines per rank; further lines are only counted


@dataclass(frozen=True)
class RankIdentity:
    """This rank's identity and rendezvous address, as set by the launcher."""

    rank: int
    world_size: int
    master_host: str
    master_port: int
    attempt: int
    worker_id: str
    host: str = LOOPBACK  # address at which other ranks reach this one
    gang_key: str = field(default="", repr=False)  # secret of a gang with a parameter server

    @classmethod
    def from_environment(cls) -> RankIdentity:
        """Return the identity from the environment; raises InvalidInput for a missing variable."""
        if "PACELINE_SPARE" in os.environ:  # a spare is assigned its rank later
            os.environ.setdefault("RANK", "0")
            os.environ.setdefault("WORLD_SIZE", "1")
        try:
            return cls(
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                master_host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
                master_port=int(os.environ.get("MASTER_PORT", "0")),
                attempt=int(os.environ.get("PACELINE_ATTEMPT", "1")),
                worker_id=os.environ["PACELINE_WORKER_ID"],
                host=os.environ.get("PACELINE_HOST", LOOPBACK),
                gang_key=os.environ.get("PACELINE_GANG_KEY", ""),
            )
        except (KeyError, ValueError) as error:
            raise InvalidInput(
                "rank was started without its environment",
                got=repr(error),
                wanted="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PACELINE_WORKER_ID",
            ) from error


class EventWriter:
    """Writes this rank's events, one line each, and its heartbeat: phase, step, seconds since.

    The heartbeat runs in a thread: a frozen process stops sending, while a process with a hung main
    thread sends heartbeats without progress. The launcher distinguishes the two.
    """

    _phase, _step, _since = "loading", 0, 0.0

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._out = sys.stdout

    def capture_stdout(self) -> None:
        """Reserve standard output for events, so that other output cannot split a line.

        Python's prints become "said" events; C-level writes go to standard error.
        """
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = StdoutCapture(self)

    def start_heartbeats(self) -> None:
        """Start the heartbeat thread."""
        threading.Thread(target=self._send_heartbeats, name="pulse", daemon=True).start()

    def take(self, identity: RankIdentity) -> None:
        """Use ``identity`` in all further events (a spare that was assigned a rank)."""
        self._identity = identity

    def emit(self, event: Any, step: int = 0, **data: object) -> None:
        """Write one event."""
        identity = self._identity
        record = RankEvent(
            event=event, rank=identity.rank, attempt=identity.attempt, step=step, data=data
        )
        self._write(record.model_dump_json())

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Set the current phase; ``step`` records a completed step."""
        self._phase, self._since = phase, time.monotonic()
        if step is not None:
            self._step = step

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the phase for the duration of the ``with``, then restore the previous one."""
        before = self._phase
        self.set_phase(name)
        try:
            yield
        finally:
            self.set_phase(before)

    def _send_heartbeats(self) -> None:
        while True:
            since = time.monotonic() - self._since
            line = {"event": "beat", "phase": self._phase, "step": self._step, "since_s": since}
            self._write(json.dumps(line, separators=(",", ":")))
            time.sleep(HEARTBEAT_S)

    def _write(self, line: str) -> None:
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()


class StdoutCapture(io.TextIOBase):
    """Replaces ``sys.stdout`` in a rank: each printed line becomes an event, rate-limited."""

    def __init__(self, events: EventWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._lock = threading.Lock()
        self._line = ""
        self._since, self._reported, self._suppressed = clock(), 0, 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Buffer ``text``; emit the complete lines."""
        with self._lock:
            *lines, rest = (self._line + text).split("\n")
            self._line = rest[:MAX_PRINTED_CHARACTERS]
            for line in lines:
                self._emit_line(line[:MAX_PRINTED_CHARACTERS])
        return len(text)

    def close(self) -> None:
        """Emit the incomplete last line."""
        with self._lock:
            rest, self._line = self._line, ""
            if rest:
                self._emit_line(rest)
        super().close()

    def _emit_line(self, line: str) -> None:
        now = self._clock()
        if now - self._since >= 60.0:
            if self._suppressed:
                self._events.emit("said", text=f"({self._suppressed} more lines were printed)")
            self._since, self._reported, self._suppressed = now, 0, 0
        if self._reported >= MAX_PRINTED_LINES_PER_MINUTE:
            self._suppressed += 1
        elif line.strip():
            self._reported += 1
            self._events.emit("said", text=line)


FOLLOWER_REPORT_S = 0.5  # minimum time between step reports of ranks other than 0


class QuarantineReporter:
    """Tracks which quarantined shards and samples were reported: each is reported once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def has_new(self, quarantined: Collection[str]) -> bool:
        """Return whether ``quarantined`` has unreported entries."""
        return len(quarantined) > len(self._reported)

    def new_in(self, quarantined: Collection[str]) -> dict[str, Any]:
        """Return event data for the new entries, with reasons if ``quarantined`` is a mapping."""
        why = dict(quarantined) if isinstance(quarantined, Mapping) else {}  # threads add to it
        new = sorted(set(why or quarantined) - self._reported)
        if not new:
            return {}
        self._reported.update(new)
        return {
            "quarantined_shards": new,
            "quarantined_why": {each: why[each] for each in new if each in why},
        }


class HasQuarantine(Protocol):
    """A source of data: the shards and samples that it put in quarantine."""

    @property
    def quarantined(self) -> Collection[str]: ...


class StepReporter:
    """Reports every step of rank 0 and a sample of the other ranks' steps.

    Each step also updates the Prometheus exporter.
    """

    def __init__(
        self,
        events: EventWriter,
        saver: Checkpointer,
        progress: Progress,
        rank: int,
        stream: HasQuarantine,
        exporter: Exporter,
        store: ObjectStore,
    ) -> None:
        self._store = store
        self._exporter = exporter
        self._events = events
        self._saver = saver
        self._progress = progress
        self._rank = rank
        self._stream = stream
        self._reported_at = 0.0
        self._alerts = 0
        self._quarantine_reporter = QuarantineReporter()

    def __call__(self, report: StepReport) -> None:
        self._events.set_phase("step", report.step)
        self._exporter.take(report, len(self._stream.quarantined), self._saver.expected_s)
        now = time.monotonic()
        rare = bool(report.alerts) or self._quarantine_reporter.has_new(self._stream.quarantined)
        if self._rank != 0 and now - self._reported_at < FOLLOWER_REPORT_S and not rare:
            return
        self._reported_at = now
        data = report.data() | {
            "waited_s": self._progress.data_wait_s,
            "stalled_s": self._progress.stall_s,
            "checkpoints_put_off": self._saver.postponed,
            "read_bytes": self._store.read_bytes,
        }
        data |= self._quarantine_reporter.new_in(self._stream.quarantined)
        if raised := self._saver.alerts[self._alerts :]:
            self._alerts += len(raised)
            data["checkpoint_alerts"] = [each.message for each in raised]
        self._events.emit("step", report.step, **data)
        self.report_saved()

    def report_saved(self) -> None:
        """Report newly committed checkpoints (rank 0 only)."""
        for ref in self._saver.report() if self._rank == 0 else ():
            self._exporter.saved()
            self._events.emit(
                "checkpoint", ref.step, url=ref.url, digest=ref.digest, bytes=ref.bytes
            )
