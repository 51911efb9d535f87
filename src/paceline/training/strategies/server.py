"""The parameter server and its standby: one object that follows, and leads after a claim.

A push is answered only after the standby (if there is one) has applied it too, so every
acknowledged update survives the server. When the standby is lost, the server continues alone if it
gets the claim of the next epoch, and ends where the standby was faster (``rendezvous``). A standby
that joins later first receives the whole state. ``follower`` is the standby's side.

Threads: one per connection, at most 2 × shares + 8; one lock over ledger, seats and weights. Every
socket has a deadline. The leader sends a heartbeat every ``BEAT_S``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from paceline.errors import InvalidFrame, InvalidInput, PacelineError, PeerLost, TemporaryError
from paceline.training.strategies.frames import (
    Frame,
    FrameKind,
    greeting,
    numbers_of,
    of_numbers,
    receive,
    send,
    whole,
)
from paceline.training.strategies.learner import Learner, norm_of
from paceline.training.strategies.protocol import (
    BEAT_S,
    GREET_S,
    TURN_S,
    WORKER_SILENCE_S,
    Address,
    AppliedUpdate,
    BatchReport,
    ServerTerms,
    ShareAssignment,
    UpdatePolicy,
)
from paceline.training.strategies.rendezvous import Claims
from paceline.training.strategies.update_ledger import PushVerdict, Update, UpdateLedger

log = logging.getLogger(__name__)

# Keepalive detects a vanished caller after about 25 s (seconds, seconds, tries).
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class ParameterServer:
    """Serves weights while it leads; otherwise it answers NOT_LEADING and follows the leader.

    ``changed`` is the lock over all of the server's state.
    """

    def __init__(
        self,
        learner: Learner,
        terms: ServerTerms,
        claims: Claims,
        owner: str,
        *,
        steward: UpdatePolicy | None = None,
        ready: bool = True,
    ) -> None:
        """``owner`` claims epochs; it must be unique among processes.

        Without ``ready`` it answers no caller, leading or not, until ``open`` is called.
        """
        self.learner, self.terms = learner, terms
        self.steward = steward or UpdatePolicy()
        self.ledger = UpdateLedger(terms.max_staleness)
        self.epoch = 0  # 0: it does not lead
        self.done = threading.Event()  # every share is complete
        self.released = threading.Event()  # and the weights are no longer needed
        self.ended: PacelineError | None = None  # the error that ended it
        self.changed = threading.Condition()
        self.body_bytes = learner.count * 8 + (1 << 20)
        self.state_bytes = learner.count * 8 * 4 + (16 << 20)
        self._claims, self._owner, self._ready = claims, owner, ready
        self._seats = ShareAssignment(terms.workers, terms.vacant_s, time.monotonic())
        self._standby: socket.socket | None = None
        self._threads = threading.BoundedSemaphore(2 * terms.workers + 8)

    # -------------------------------------------------------------------------------- leading

    def lead(self, epoch: int = 1) -> None:
        """Start to serve. Raises PeerLost where another server has claimed ``epoch``."""
        if not self._claims.claim(epoch, self._owner):
            raise PeerLost("another parameter server leads", got=f"epoch {epoch}", do="End.")
        with self.changed:
            self.epoch = epoch
            self._seats = ShareAssignment(self.terms.workers, self.terms.vacant_s, time.monotonic())
            self._check_done()
            self.changed.notify_all()
        log.warning("parameter server leads owner=%s epoch=%d version=%d", self._owner, epoch,
                    self.ledger.version)  # fmt: skip

    def open(self) -> None:
        """Start to answer callers."""
        self._ready = True

    def release(self) -> None:
        """Mark all work as done: the standby is released, and ``serve`` ends."""
        with self.changed:
            self.released.set()
            self.changed.notify_all()

    def end(self, why: PacelineError) -> None:
        """End with the error ``why``; connected callers get no further answer."""
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def serve(self, listener: socket.socket, deadline_s: float) -> None:
        """Serve connections until released; raises the error that ended it, or PeerLost past
        ``deadline_s``."""
        listener.settimeout(0.1)
        until = time.monotonic() + deadline_s
        threads: list[threading.Thread] = []
        while not (self.released.is_set() and not any(each.is_alive() for each in threads)):
            if self.ended is not None:
                raise self.ended
            if time.monotonic() > until:
                raise PeerLost("parameter server ran out of time", wanted=f"{deadline_s:.0f} s")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if not self._threads.acquire(blocking=False):
                connection.close()  # more callers than there are ranks
                continue
            threads = [each for each in threads if each.is_alive()]
            threads.append(
                threading.Thread(target=self._talk, args=(connection,), name="push", daemon=True)
            )
            threads[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                hello = greeting(connection, self.terms.key, GREET_S)
                connection.settimeout(GREET_S)
                if self.epoch == 0 or not self._ready:
                    send(connection, Frame(FrameKind.NOT_LEADING, {"version": self.ledger.version}))
                elif hello.head.get("role") == "standby":
                    self._keep_standby(connection)
                else:
                    self._keep_worker(connection, hello)
        except TemporaryError as error:
            log.info("caller went away: %s", error)
        except PacelineError as error:
            log.warning("caller was refused: %s", error)
        finally:
            self._threads.release()

    # --------------------------------------------------------------------------------- workers

    def _keep_worker(self, connection: socket.socket, hello: Frame) -> None:
        rank, wanted = whole(hello, "rank"), whole(hello, "worker")
        if wanted >= self.terms.workers:
            raise InvalidInput("no such worker", got=wanted, wanted=f"below {self.terms.workers}")
        while (worker := self._seat(connection, rank, wanted)) is not None:
            try:
                self._answer(connection, worker)
            except (InvalidInput, InvalidFrame) as error:
                with contextlib.suppress(PeerLost):
                    send(connection, Frame(FrameKind.REFUSED, {"message": error.one_line()}))
                raise
            except PacelineError as error:
                if not isinstance(error, TemporaryError):
                    self.end(error)  # the steward ended the job
                raise
            finally:
                with self.changed:
                    self._seats.leave(worker, connection, time.monotonic())
                    self.ledger.release(worker)
                    self.changed.notify_all()
        send(connection, Frame(FrameKind.RELEASED))

    def _seat(self, connection: socket.socket, rank: int, wanted: int) -> int | None:
        """Wait until there is work for ``rank`` and return its share; None once all is done."""
        while True:
            with self.changed:
                self._require_leading()
                if self.done.is_set():
                    return None
                applied, pushes = self.ledger.applied, self.terms.pushes
                left = {s for s in range(self.terms.workers) if applied.get(s, 0) < pushes}
                now = time.monotonic()
                worker, older = self._seats.take(rank, wanted, connection, left, now)
                if older is not None:  # the same rank, restarted before its end was detected
                    with contextlib.suppress(OSError):
                        older.shutdown(socket.SHUT_RDWR)
                if worker is not None:
                    head = {
                        "epoch": self.epoch, "worker": worker, "applied": applied.get(worker, 0),
                        "position": self.ledger.positions.get(worker),
                    }  # fmt: skip
                    break
                self.changed.wait(BEAT_S)
            send(connection, Frame(FrameKind.BEAT))
        try:
            send(connection, Frame(FrameKind.WELCOME, head))
        except PeerLost:
            with self.changed:
                self._seats.leave(worker, connection, time.monotonic())
            raise
        return worker

    def _answer(self, connection: socket.socket, worker: int) -> None:
        connection.settimeout(WORKER_SILENCE_S)
        while True:
            frame = receive(connection, self.body_bytes)
            if frame.kind is FrameKind.PULL:
                send(connection, self._weights(worker))
            elif frame.kind is FrameKind.PUSH:
                send(connection, self._push(worker, frame, connection))
            elif frame.kind is FrameKind.RELEASED:
                return
            elif frame.kind is not FrameKind.BEAT:
                raise InvalidFrame("worker said what workers do not", got=frame.kind.name)

    def _weights(self, worker: int) -> Frame:
        with self.changed:
            self._require_leading()
            version = self.ledger.pull(worker)
            weights = self.learner.weights()
        return of_numbers(FrameKind.WEIGHTS, weights, version=version, epoch=self.epoch)

    def _push(self, worker: int, frame: Frame, connection: socket.socket) -> Frame:
        gradient = numbers_of(frame, self.learner.count, self.learner.dtype)
        sequence, base = whole(frame, "sequence"), whole(frame, "base")
        note = BatchReport.from_head(frame.head.get("note"))
        norm = norm_of(gradient)  # outside the lock
        until = time.monotonic() + TURN_S
        with self.changed:
            while True:
                self._require_leading()
                verdict = self.ledger.judge(worker, sequence, base)
                if verdict is not PushVerdict.WAIT:
                    break
                if not self.changed.wait(BEAT_S):
                    send(connection, Frame(FrameKind.BEAT))
                if time.monotonic() > until:
                    self.ledger.give_up_turn()  # that worker is late: the others continue
            if verdict is PushVerdict.APPLY:
                update = Update(worker, sequence, base, self.ledger.version + 1)
                taken = self.steward.judge(note, norm)
                # The lock is held throughout, so no thread sees a partial update.
                self._replicate(update, gradient, note, taken)
                self.take(update, gradient, note, norm, taken)
                self._check_done()
        return Frame(
            FrameKind.ANSWER,
            {"verdict": verdict.value, "version": self.ledger.version, "epoch": self.epoch},
        )

    def take(
        self,
        update: Update,
        gradient: npt.NDArray[Any],
        note: BatchReport,
        norm: float,
        taken: bool,
    ) -> None:
        """Count ``update``, and change the weights if ``taken``; the lock is held."""
        self.ledger.follow(update, note.position)
        if taken:
            self.learner.apply(gradient, update.version, norm)
        applied = AppliedUpdate(
            update=update, note=note, norm=norm, taken=taken, leads=self.epoch > 0
        )
        self.steward.applied(applied)
        self.changed.notify_all()

    def _require_leading(self) -> None:
        if self.epoch == 0 or self.ended is not None:
            raise PeerLost("parameter server does not lead")

    def _check_done(self) -> None:
        pushed = [self.ledger.applied.get(worker, 0) for worker in range(self.terms.workers)]
        if all(each >= self.terms.pushes for each in pushed):
            self.done.set()

    # ---------------------------------------------------------------------------- replicating

    def _replicate(
        self, update: Update, gradient: npt.NDArray[Any], note: BatchReport, taken: bool
    ) -> None:
        if self._standby is None:
            return
        try:
            head = {
                "worker": update.worker, "sequence": update.sequence, "base": update.base,
                "version": update.version, "note": note.to_head(), "taken": taken,
            }  # fmt: skip
            send(self._standby, of_numbers(FrameKind.UPDATE, gradient, **head))
            self._expect_followed(self._standby, update.version)
        except (PeerLost, InvalidFrame) as error:
            self._lose_standby(error)

    def _expect_followed(self, standby: socket.socket, version: int) -> None:
        # Under the lock: a standby that sends byte by byte must not hold it for long.
        frame = receive(standby, 0, within_s=self.terms.silence_s)
        standby.settimeout(self.terms.silence_s)
        if frame.kind is not FrameKind.FOLLOWED or whole(frame, "version") != version:
            raise InvalidFrame("standby did not follow", got=frame.kind.name, wanted=version)

    def _lose_standby(self, error: PacelineError) -> None:
        """Continue alone, unless the standby has taken over; the lock is held."""
        self._standby = None
        log.warning("standby lost: %s", error)
        if not self._claims.claim(self.epoch + 1, self._owner):
            self.epoch = 0
            self.ended = PeerLost("standby has taken over", got=error.what, do="End.")
            self.changed.notify_all()
            raise self.ended
        self.epoch += 1

    def _keep_standby(self, connection: socket.socket) -> None:
        """Send the whole state, then heartbeats between updates."""
        with self.changed:
            if self._standby is not None:
                raise PeerLost("there is a standby already")
            connection.settimeout(self.terms.silence_s)
            said = {"ledger": self.ledger.to_json(), "steward": self.steward.state()}
            state = self.learner.to_bytes(said)
            send(connection, Frame(FrameKind.STATE, {"epoch": self.epoch}, state))
            self._expect_followed(connection, self.ledger.version)
            self._standby = connection
        try:
            while self.ended is None:
                self.released.wait(BEAT_S)
                with self.changed:
                    if self._standby is not connection:
                        return
                    if self.released.is_set():
                        send(connection, Frame(FrameKind.RELEASED))
                        self._standby = None
                        return
                    try:
                        send(connection, Frame(FrameKind.BEAT, {"epoch": self.epoch}))
                    except PeerLost as error:
                        self._lose_standby(error)
                        return
        finally:
            with self.changed:
                if self._standby is connection:
                    self._standby = None


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket on ``host`` (the gang's network, or loopback)."""
    return socket.create_server((host, port), backlog=64)


LAST_WORDS_S = 30.0  # for callers to receive RELEASED


class ServerThread:
    """Runs ``server.serve`` in a thread for the duration of a ``with``, and waits for its end.

    It answers from the start, so that workers learn at once that it does not lead.
    """

    def __init__(self, server: ParameterServer, address: Address, deadline_s: float) -> None:
        self.server, self._deadline_s = server, deadline_s
        self._listener = listen(*address)
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (str(host), int(port))
        self._failed: list[PacelineError] = []
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name="serve", daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._abandoned:
            self._thread.join(min(self._deadline_s, LAST_WORDS_S))
        self._listener.close()
        expected = self._abandoned or self.server.released.is_set()
        if kind is None and self._failed and not expected:
            raise self._failed[0]

    def until_done(self, tick_s: float = 0.2, on_tick: Callable[[], bool] | None = None) -> bool:
        """Return True once every share is complete; raises the error that ended the server.

        ``on_tick`` is called every ``tick_s``; if it returns True, stop waiting and return False.
        """
        while not self.server.done.wait(tick_s):
            if self._failed:
                raise self._failed[0]
            if on_tick is not None and on_tick():
                return False
        return True

    def abandon(self, why: PacelineError) -> None:
        """Stop serving at once and drop all callers; the standby takes over."""
        self._abandoned = True
        self.server.end(why)

    def _serve(self) -> None:
        try:
            self.server.serve(self._listener, self._deadline_s)
        except PacelineError as error:
            self._failed.append(error)
        except OSError as error:  # the listener was closed: the rank is ending
            self._failed.append(PeerLost("parameter server stopped listening", got=error))
