"""One replica's leadership: follow the store, campaign, lead, step down, repeat.

Four threads. One campaigns and, while this replica leads, checks its lease (by a clock that also
runs during suspend) and its tick thread: a leader whose ticks are late steps down so that another
can lead. One follows the store while another replica leads. One ticks, and one shares progress
with standbys. A process that was frozen past its lease wakes as a standby, because every call
checks ``Coordinator.term`` first; what it still writes is refused by the store (``stores``). It
decides nothing about deployments; HTTP is in ``paceline.api``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.errors import PacelineError
from paceline.schemas import WorkerProgress

if TYPE_CHECKING:  # `paceline where` imports this module, without the stores and their SQLAlchemy
    from paceline.coordinator.coordinator import Coordinator
    from paceline.coordinator.state import CoordinatorState, TargetProgress
    from paceline.coordinator.stores import Candidate, Coordination, Progress, Term

log = logging.getLogger(__name__)

TICK_S = 0.15
LEASE_CHECK_S = 0.1  # between two checks that this replica still leads
STEP_DOWN_DELAY_S = 30.0  # a leader whose ticks are this late steps down
FOLLOW_S = 0.5  # shortest interval between two reads of the store by a standby,
FOLLOW_SHARE = 0.2  # and the largest share of a core that they take
LEADER_POLL_S = 0.1  # between two reads of who leads
RETRY_S = 1.0  # after a store error, with jitter
PROGRESS_S = 1.0  # between two writes of progress, and two reads of it
RESEND_S = 30.0  # a progress store that restarted is complete again after so long
ROLE_WAIT_S = 5.0  # how long ``start`` waits for this replica to have a role


class TermTask(Protocol):
    """A task that runs on a thread of its own for as long as one term lasts."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class RepeatedTask:
    """A ``TermTask`` that calls ``run_once`` every so often, on a thread of its own."""

    def __init__(self, name: str, every_s: float, stop_wait_s: float) -> None:
        """``stop_wait_s`` is how long ``stop`` waits for a call in progress."""
        self._every_s, self._stop_wait_s = every_s, stop_wait_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._stop_wait_s)

    def run_once(self) -> None:
        """Do what is due."""
        raise NotImplementedError

    def _repeat(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.run_once()
            except PacelineError as error:
                log.warning("%s: not now: %s", self._thread.name, error)
            except Exception:
                # A bug must not end the thread: log it and try again.
                log.exception("%s failed", self._thread.name)


class Replica:
    """Keeps one ``Coordinator`` in its role; call ``start`` and ``stop`` once each."""

    def __init__(
        self,
        coordinator: Coordinator,
        coordination: Coordination,
        progress: Progress,
        candidate: Candidate,
        *,
        duties: Sequence[Callable[[Term], TermTask]] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._coordination, self._progress = coordination, progress
        self._candidate, self._name = candidate, candidate.replica_id
        self._duties = duties
        self._monotonic = monotonic
        self._stopping = threading.Event()
        self._has_role = threading.Event()
        self._threads = [
            threading.Thread(target=body, name=f"replica-{name}", daemon=True)
            for name, body in (
                ("campaign", self._campaign_loop),
                ("follow", self._follow_loop),
                ("tick", self._tick_loop),
                ("share", self._share_loop),
            )
            if name != "share" or coordination.standbys
        ]

    def start(self) -> None:
        """Start the threads; return once this replica leads or follows, or after
        ``ROLE_WAIT_S``."""
        for thread in self._threads:
            thread.start()
        if not self._has_role.wait(ROLE_WAIT_S):
            log.warning("no role yet replica=%s: the store does not answer", self._name)

    def resign(self) -> None:
        """Step down for good: the next leader need not wait until the lease expires."""
        self._stopping.set()
        self._coordinator.end_long_polls()

    def stop(self) -> None:
        """Stop the threads; raises nothing."""
        self.resign()
        until_s = self._monotonic() + 10.0
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=max(0.1, until_s - self._monotonic()))

    # --- the leader ------------------------------------------------------------------------------

    def _campaign_loop(self) -> None:
        while not self._stopping.is_set():
            if self._coordinator.tick_delay_s > STEP_DOWN_DELAY_S:
                self._pause()  # its tick thread hangs, so it would decide nothing
                continue
            try:
                term = self._coordination.campaign(self._candidate, self._stopping.is_set)
            except PacelineError as error:
                log.warning("no election replica=%s: %s", self._name, error)
                self._pause()
                continue
            except Exception:
                # A defect must not end the campaign for good: log it and campaign again.
                log.exception("the campaign broke replica=%s", self._name)
                self._pause()
                continue
            if term is None:
                return
            duties = [make(term) for make in self._duties]
            reason = self._lead(term, duties)
            self._coordinator.step_down(term, reason)
            deposed = not self._coordination.is_leading(term)
            self._coordination.resign(term)  # first, because another replica waits for the lease
            for duty in duties:
                duty.stop()
            if deposed and not self._coordination.standbys:
                log.error("another process has this store; this one answers nothing from here on")
                return
            self._pause()  # so that another replica can win, whatever failed here

    def _lead(self, term: Term, duties: Sequence[TermTask]) -> str:
        """Lead until the term ends and return the reason."""
        try:
            self._coordination.move_jobs(term)
            self._coordinator.lead(term)
            for duty in duties:
                duty.start()
        except PacelineError as error:
            return f"the state cannot be read: {error}"
        except Exception as error:
            log.exception("the state cannot be taken over")
            return f"{type(error).__name__}: {error}"
        self._has_role.set()
        while not self._stopping.wait(LEASE_CHECK_S):
            if self._coordinator.term != term:
                return "the lease ran out, or another leads"
            if self._coordinator.tick_delay_s > STEP_DOWN_DELAY_S:
                return f"nothing was decided for {STEP_DOWN_DELAY_S:.0f} s"
        return "the process stops"

    def _tick_loop(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self._coordinator.tick()
            except PacelineError as error:
                log.warning("tick failed: %s", error)
            except Exception:
                # A defect must not stop the ticks: log it each time and continue.
                log.exception("tick failed")

    def _share_loop(self) -> None:
        """Send progress to the progress store, for standbys and the next leader."""
        sent: dict[tuple[str, str], int] = {}  # pieces
        resent_s = 0.0
        while not self._stopping.wait(PROGRESS_S):
            if self._coordinator.term is None:
                sent = {}
                continue
            if not self._progress.healthy or self._monotonic() > resent_s + RESEND_S:
                sent, resent_s = {}, self._monotonic()
            try:
                sent = self._send_progress(sent)
            except PacelineError as error:
                log.info("progress is not shared: %s", error)
            except Exception:
                log.exception("progress is not shared")

    def _send_progress(self, sent: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        """Send what differs from ``sent``; return what the store then has."""

        def unfinished(
            state: CoordinatorState,
        ) -> dict[tuple[str, str], tuple[int, TargetProgress]]:
            return {
                (deployment.deployment_id, worker_id): (part.pieces_held, part)
                for deployment in state.deployments()
                if not deployment.status.is_final
                for worker_id, part in state.deployment_state(
                    deployment.deployment_id
                ).parts.items()
                if part.receipt is None
            }

        seen = self._coordinator.read(unfinished)
        parts = {
            key: WorkerProgress(
                worker_id=key[1],
                status=part.status,
                chunks_received=part.chunks,
                pieces_held=part.pieces_held,
                bytes_held=part.bytes_held,
            )
            for key, (pieces, part) in seen.items()
            if sent.get(key) != pieces
        }
        self._progress.put(
            parts, self._coordinator.read(lambda state: state.fleet.last_heartbeats())
        )
        for deployment_id in {key[0] for key in sent} - {key[0] for key in seen}:
            self._progress.drop(deployment_id)
        return {key: pieces for key, (pieces, _) in seen.items()}

    # --- the standby -----------------------------------------------------------------------------

    def _follow_loop(self) -> None:
        next_read_s, next_progress_s, failing = 0.0, 0.0, False
        while not self._stopping.is_set():
            if self._coordinator.term is not None or not self._coordination.standbys:
                self._stopping.wait(LEASE_CHECK_S)
                continue
            try:
                began_s, revision = time.thread_time(), self._coordinator.followed_revision
                self._coordinator.follow(read=self._monotonic() >= next_read_s)
                self._has_role.set()
                if self._coordinator.followed_revision != revision:
                    # CPU time, not waiting time: a slow store needs no longer interval.
                    took_s = time.thread_time() - began_s
                    next_read_s = self._monotonic() + max(FOLLOW_S, took_s / FOLLOW_SHARE)
                if self._monotonic() >= next_progress_s:
                    began_s = time.thread_time()
                    self._coordinator.merge_progress()
                    took_s = time.thread_time() - began_s
                    next_progress_s = self._monotonic() + max(PROGRESS_S, took_s / FOLLOW_SHARE)
                failing = False
                self._stopping.wait(LEADER_POLL_S)
            except PacelineError as error:
                level = logging.DEBUG if failing else logging.WARNING
                log.log(level, "the store cannot be followed: %s", error)
                failing = True
                self._pause()
            except Exception:
                log.exception("following failed")
                self._pause()

    def _pause(self) -> None:
        self._stopping.wait(RETRY_S * random.uniform(0.5, 1.0))
