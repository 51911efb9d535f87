"""The driver: gives the state machine the time, commits what it wants kept, lets its answers out.

One lock owns the state. Whatever cannot be committed is not answered: the caller gets an error that
says "again", and the state is read back from the file. It decides nothing itself and knows no HTTP.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from paceline.coordinator.bell import Bell
from paceline.coordinator.callers import audited
from paceline.coordinator.messages import (
    Activate,
    Answer,
    Cancel,
    Create,
    Event,
    KeepPlan,
    Observed,
    Tick,
)
from paceline.coordinator.ring import RING_EVENTS, EventRing
from paceline.coordinator.settings import Patience
from paceline.coordinator.state import CoordinatorState
from paceline.coordinator.store import CoordinatorStore
from paceline.coordinator.tokens import TokenBook
from paceline.errors import PacelineError, ServiceUnavailable, StaleEpoch
from paceline.manifest import Manifest
from paceline.wire import digest_of
from paceline.wire.calls import CreatedDeployment, CreateDeployment, EventList
from paceline.wire.events import Event as Told
from paceline.wire.events import EventName
from paceline.wire.records import StageRecord

log = logging.getLogger(__name__)

TICK_S = 0.15
STARVED_S = 5.0  # ticks this late mean that nobody decides anything
CREATIONS_AT_ONCE = 8  # each reads a manifest from the origin and holds a thread meanwhile

Read = TypeVar("Read")


class Coordinator:
    """The control plane of one fleet, without its REST."""

    def __init__(
        self,
        path: Path,
        *,
        fetch_manifest: Callable[[str], Manifest],
        patience: Patience | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._fetch_manifest = fetch_manifest
        self._patience = patience or Patience()
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.Lock()
        self._creations = threading.BoundedSemaphore(CREATIONS_AT_ONCE)
        self._store = CoordinatorStore(path)
        self.leader_epoch = self._store.leader_epoch
        self._state = self._restored()
        self._ring = EventRing(self._store.recent_events(RING_EVENTS))
        self._trouble: PacelineError | None = None  # why nothing can be committed, if so
        self._bell = Bell()
        self._ticked_s = monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tick_on, name="coordinator-tick", daemon=True)

    def start(self) -> None:
        """Begin to notice the passing of time."""
        self._thread.start()

    def stop(self) -> None:
        """Stop deciding and let the file go."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        with self._lock:
            self._store.close()

    @property
    def stopping(self) -> bool:
        """Return whether the server wants to stop, so that long polls should answer now."""
        return self._stopping.is_set()

    def end_waits(self) -> None:
        """Have long polls answer now, because the server wants to stop."""
        self._stopping.set()
        self._bell.ring()

    def handle(self, event: Event) -> BaseModel | None:
        """Take one event to its end: decided, committed, told; return its answer.

        Raises what the state refuses with, and ServiceUnavailable where nothing can be committed.
        """
        with self._lock:
            self._require_usable()
            effects = self._state.handle(event, self._monotonic())
            try:
                told = self._store.commit(audited(effects, self._wall()))
            except PacelineError as error:
                raise self._undo(error) from error
            self._ring.extend(told)
        asked = isinstance(event, Activate | Cancel)
        if asked or any(isinstance(each, KeepPlan) for each in effects):
            self._bell.ring()
        for each in told:
            _log_event(each.name, each.deployment_id, each.worker_id, each.data)
        return next((each.record for each in effects if isinstance(each, Answer)), None)

    def read(self, question: Callable[[CoordinatorState], Read]) -> Read:
        """Return what ``question`` finds in the state; it must not change anything."""
        with self._lock:
            self._require_usable()
            return question(self._state)

    def now(self) -> float:
        """Return the wall's time, for the ``at`` of events."""
        return self._wall()

    def create(self, call: CreateDeployment, key: str | None) -> CreatedDeployment:
        """Create a deployment, or return the one that this key already made."""
        body_digest = digest_of(call)
        known = self.read(lambda state: state.known_key(key, body_digest))
        if known is not None:
            return known
        if not self._creations.acquire(blocking=False):
            raise ServiceUnavailable(
                "too many deployments are being created", wanted=f"at most {CREATIONS_AT_ONCE}"
            )
        try:
            manifest = self._fetch_manifest(call.source_url)
        finally:
            self._creations.release()
        deployment_id = time.strftime("dep-%Y%m%d-%H%M%S-", time.gmtime(self._wall()))
        answer = self.handle(
            Create(
                deployment_id=deployment_id + secrets.token_hex(4),
                call=call,
                manifest=manifest,
                key=key,
                body_digest=body_digest,
                at=self._wall(),
            )
        )
        assert isinstance(answer, CreatedDeployment)
        return answer

    def cancel(self, deployment_id: str) -> None:
        """Decide the cancel; ``unstopped`` tells who has yet to confirm it."""
        self.handle(Cancel(deployment_id=deployment_id, at=self._wall()))

    def events(self, after: int) -> EventList:
        """Return the events after number ``after``."""
        return self._ring.after(after)

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        """Return the ledger's record, or None."""
        with self._lock:
            return self._store.stage(stage, input_digest)

    def keep_stage(self, record: StageRecord) -> StageRecord:
        """Put a record into the ledger."""
        data: dict[str, object] = {
            "stage": record.stage,
            "run_id": record.run_id,
            "seconds": record.seconds,
            "output_digest": record.output_digest,
        }
        told = Observed(EventName.STAGE_FINISHED, self._wall(), None, None, data)
        with self._lock:
            self._require_usable()
            try:
                self._ring.extend(self._store.keep_stage(record, told))
            except PacelineError as error:
                raise self._undo(error) from error
        return record

    def tell(self, observed: Sequence[Observed]) -> None:
        """Commit rows of the history that change nothing else."""
        with self._lock:
            self._require_usable()
            try:
                self._ring.extend(self._store.commit(observed))
            except PacelineError as error:
                raise self._undo(error) from error

    def history(self, **question: Any) -> list[Told]:
        """Return what the audit history has; see ``Audit.query``."""
        return self._store.history(**question)

    @property
    def tokens(self) -> TokenBook:
        """Return the tokens; they may be read without a lock."""
        return self._state.tokens

    @property
    def bell(self) -> Bell:
        """Return what rings when there may be something new for agents to do."""
        return self._bell

    def check_ready(self) -> None:
        """Raise ServiceUnavailable where this process cannot decide or commit."""
        with self._lock:
            self._require_usable()
        late_s = self._monotonic() - self._ticked_s
        if late_s > STARVED_S:
            raise ServiceUnavailable(
                "the coordinator's clock thread is late", got=f"{late_s:.1f} s"
            )

    def _tick_on(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self.handle(Tick(at=self._wall()))
            except PacelineError as error:
                log.warning("tick failed: %s", error)
            except Exception:
                # A defect must not silence the clock: say so each time, and go on deciding.
                log.exception("tick failed")
            self._ticked_s = self._monotonic()

    def _restored(self) -> CoordinatorState:
        now_s = self._monotonic()
        return CoordinatorState.restore(
            self._store.load(now_s), now_s, self._patience, leader_epoch=self.leader_epoch
        )

    def _require_usable(self) -> None:
        if self._trouble is None:
            return
        if isinstance(self._trouble, StaleEpoch):
            raise _again(self._trouble) from self._trouble
        # The state ran ahead of what could be kept: begin again from what was.
        self._state = self._restored()
        self._trouble = None

    def _undo(self, error: PacelineError) -> ServiceUnavailable:
        self._trouble = error
        log.error("nothing was committed: %s", error)
        return _again(error)


def _again(error: PacelineError) -> ServiceUnavailable:
    return ServiceUnavailable(
        error.what, got=error.got, wanted=error.wanted, where=error.where, do=error.do
    )


def _log_event(
    name: EventName, deployment_id: str | None, worker_id: str | None, data: dict[str, object]
) -> None:
    fields = {"deployment": deployment_id, "worker": worker_id} | data
    text = " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
    log.info("%s %s", name.value, text)
