"""The parameter server and its standby: one object that follows, and leads once it may.

A push is answered only after the standby (where there is one) has applied it too: what was
acknowledged survives the server. When the standby is lost, the server goes on alone if it gets the
next epoch's claim, and ends where the standby was faster; see ``claims``. A standby that joins
later is sent the whole state first.

Threads: one for each connection, at most ``workers + 4``; one lock over ledger and weights. Every
socket has a deadline. Workers and standby must beat (``BEAT_S``) or they count as gone.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidFrame, InvalidInput, PacelineError, PeerLost, TemporaryError
from paceline.training.relaxed.claims import Claims
from paceline.training.relaxed.frames import (
    Frame,
    Kind,
    numbers_of,
    of_numbers,
    receive,
    require_key,
    send,
    whole,
)
from paceline.training.relaxed.learner import Learner
from paceline.training.relaxed.ledger import Ledger, Update, Verdict

log = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 3.0  # a leading server that is silent for so long is taken over from
GREET_S = 5.0
WORKER_SILENCE_S = 600.0  # a worker computes meanwhile; a dead one's connection breaks at once
TURN_S = 30.0  # for whoever was refused: nobody waits longer than this for it


@dataclass(frozen=True)
class Terms:
    """What server, standby and workers have agreed on."""

    key: str  # the gang's, "" only in a test
    workers: int
    pushes: int  # of each worker; then all is done
    max_staleness: int
    silence_s: float = SILENCE_S


class Server:
    """Serves weights while it leads; else it follows the leader and tells callers to ask there.

    ``on_update`` hears of every update that is applied here, leading or not.
    """

    def __init__(
        self,
        learner: Learner,
        terms: Terms,
        claims: Claims,
        owner: str,
        *,
        on_update: Callable[[Update, float], None] | None = None,
    ) -> None:
        self.learner, self.terms = learner, terms
        self.ledger = Ledger(terms.max_staleness)
        self.epoch = 0  # 0: it does not lead
        self.done = threading.Event()  # every worker pushed all it had
        self.ended: PacelineError | None = None  # why it gave up
        self._claims, self._owner = claims, owner
        self._on_update = on_update
        self._changed = threading.Condition()
        self._standby: socket.socket | None = None
        self._body_bytes = learner.count * 8 + 1024
        self._state_bytes = learner.count * 8 * 4 + (16 << 20)
        self._threads = threading.BoundedSemaphore(terms.workers + 4)

    # -------------------------------------------------------------------------------- leading

    def lead(self, epoch: int = 1) -> None:
        """Begin to serve. Raises PeerLost where another has claimed ``epoch``."""
        if not self._claims.claim(epoch, self._owner):
            raise PeerLost("another parameter server leads", got=f"epoch {epoch}", do="End.")
        with self._changed:
            self.epoch = epoch
            self._check_done()
            self._changed.notify_all()
        log.warning("parameter server leads owner=%s epoch=%d version=%d", self._owner, epoch,
                    self.ledger.version)  # fmt: skip

    def serve(self, listener: socket.socket, deadline_s: float) -> None:
        """Answer callers until all is done and said, or ``deadline_s`` passed.

        Raises what ended it: PeerLost where another leads or the deadline passed.
        """
        listener.settimeout(0.2)
        until = time.monotonic() + deadline_s
        threads: list[threading.Thread] = []
        while not self._finished(threads):
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

    def _finished(self, threads: list[threading.Thread]) -> bool:
        return self.done.is_set() and self.epoch > 0 and not any(t.is_alive() for t in threads)

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(GREET_S)
                hello = receive(connection, 0)
                require_key(hello, self.terms.key)
                if self.epoch == 0:
                    send(connection, Frame(Kind.NOT_LEADING, {"version": self.ledger.version}))
                elif hello.head.get("role") == "standby":
                    self._keep_standby(connection)
                else:
                    self._keep_worker(connection, whole(hello, "worker"))
        except TemporaryError as error:
            log.info("caller went away: %s", error)
        except PacelineError as error:
            log.warning("caller was refused: %s", error)
        finally:
            self._threads.release()

    def _keep_worker(self, connection: socket.socket, worker: int) -> None:
        if worker >= self.terms.workers:
            raise InvalidInput("no such worker", got=worker, wanted=f"below {self.terms.workers}")
        with self._changed:
            head = {"epoch": self.epoch, "applied": self.ledger.applied.get(worker, 0)}
        send(connection, Frame(Kind.WELCOME, head))
        connection.settimeout(WORKER_SILENCE_S)
        try:
            while True:
                frame = receive(connection, self._body_bytes)
                if frame.kind is Kind.PULL:
                    send(connection, self._weights(worker))
                elif frame.kind is Kind.PUSH:
                    send(connection, self._push(worker, frame, connection))
                elif frame.kind is Kind.RELEASED:
                    return
                elif frame.kind is not Kind.BEAT:
                    raise InvalidFrame("worker said what workers do not", got=frame.kind.name)
        except (InvalidInput, InvalidFrame) as error:
            with contextlib.suppress(PeerLost):
                send(connection, Frame(Kind.REFUSED, {"message": error.one_line()}))
            raise
        finally:
            with self._changed:
                self.ledger.release(worker)
                self._changed.notify_all()

    def _weights(self, worker: int) -> Frame:
        with self._changed:
            version = self.ledger.pull(worker)
            weights = self.learner.weights()
        return of_numbers(Kind.WEIGHTS, weights, version=version, epoch=self.epoch)

    def _push(self, worker: int, frame: Frame, connection: socket.socket) -> Frame:
        gradient = numbers_of(frame, self.learner.count, self.learner.dtype)
        sequence, base = whole(frame, "sequence"), whole(frame, "base")
        loss = float(frame.head.get("loss", 0.0))
        until = time.monotonic() + TURN_S
        with self._changed:
            while True:
                self._require_leading()
                verdict = self.ledger.judge(worker, sequence, base)
                if verdict is not Verdict.WAIT:
                    break
                if not self._changed.wait(BEAT_S):
                    send(connection, Frame(Kind.BEAT))
                if time.monotonic() > until:
                    self.ledger.give_up_turn()  # who is next does not come: the others go on
            if verdict is Verdict.APPLY:
                self._apply(Update(worker, sequence, base, self.ledger.version + 1), gradient, loss)
            return Frame(
                Kind.ANSWER,
                {"verdict": verdict.value, "version": self.ledger.version, "epoch": self.epoch},
            )

    def _apply(self, update: Update, gradient: npt.NDArray[Any], loss: float) -> None:
        """Replicate, then apply; the lock is held, so nobody sees what is only half so."""
        self._require_finite(gradient)
        self._replicate(update, gradient, loss)
        self._take(update, gradient, loss)
        self._check_done()

    def _take(self, update: Update, gradient: npt.NDArray[Any], loss: float) -> None:
        self.ledger.follow(update)
        self.learner.apply(gradient, update.version)
        self._changed.notify_all()
        if self._on_update is not None:
            self._on_update(update, loss)

    def _require_finite(self, gradient: npt.NDArray[Any]) -> None:
        if not np.isfinite(gradient).all():
            raise InvalidInput("gradient is not finite", do="Lower training.learning_rate.")

    def _require_leading(self) -> None:
        if self.epoch == 0 or self.ended is not None:
            raise PeerLost("parameter server does not lead")

    def _check_done(self) -> None:
        pushed = [self.ledger.applied.get(worker, 0) for worker in range(self.terms.workers)]
        if all(each >= self.terms.pushes for each in pushed):
            self.done.set()

    # ---------------------------------------------------------------------------- replicating

    def _replicate(self, update: Update, gradient: npt.NDArray[Any], loss: float) -> None:
        if self._standby is None:
            return
        try:
            head = {
                "worker": update.worker, "sequence": update.sequence, "base": update.base,
                "version": update.version, "loss": loss,
            }  # fmt: skip
            send(self._standby, of_numbers(Kind.UPDATE, gradient, **head))
            self._expect_followed(self._standby, update.version)
        except (PeerLost, InvalidFrame) as error:
            self._lose_standby(error)

    def _expect_followed(self, standby: socket.socket, version: int) -> None:
        frame = receive(standby, 0)
        if frame.kind is not Kind.FOLLOWED or whole(frame, "version") != version:
            raise InvalidFrame("standby did not follow", got=frame.kind.name, wanted=version)

    def _lose_standby(self, error: PacelineError) -> None:
        """Go on alone, unless the standby has taken over; the lock is held."""
        self._standby = None
        log.warning("standby lost: %s", error)
        if not self._claims.claim(self.epoch + 1, self._owner):
            self.epoch = 0
            self.ended = PeerLost("standby has taken over", got=error.what, do="End.")
            self._changed.notify_all()
            raise self.ended
        self.epoch += 1

    def _keep_standby(self, connection: socket.socket) -> None:
        """Send the whole state, then a beat whenever no update says that we live."""
        with self._changed:
            if self._standby is not None:
                raise InvalidInput("there is a standby already")
            connection.settimeout(self.terms.silence_s)
            state = self.learner.to_bytes(self.ledger.to_json())
            send(connection, Frame(Kind.STATE, {"epoch": self.epoch}, state))
            self._expect_followed(connection, self.ledger.version)
            self._standby = connection
        try:
            while self.ended is None:
                time.sleep(BEAT_S)
                with self._changed:
                    if self._standby is not connection:
                        return
                    if self.done.is_set():
                        send(connection, Frame(Kind.RELEASED))
                        self._standby = None
                        return
                    try:
                        send(connection, Frame(Kind.BEAT, {"epoch": self.epoch}))
                    except PeerLost as error:
                        self._lose_standby(error)
                        return
        finally:
            with self._changed:
                if self._standby is connection:
                    self._standby = None

    # ------------------------------------------------------------------------------- following

    def follow(self, address: tuple[str, int], deadline_s: float) -> str:
        """Follow the leader at ``address``; return "released" where all is done, or "leads".

        When the leader is lost, the next epoch is claimed and this server leads; ``serve`` may run
        in another thread meanwhile. Raises PeerLost where the claim is another's, or the leader was
        never met within ``deadline_s``.
        """
        with _connected(address, deadline_s, self.terms, {"role": "standby"}) as leader:
            leader.settimeout(self.terms.silence_s)
            epoch = 0
            try:
                state = receive(leader, self._state_bytes)
                if state.kind is not Kind.STATE:
                    raise PeerLost("leader does not take a standby", got=state.kind.name)
                epoch = whole(state, "epoch")
                self._take_state(bytes(state.body))
                send(leader, Frame(Kind.FOLLOWED, {"version": self.ledger.version}))
                while True:
                    frame = receive(leader, self._body_bytes)
                    if frame.kind is Kind.RELEASED:
                        self.done.set()
                        return "released"
                    if frame.kind is Kind.BEAT:
                        epoch = whole(frame, "epoch")
                        continue
                    self._follow_update(leader, frame)
            except PeerLost as error:
                if epoch == 0:
                    raise
                log.warning("leader lost: %s", error)
        self.lead(epoch + 1)
        return "leads"

    def _take_state(self, raw: bytes) -> None:
        with self._changed:
            said = self.learner.from_bytes(raw)
            self.ledger = Ledger.from_json(said, self.terms.max_staleness)

    def _follow_update(self, leader: socket.socket, frame: Frame) -> None:
        if frame.kind is not Kind.UPDATE:
            raise InvalidFrame("leader said what leaders do not", got=frame.kind.name)
        gradient = numbers_of(frame, self.learner.count, self.learner.dtype)
        update = Update(*(whole(frame, each) for each in ("worker", "sequence", "base", "version")))
        with self._changed:
            self._take(update, gradient, float(frame.head.get("loss", 0.0)))
        send(leader, Frame(Kind.FOLLOWED, {"version": update.version}))


@contextlib.contextmanager
def _connected(
    address: tuple[str, int], deadline_s: float, terms: Terms, hello: dict[str, Any]
) -> Iterator[socket.socket]:
    connection = connect(address, deadline_s)
    with connection:
        send(connection, Frame(Kind.HELLO, {**hello, "key": terms.key}))
        yield connection


def connect(address: tuple[str, int], deadline_s: float) -> socket.socket:
    """Return a connection to ``address``, tried again until ``deadline_s`` passed (PeerLost)."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=GREET_S)
        except OSError as error:
            if time.monotonic() > until:
                raise PeerLost("no parameter server", got=error, where=address) from error
            time.sleep(0.05)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening socket on ``host`` (the gang's network, or loopback)."""
    return socket.create_server((host, port), backlog=64)
