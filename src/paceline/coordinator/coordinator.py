"""The driver of the state machine: passes it the time, commits its effects, returns its answers.

One lock guards the state. While this replica leads, an answer is returned only after its effects
are committed; after a failed commit the state is reloaded from the store. A standby's state is a
copy of the store's and serves reads only. Leader election is in ``leadership``; HTTP is in
``paceline.api``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from paceline.coordinator.callers import with_audit_event
from paceline.coordinator.ledger import LedgerEntry, LedgerIndex
from paceline.coordinator.notifier import RING_EVENTS, EventRing, Notifier
from paceline.coordinator.role import Role
from paceline.coordinator.state import (
    Activate,
    Answer,
    AwaitCommands,
    Cancel,
    CoordinatorSettings,
    CoordinatorState,
    Create,
    Drop,
    Effect,
    EmitEvent,
    Event,
    HeartbeatReceived,
    Rollback,
    Save,
    SavePlan,
    Tick,
)
from paceline.coordinator.stores import Audit, Coordination, EventQuery, Progress, Term
from paceline.coordinator.tokens import TokenRegistry
from paceline.errors import NotFound, PacelineError, ServiceUnavailable, StaleEpoch
from paceline.manifest import Manifest
from paceline.plan import select_workers
from paceline.schemas import (
    CreatedDeployment,
    CreateDeployment,
    Event as StoredEvent,
    EventList,
    EventName,
    HeartbeatAnswer,
    PurposeRule,
    StageRecord,
    TrainingJob,
    digest_of,
    new_deployment_id,
)

log = logging.getLogger(__name__)

MAX_TICK_DELAY_S = 5.0  # when ticks are later than this, the replica reports that it is not ready
STORE_RETRY_S = 0.5  # between two reads of an unavailable store; calls in between are refused
MAX_CREATIONS = 8  # each reads a manifest from the origin and occupies a thread
EVENT_PAGE = 1_000

Read = TypeVar("Read")


class Coordinator:
    """One replica of a fleet's control plane, without the REST layer."""

    def __init__(
        self,
        coordination: Coordination,
        *,
        progress: Progress,
        audit: Audit,
        resolve_source: Callable[[str], tuple[str, Manifest]],
        settings: CoordinatorSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._coordination, self._progress, self._audit = coordination, progress, audit
        self._resolve_source = resolve_source
        self._settings = settings or CoordinatorSettings()
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.Lock()
        self._creations = threading.BoundedSemaphore(MAX_CREATIONS)
        self._state = CoordinatorState(self._settings, leader_epoch=0)
        self._ring = EventRing()
        self._ledger_lock = threading.Lock()  # held while the ledger changes
        self._ledger: tuple[Term, LedgerIndex] | None = None  # None: reload from the store
        self.notifier = Notifier()  # wakes held heartbeat answers when there may be new commands
        self._role = Role(coordination.is_leading, monotonic)
        self._follow_lock = threading.Lock()  # held while a standby reads the store
        # The store revision that a standby's state shows; None before its first read.
        self.followed_revision: int | None = None
        self._reload_reason: PacelineError | None = None  # why the state may differ from the store
        self._reload_after_s = 0.0
        self._last_tick_s = monotonic()
        self._stopping = threading.Event()

    # --- leadership ------------------------------------------------------------------------------

    def lead(self, term: Term) -> None:
        """Load the state from the store and begin to decide; raises ServiceUnavailable."""
        state, ring = self._load_state(term.epoch), EventRing()
        self._load_events(ring, self._oldest_event())
        with self._lock:
            self._state, self._ring = state, ring
            self._role.lead(term)
            self._reload_reason, self.followed_revision = None, None
            self._last_tick_s = self._monotonic()
        log.info("leads epoch=%d replica=%s", term.epoch, term.replica_id)

    def step_down(self, term: Term, reason: str) -> None:
        """Stop deciding in ``term`` and release the held heartbeat answers."""
        with self._lock:
            if self._role.own_term != term:
                return
            self._role.step_down()
        log.warning("leads no more epoch=%d reason=%s", term.epoch, reason)
        self.notifier.notify()

    def follow(self, *, read: bool) -> None:
        """Read from the store who leads and, with ``read``, the changes since the last read.

        Raises ServiceUnavailable where the store cannot be read.
        """
        with self._follow_lock:
            revision, leader = self._coordination.revision(), self._coordination.leader()
            state = None
            if read and revision != self.followed_revision:
                state = self._load_state(self._role.newest(leader))
            with self._lock:
                if self._role.own_term is not None:
                    return  # the leader was read from the store before this replica was elected
                self._role.observed_leader(leader)
                if state is not None:
                    self._state, self._reload_reason, self.followed_revision = state, None, revision
                ring = self._ring
            if state is not None:
                self._load_events(ring, ring.last or self._oldest_event())

    def merge_progress(self) -> None:
        """Copy worker progress and heartbeat times from the progress store into a standby's state.

        Commits do not carry them. Raises nothing; does nothing where this replica leads.
        """
        with self._lock:
            if self._role.own_term is not None:
                return
            moving = [e.deployment_id for e in self._state.deployments() if not e.status.is_final]
        parts = {each: self._progress.get(each) for each in moving}
        beats = self._progress.beats()
        with self._lock:
            if self._role.own_term is None:
                self._state.fleet.merge_progress(beats)
                for deployment_id, known in parts.items():
                    self._state.merge_progress(deployment_id, known)

    @property
    def term(self) -> Term | None:
        """Return this replica's term while its lease certainly holds; without I/O."""
        return self._role.term

    @property
    def leader(self) -> Term | None:
        """Return the leader that this replica read last; None where it has no current one."""
        return self._role.leader

    @property
    def leader_epoch(self) -> int:
        return self._role.epoch

    @property
    def tick_delay_s(self) -> float:
        return self._monotonic() - self._last_tick_s

    # --- stopping --------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Return whether the server is stopping, so that long polls must answer now."""
        return self._stopping.is_set()

    def end_long_polls(self) -> None:
        """Release all long polls, because the server is stopping."""
        self._stopping.set()
        self.notifier.notify()

    # --- deciding --------------------------------------------------------------------------------

    def handle(self, event: Event) -> BaseModel | None:
        """Decide one event, commit its effects, log its audit events and return its answer.

        Raises what the state refuses with, NotLeading where another replica leads, and
        ServiceUnavailable where the effects cannot be committed.
        """
        with self._lock:
            term = self._require_leading()
            effects = self._decide(event)
            stored = self._commit(term, with_audit_event(effects, self._wall()))
            if not stored and not self._coordination.is_leading(term):
                raise self._role.not_leading()  # frozen in between: another may have decided
        if isinstance(event, Activate | Cancel | Rollback) or any(
            isinstance(each, SavePlan)
            or (isinstance(each, EmitEvent) and each.name is EventName.DEPLOYMENT_SWITCHING)
            for each in effects
        ):
            self.notifier.notify()  # held heartbeat answers are computed again
        for each in stored:
            fields = {"deployment": each.deployment_id, "worker": each.worker_id} | each.data
            words = [f"{key}={value}" for key, value in fields.items() if value is not None]
            log.info("%s %s", each.name.value, " ".join(words))
        return next((each.record for each in effects if isinstance(each, Answer)), None)

    def try_decide(self, event: HeartbeatReceived | AwaitCommands) -> HeartbeatAnswer | None:
        """Return the answer to a worker where that needs neither a wait nor a commit, else None.

        After None nothing has changed: call ``handle`` on a thread that may block. Raises what
        ``handle`` raises.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._reload_reason is not None:
                return None
            term = self._require_leading()
            agents = self._state.agents
            if isinstance(event, HeartbeatReceived) and not agents.needs_no_commit(event.beat):
                return None
            effects = self._decide(event, expect_no_commit=True)
            if not self._coordination.is_leading(term):
                raise self._role.not_leading()
        finally:
            self._lock.release()
        answer = effects[0]
        assert isinstance(answer, Answer) and isinstance(answer.record, HeartbeatAnswer)
        return answer.record

    def tick(self) -> None:
        """Pass the time to the state machine, where this replica leads."""
        if self.term is not None:
            self.handle(Tick(at=self._wall()))
        self._last_tick_s = self._monotonic()

    def create(self, call: CreateDeployment, key: str | None) -> CreatedDeployment:
        """Create a deployment, or return the one that this idempotency key created.

        The record names the source as it is resolved now, and never an alias. What else the caller
        left out is as the profile says.
        """
        profile = {"topology": self._settings.topology, "max_failed": self._settings.max_failed}
        left_out = profile.keys() - call.model_fields_set
        call = call.model_copy(update={each: profile[each] for each in left_out})
        # Without a selector the digest is the one that versions before selectors stored.
        body = call.model_dump(mode="json", exclude={"selector"} if call.selector is None else None)
        body_digest = digest_of(body)
        with self._lock:
            self._require_leading()
            known = self._state.known_key(key, body_digest)
            if known is not None:
                return known
            if call.selector is not None:
                targets = select_workers(call.selector, self._state.fleet.workers())
                call = call.model_copy(update={"target_workers": targets, "selector": None})
        if not self._creations.acquire(blocking=False):
            raise ServiceUnavailable(
                "too many deployments are being created", wanted=f"at most {MAX_CREATIONS}"
            )
        try:
            source_url, manifest = self._resolve_source(call.source_url)
        finally:
            self._creations.release()
        found = {
            "source_url": source_url,
            "model_id": call.model_id or manifest.model_id,
            "version": call.version or manifest.version,
        }
        answer = self.handle(
            Create(
                deployment_id=new_deployment_id(self._wall()),
                call=call.model_copy(update=found),
                manifest=manifest,
                key=key,
                body_digest=body_digest,
                at=self._wall(),
            )
        )
        assert isinstance(answer, CreatedDeployment)
        return answer

    def cancel(self, deployment_id: str) -> None:
        """Cancel the deployment; ``unstopped`` lists the workers that have yet to confirm."""
        self.handle(Cancel(deployment_id=deployment_id, at=self._wall()))

    def save_stage(self, record: StageRecord) -> StageRecord:
        """Put a record into the ledger; raises InvalidInput for one that is too large, Conflict
        where the ledger is full.
        """
        line = LedgerEntry.of(record)
        data = record.model_dump(include={"stage", "run_id", "seconds", "output_digest"})
        finished = EmitEvent(EventName.STAGE_FINISHED, self._wall(), None, None, data)
        effects = with_audit_event([Save(record), finished], self._wall())
        with self._ledger_lock:
            term, index = self._ledger_index()
            dropped = index.admit(line, self._wall())
            self._ledger = None  # until the outcome of the write is certain
            with self._lock:
                if self._require_leading() != term:
                    raise self._role.not_leading()
                self._commit(term, [*(Drop(StageRecord, each.key) for each in dropped), *effects])
                index.keep(line, dropped)
                self._ledger = term, index
        return record

    def save_job(self, job: TrainingJob, dropped: Iterable[str] = ()) -> None:
        """Store a training job, with an event, and delete those with the ids ``dropped``."""
        data: dict[str, object] = {
            "job_id": job.job_id,
            "state": job.state,
            "reason": job.reason,
            "team": job.spec.team,
            "project": job.spec.project,
            "run_id": job.run_id,
        }
        event = EmitEvent(EventName.JOB_CHANGED, self._wall(), None, None, data)
        self._commit_change([*(Drop(TrainingJob, (each,)) for each in dropped), Save(job), event])

    def save_purpose(self, rule: PurposeRule, dropped: Iterable[str] = ()) -> PurposeRule:
        """Store a rule of the table of purposes, and delete those with the ids ``dropped``."""
        self._commit_change([*(Drop(PurposeRule, (each,)) for each in dropped), Save(rule)])
        return rule

    def _commit_change(self, effects: Sequence[Effect]) -> None:
        effects = with_audit_event(effects, self._wall())
        with self._lock:
            self._commit(self._require_leading(), effects)

    def _ledger_index(self) -> tuple[Term, LedgerIndex]:
        """Return the ledger's index in this term: read once, and again after an error."""
        with self._lock:
            term = self._require_leading()
        if self._ledger is None or self._ledger[0] != term:
            self._ledger = term, LedgerIndex(self._coordination.ledger())
        return self._ledger

    def commit_audit_events(self, observed: Sequence[EmitEvent]) -> None:
        """Commit audit events that change no state, such as a refused attempt."""
        with self._lock:
            self._commit(self._require_leading(), observed)

    # --- reading ---------------------------------------------------------------------------------

    def read(self, question: Callable[[CoordinatorState], Read]) -> Read:
        """Return what ``question`` computes from the state; it must not change the state.

        A standby that does not find a record reads the store again before it raises NotFound.
        """
        try:
            return self._read(question)
        except NotFound:
            if (
                self._role.own_term is not None
                or self.followed_revision == self._coordination.revision()
            ):
                raise
        self.follow(read=True)
        return self._read(question)

    def _read(self, question: Callable[[CoordinatorState], Read]) -> Read:
        with self._lock:
            if self._role.own_term is not None:
                self._require_usable(self._role.own_term)
            else:
                self._require_current()
            return question(self._state)

    def now(self) -> float:
        return self._wall()

    def events(self, after: int) -> EventList:
        return self._ring.after(after)

    def history(self, asked: EventQuery) -> list[StoredEvent]:
        return self._audit.query(asked)

    def stage(self, stage: str, input_digest: str) -> StageRecord | None:
        return self._coordination.stage(stage, input_digest)

    def stages(self, stage: str) -> list[StageRecord]:
        return list(self._coordination.stages(stage))

    def jobs(self) -> list[TrainingJob]:
        return list(self._coordination.jobs())

    def purposes(self) -> list[PurposeRule]:
        """Return the table of what data may be used for, oldest first."""
        return sorted(self._coordination.purposes(), key=lambda each: each.allowed_at)

    @property
    def tokens(self) -> TokenRegistry:
        """Return the issued tokens; safe to read without the lock."""
        return self._state.tokens

    def check_ready(self) -> None:
        """Raise ServiceUnavailable where this process can neither decide nor follow the store."""
        with self._lock:
            if self._role.own_term is None:
                self._require_current()
                return
            self._require_usable(self._role.own_term)
        if self.tick_delay_s > MAX_TICK_DELAY_S:
            raise ServiceUnavailable(
                "the coordinator's clock thread is late", got=f"{self.tick_delay_s:.1f} s"
            )

    # --- with the lock held ----------------------------------------------------------------------

    def _require_leading(self) -> Term:
        term = self.term
        if term is None:
            raise self._role.not_leading()
        self._require_usable(term)
        return term

    def _decide(self, event: Event, *, expect_no_commit: bool = False) -> Sequence[Effect]:
        """Return the state's effects for ``event``.

        After an unexpected exception the state is reloaded from the store, because a partial change
        would never be committed.
        """
        try:
            effects = self._state.handle(event, self._monotonic())
            if expect_no_commit:
                assert len(effects) == 1 and isinstance(effects[0], Answer), "it must be committed"
        except PacelineError:
            raise  # refused: nothing has changed
        except Exception as error:
            self._reload_reason = ServiceUnavailable(
                "the coordinator failed over an event, and begins again from what was kept",
                got=type(error).__name__,
                do="Call again; its log says why.",
            )
            raise
        return effects

    def _require_usable(self, term: Term) -> None:
        if self._reload_reason is None:
            return
        if self._monotonic() < self._reload_after_s:
            raise self._reload_reason.as_kind(ServiceUnavailable) from self._reload_reason
        # The state may be ahead of the store: reload what was committed.
        try:
            self._state = self._load_state(term.epoch)
        except PacelineError as error:
            self._reload_after_s = self._monotonic() + STORE_RETRY_S
            raise self._commit_failed(term, error) from error
        self._reload_reason = None

    def _require_current(self) -> None:
        if self._reload_reason is not None:
            raise self._reload_reason.as_kind(ServiceUnavailable) from self._reload_reason
        self._role.require_current(self._coordination.backend)

    def _commit(self, term: Term, effects: Sequence[Effect]) -> list[StoredEvent]:
        try:
            stored = self._coordination.commit(term, effects)
        except PacelineError as error:
            raise self._commit_failed(term, error) from error
        self._ring.extend(stored)
        return stored

    def _commit_failed(self, term: Term, error: PacelineError) -> ServiceUnavailable:
        self._reload_reason = error
        log.error("nothing was committed: %s", error)
        if isinstance(error, StaleEpoch) and self._role.own_term == term:
            self._role.step_down()
            log.warning("leads no more epoch=%d reason=another does", term.epoch)
            self.notifier.notify()
            return self._role.not_leading()
        return error.as_kind(ServiceUnavailable)

    # --- the store -------------------------------------------------------------------------------

    def _load_state(self, epoch: int) -> CoordinatorState:
        kept = self._coordination.load(self._monotonic())
        now_s = self._monotonic()
        state = CoordinatorState.restore(kept, now_s, self._settings, leader_epoch=epoch)
        state.fleet.merge_progress(self._progress.beats())
        for each in state.deployments():
            if not each.status.is_final:
                state.merge_progress(each.deployment_id, self._progress.get(each.deployment_id))
        return state

    def _oldest_event(self) -> int:
        return max(0, self._coordination.outbox().last - RING_EVENTS)

    def _load_events(self, ring: EventRing, after: int) -> None:
        while page := self._coordination.events_after(after, EVENT_PAGE):
            ring.extend(page)
            after = page[-1].seq
