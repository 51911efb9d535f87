"""The parameter server and its standby: one object that follows, and leads after a claim.

A push is answered only after the standby (if there is one) has applied it too, so every
acknowledged update survives the server. When the standby is lost, the leader continues alone if it
gets the claim of the next epoch, and ends where the standby was faster (``rendezvous``). A standby
that joins later first receives the whole state.

Threads: one per connection, at most 2 x workers + 8; one lock, ``changed``, over ledger and
weights. Every read and write has a deadline. The leader sends a heartbeat every ``BEAT_S``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from paceline.errors import (
    CorruptData,
    InvalidFrame,
    InvalidInput,
    PacelineError as Error,
    PeerLost,
    TemporaryError,
)
from paceline.training.launcher import STATE_LOST_EXIT
from paceline.training.strategies.frames import (
    Frame,
    FrameKind,
    array_frame,
    array_of,
    find_leader,
    integer_of,
    receive,
    receive_hello,
    report_of,
    send,
)
from paceline.training.strategies.learner import Learner, norm_of
from paceline.training.strategies.port import (
    Address,
    Array,
    Terms,
    Update,
    UpdateLedger,
    UpdatePolicy,
)
from paceline.training.strategies.rendezvous import Rendezvous

log = logging.getLogger(__name__)

BEAT_S = 0.5
GREET_S = 5.0
WORKER_SILENCE_S = 600.0  # a worker may compute for long; if it dies, its connection breaks
RETRY_S = 0.1
TICK_S = 0.2
STATE_BYTES_PER_S = 50e6  # at least, of a link and of loading what came over it
LAST_FRAMES_S = 30.0  # for callers to receive their last answer
# Keepalive detects a vanished caller after about 25 s (seconds, seconds, tries).
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

T = TypeVar("T")


class NoLeader(PeerLost):
    """No leading server was found whose state could be copied: it is lost, or never existed."""

    exit_code = STATE_LOST_EXIT


class ParameterServer:
    """Serves weights while it leads; otherwise it answers NOT_LEADING and follows the leader."""

    def __init__(
        self, learner: Learner, terms: Terms, rendezvous: Rendezvous, policy: UpdatePolicy
    ) -> None:
        self.learner, self.terms, self.policy = learner, terms, policy
        self.ledger = UpdateLedger(terms.max_staleness)
        self.epoch = 0  # 0: it does not lead
        self.done = threading.Event()  # every share is complete
        self.ended: Error | None = None  # the error that ended it
        self.changed = threading.Condition()
        self._open = False  # callers are answered
        self._released = threading.Event()  # the weights are no longer needed
        self._rendezvous = rendezvous
        self._owner = uuid.uuid4().hex
        self._workers: dict[int, socket.socket] = {}  # share → its newest connection
        self._standby: socket.socket | None = None
        self._places = threading.BoundedSemaphore(2 * terms.workers + 8)
        self._body_bytes = learner.count * 8 + (1 << 20)

    # ------------------------------------------------------------------ what the program calls

    @contextlib.contextmanager
    def listening(self, host: str) -> Iterator[Address]:
        """Answer callers on ``host`` during the ``with``; at its end wait for the last answers."""
        with socket.create_server((host, 0), backlog=64) as listener:
            listener.settimeout(0.1)
            thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            thread.start()
            at = listener.getsockname()
            try:
                yield str(at[0]), int(at[1])
                if self.epoch and self.done.is_set():
                    with contextlib.suppress(PeerLost):  # a late rank then looks until its deadline
                        self._rendezvous.finish()
            except BaseException as error:
                self.end(PeerLost("parameter server is ending", got=error))
                raise
            finally:
                self._released.set()
                thread.join(LAST_FRAMES_S)

    def lead(self, epoch: int = 1) -> None:
        """Claim ``epoch``; raises PeerLost where another server has it. ``open`` comes next."""
        if not self._rendezvous.claim(epoch, self._owner):
            raise PeerLost("another parameter server leads", got=f"epoch {epoch}", do="End.")
        self.epoch = epoch
        log.warning("parameter server leads epoch=%d version=%d", epoch, self.ledger.version)

    def open(self) -> None:
        """Start to answer workers and a standby."""
        with self.changed:
            self._open = True
            self._check_done()

    def until_done(self, on_tick: Callable[[], bool] | None = None) -> bool:
        """Return True once every share is complete; raises the error that ended the server.

        ``on_tick`` is called every ``TICK_S``; if it returns True, stop waiting and return False.
        """
        while not self.done.wait(TICK_S):
            if self.ended is not None:
                raise self.ended
            if on_tick is not None and on_tick():
                return False
        return True

    def end(self, why: Error) -> None:
        """End with the error ``why``; connected callers get no further answer."""
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def follow(
        self,
        addresses: Callable[[], Sequence[Address]],
        deadline_s: float,
        on_frame: Callable[[], None] = lambda: None,
    ) -> str:
        """Follow the leader; return "released" where all work is done, or "leads" after a takeover.

        When the leader is lost, this server claims the next epoch. ``on_frame`` is called for each
        frame from the leader. Raises NoLeader where none is found within ``deadline_s``, PeerLost
        where another server holds the claim.
        """
        epoch = 0
        while not epoch:
            found = self._find_leader(addresses, deadline_s)
            if found is None:
                return "released"
            leader, frame = found
            with leader:
                try:
                    self._take_state(frame)
                    while True:
                        if frame.kind is not FrameKind.BEAT:
                            answer = {"version": self.ledger.version}
                            send(leader, Frame(FrameKind.FOLLOWED, answer))
                        frame = receive(leader, self._body_bytes)
                        on_frame()
                        if frame.kind is FrameKind.RELEASED:
                            return "released"
                        if frame.kind is FrameKind.BEAT:
                            epoch = integer_of(frame, "epoch")
                        else:
                            self._take_update(frame)
                except PeerLost as error:
                    # Before its first heartbeat the leader does not wait for this standby: it may
                    # go on alone with newer weights. So look for it again instead of taking over.
                    log.warning("leader lost epoch=%d: %s", epoch, error)
        self.lead(epoch + 1)
        return "leads"

    # ------------------------------------------------------------------------------- following

    def _find_leader(
        self, addresses: Callable[[], Sequence[Address]], deadline_s: float
    ) -> tuple[socket.socket, Frame] | None:
        """Return a connection to the leader, and the state that it sent; None: all is done."""
        until = time.monotonic() + deadline_s
        hello = {"role": "standby", "key": self.terms.key}
        state_bytes = self.learner.count * 32 + (16 << 20)
        while not self._rendezvous.finished():
            try:
                found = find_leader(addresses(), hello, FrameKind.STATE, GREET_S, state_bytes)
            except PeerLost as error:
                if time.monotonic() > until:
                    raise NoLeader(
                        "no parameter server to follow", got=error, where=list(addresses())
                    ) from error
                time.sleep(RETRY_S)
            else:
                found[0].settimeout(self.terms.silence_s)
                return found
        return None

    def _take_state(self, state: Frame) -> None:
        with self.changed:
            self.learner.from_bytes(bytes(state.body))
            try:
                ledger, policy = state.head["ledger"], state.head["policy"]
            except KeyError as error:
                raise CorruptData("state of a parameter server is incomplete", got=error) from error
            self.ledger = UpdateLedger.from_json(ledger, self.terms.max_staleness)
            self.policy.restore(policy)

    def _take_update(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.UPDATE:
            raise InvalidFrame("unexpected frame from the leader", got=frame.kind.name)
        gradient = array_of(frame, self.learner.count, self.learner.dtype)
        numbers = ("worker", "sequence", "base", "version")
        update = Update(
            **{each: integer_of(frame, each) for each in numbers},
            report=report_of(frame),
            norm=norm_of(gradient),
            taken=frame.head.get("taken") is True,
        )
        if update.taken and not math.isfinite(update.norm):
            raise InvalidFrame("leader took a gradient that is not finite", got=update.norm)
        with self.changed:
            self.policy.restore(frame.head["policy"])
            self._apply(update, gradient)

    # ------------------------------------------------------------------------------- answering

    def _accept(self, listener: socket.socket) -> None:
        threads: list[threading.Thread] = []
        while self.ended is None and not self._released.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # a caller that is gone already, or too many open files
                log.warning("caller was not accepted: %s", error)
                time.sleep(RETRY_S)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()  # more callers than there are ranks
                continue
            threads = [each for each in threads if each.is_alive()]
            threads.append(
                threading.Thread(target=self._answer, args=(connection,), name="push", daemon=True)
            )
            threads[-1].start()
        until = time.monotonic() + LAST_FRAMES_S
        while self.ended is None and threads and time.monotonic() < until:
            threads.pop().join(max(0.0, until - time.monotonic()))

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                hello = receive_hello(connection, self.terms.key, GREET_S)
                connection.settimeout(GREET_S)
                if not self._open:
                    send(connection, Frame(FrameKind.NOT_LEADING))
                elif hello.head.get("role") == "standby":
                    self._serve_standby(connection)
                else:
                    self._serve_worker(connection, integer_of(hello, "worker"))
        except TemporaryError as error:
            log.info("caller is gone: %s", error)
        except Error as error:
            log.warning("caller was refused: %s", error)
        finally:
            self._places.release()

    def _serve_worker(self, connection: socket.socket, worker: int) -> None:
        if worker >= self.terms.workers:
            raise InvalidInput("no such worker", got=worker, wanted=f"below {self.terms.workers}")
        with self.changed:
            older = self._workers.get(worker)
            self._workers[worker] = connection
            self.ledger.release(worker)
            welcome = {
                "applied": self.ledger.applied.get(worker, 0),
                "position": self.ledger.positions.get(worker),
            }
        if older is not None:  # the same rank, restarted before its end was detected
            with contextlib.suppress(OSError):
                older.shutdown(socket.SHUT_RDWR)
        try:
            send(connection, Frame(FrameKind.WELCOME, welcome))
            connection.settimeout(WORKER_SILENCE_S)
            while True:
                frame = receive(connection, self._body_bytes)
                if frame.kind is FrameKind.PULL:
                    send(connection, self._pull(connection, worker))
                elif frame.kind is FrameKind.PUSH:
                    send(connection, self._push(connection, worker, frame))
                else:
                    raise InvalidFrame("unexpected frame from a worker", got=frame.kind.name)
        except (InvalidInput, InvalidFrame) as error:
            with contextlib.suppress(PeerLost):
                send(connection, Frame(FrameKind.REFUSED, {"message": error.one_line()}))
            raise
        except Error as error:
            if not isinstance(error, TemporaryError):
                self.end(error)  # the policy ended the job
            raise
        finally:
            with self.changed:
                if self._workers.get(worker) is connection:
                    del self._workers[worker]
                    self.ledger.release(worker)
                    self.changed.notify_all()

    def _pull(self, connection: socket.socket, worker: int) -> Frame:
        def weights() -> Frame | None:
            version = self.ledger.pull(worker)
            if version is None:
                return None
            self.changed.notify_all()  # the next one may wait to pull
            return array_frame(FrameKind.WEIGHTS, self.learner.weights(), version=version)

        return self._when_possible(connection, worker, weights)

    def _push(self, connection: socket.socket, worker: int, frame: Frame) -> Frame:
        gradient = array_of(frame, self.learner.count, self.learner.dtype)
        sequence, base = integer_of(frame, "sequence"), integer_of(frame, "base")
        report = report_of(frame)
        norm = norm_of(gradient)  # outside the lock

        def answer() -> Frame | None:
            if not self.ledger.may_push(worker, sequence, base):
                return None
            taken = self.policy.judge(report, norm)
            if taken and not math.isfinite(norm):
                raise InvalidInput("gradient is not finite", do="Lower training.learning_rate.")
            version = self.ledger.version + 1
            update = Update(worker, sequence, base, version, report, norm, taken)
            self._replicate(update, gradient)
            self._apply(update, gradient)
            self._check_done()
            return Frame(FrameKind.ANSWER, {"version": version})

        return self._when_possible(connection, worker, answer)

    def _when_possible(
        self, connection: socket.socket, worker: int, attempt: Callable[[], T | None]
    ) -> T:
        """Return what ``attempt`` returns under the lock, as soon as it is not None.

        The worker gets heartbeats meanwhile. The wait ends with the gradient that is waited for: a
        rank that does not finish its step is killed by its launcher.
        """
        while True:
            with self.changed:
                if not self._open or self.ended is not None:
                    raise PeerLost("parameter server does not lead")
                if self._workers.get(worker) is not connection:
                    raise PeerLost("the worker has a newer connection")
                if (found := attempt()) is not None:
                    return found
                self.changed.wait(BEAT_S)
            send(connection, Frame(FrameKind.BEAT))

    def _apply(self, update: Update, gradient: Array) -> None:
        """Count ``update``, and change the weights if it is taken; the lock is held."""
        self.ledger.apply(update)
        if update.taken:
            self.learner.apply(gradient, update.version, update.norm)
        self.policy.applied(update)
        self.changed.notify_all()

    def _check_done(self) -> None:
        pushed = [self.ledger.applied.get(worker, 0) for worker in range(self.terms.workers)]
        if all(each >= self.terms.pushes for each in pushed):
            self.done.set()

    # ---------------------------------------------------------------------------- replicating

    def _replicate(self, update: Update, gradient: Array) -> None:
        """Wait until the standby has applied ``update``, too; the lock is held."""
        if self._standby is None:
            return
        try:
            head = {
                "worker": update.worker, "sequence": update.sequence, "base": update.base,
                "version": update.version, "report": update.report.model_dump(),
                "taken": update.taken, "policy": self.policy.state(),
            }  # fmt: skip
            send(self._standby, array_frame(FrameKind.UPDATE, gradient, **head))
            self._expect_followed(self._standby, update.version, self.terms.silence_s)
        except (PeerLost, InvalidFrame) as error:
            self._lose_standby(error)

    def _expect_followed(self, standby: socket.socket, version: int, within_s: float) -> None:
        # Under the lock: a standby that sends byte by byte must not hold it for long.
        frame = receive(standby, 0, within_s=within_s)
        standby.settimeout(self.terms.silence_s)
        if frame.kind is not FrameKind.FOLLOWED or integer_of(frame, "version") != version:
            raise InvalidFrame("standby did not follow", got=frame.kind.name, wanted=version)

    def _lose_standby(self, error: Error) -> None:
        """Continue alone, unless the standby has taken over; the lock is held."""
        self._standby = None
        log.warning("standby lost: %s", error)
        if not self._rendezvous.claim(self.epoch + 1, self._owner):
            self.ended = PeerLost("standby has taken over", got=error.what, do="End.")
            raise self.ended
        self.epoch += 1

    def _serve_standby(self, connection: socket.socket) -> None:
        """Send the whole state, then heartbeats between updates."""
        with self.changed:
            if self._standby is not None:
                raise PeerLost("there is a standby already")
            head = {"ledger": self.ledger.to_json(), "policy": self.policy.state()}
            state = self.learner.to_bytes()
            within_s = self.terms.silence_s + len(state) / STATE_BYTES_PER_S
            connection.settimeout(within_s)
            send(connection, Frame(FrameKind.STATE, head, state))
            self._expect_followed(connection, self.ledger.version, within_s)
            # With its first heartbeat it may take over, so from here on every update waits for it.
            send(connection, Frame(FrameKind.BEAT, {"epoch": self.epoch}))
            self._standby = connection
        try:
            while self.ended is None:
                released = self._released.wait(BEAT_S)
                kind = FrameKind.RELEASED if released else FrameKind.BEAT
                with self.changed:
                    if self._standby is not connection:
                        return
                    try:
                        send(connection, Frame(kind, {"epoch": self.epoch}))
                    except PeerLost as error:
                        self._lose_standby(error)
                    if released:
                        return
        finally:
            with self.changed:
                if self._standby is connection:
                    self._standby = None
