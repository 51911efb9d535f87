"""A worker of the parameter server: pull, compute, push, and again; it finds whoever leads.

An answer that did not come is asked for again with the same sequence, so a gradient whose
acknowledgement was lost with a server is not applied twice. Where servers are all away for longer
than ``away_s``, PeerLost.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from paceline.errors import InvalidFrame, InvalidInput, PeerLost
from paceline.training.relaxed.frames import (
    Frame,
    Kind,
    numbers_of,
    of_numbers,
    receive,
    send,
    whole,
)
from paceline.training.relaxed.server import TURN_S, Terms

RETRY_S = 0.05
SILENCES = 2  # of a server, before a worker looks for another
ANSWER_S = TURN_S + 15.0  # a push may wait for another worker's turn first

Compute = Callable[[int, npt.NDArray[Any]], tuple[npt.NDArray[Any], float]]


@dataclass
class Told:
    """What happened to one worker."""

    pushed: int = 0
    refused: int = 0  # too stale: computed anew
    known: int = 0  # applied before its answer was lost
    lost: int = 0  # connections
    waited_s: float = 0.0
    staleness: list[int] = field(default_factory=list)


class Worker:
    """One worker's line to the servers at ``addresses``."""

    def __init__(
        self,
        worker: int,
        addresses: Sequence[tuple[str, int]],
        terms: Terms,
        count: int,
        dtype: str,
        *,
        away_s: float = 30.0,
    ) -> None:
        self._worker, self._addresses, self._terms = worker, list(addresses), terms
        self._count, self._dtype, self._away_s = count, dtype, away_s
        self._connection: socket.socket | None = None
        self._applied = 0
        self.told = Told()

    def run(self, compute: Compute, on_push: Callable[[int], None] | None = None) -> Told:
        """Push ``terms.pushes`` gradients, going on after the last that was applied; return why
        it took so long.

        ``compute(sequence, weights)`` returns gradient and loss of the ``sequence``-th share.
        """
        try:
            self._again(lambda connection: connection)
            sequence = self._applied + 1
            while sequence <= self._terms.pushes:
                base, weights = self._again(self._pull)
                gradient, loss = compute(sequence, weights)
                verdict = self._deliver(sequence, base, gradient, loss)
                if verdict == "stale":
                    self.told.refused += 1
                    continue
                self.told.pushed += 1
                self.told.known += verdict == "known"
                if on_push is not None:
                    on_push(sequence)
                sequence += 1
            with contextlib.suppress(PeerLost):  # all is said: a server may be gone by now
                if self._connection is not None:
                    send(self._connection, Frame(Kind.RELEASED))
        finally:
            self._close()
        return self.told

    def _deliver(self, sequence: int, base: int, gradient: npt.NDArray[Any], loss: float) -> str:
        started = time.monotonic()

        def push(connection: socket.socket) -> Frame:
            frame = of_numbers(Kind.PUSH, gradient, sequence=sequence, base=base, loss=loss)
            send(connection, frame)
            return _answer(connection, Kind.ANSWER, 0)

        answer = self._again(push)
        self.told.waited_s += time.monotonic() - started
        verdict = str(answer.head.get("verdict"))
        if verdict == "apply":
            self.told.staleness.append(whole(answer, "version") - 1 - base)
        return verdict

    def _pull(self, connection: socket.socket) -> tuple[int, npt.NDArray[Any]]:
        send(connection, Frame(Kind.PULL))
        frame = _answer(connection, Kind.WEIGHTS, self._count * 8 + 1024)
        return whole(frame, "version"), numbers_of(frame, self._count, self._dtype)

    def _again(self, ask: Callable[[socket.socket], Any]) -> Any:
        """Return what ``ask`` gives, on a new connection as often as one breaks."""
        until: float | None = None
        while True:
            try:
                return ask(self._connected())
            except PeerLost as error:
                self._close()
                now = time.monotonic()
                until = until if until is not None else now + self._away_s
                if now > until:
                    raise PeerLost(
                        "no parameter server leads",
                        got=error.what,
                        wanted=f"one within {self._away_s:.0f} s",
                        where=self._addresses,
                    ) from error
                time.sleep(RETRY_S)

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection = self._find()
        return self._connection

    def _find(self) -> socket.socket:
        said: Any = "nobody answers"
        for address in self._addresses:
            try:
                connection = socket.create_connection(address, timeout=self._terms.silence_s)
            except OSError as error:
                said = error
                continue
            try:
                return self._greet(connection)
            except PeerLost as error:
                said = error.what
                connection.close()
        self.told.lost += 1
        raise PeerLost("no parameter server leads", got=said)

    def _greet(self, connection: socket.socket) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"role": "worker", "worker": self._worker, "key": self._terms.key}
        send(connection, Frame(Kind.HELLO, hello))
        frame = receive(connection, 0)
        if frame.kind is not Kind.WELCOME:
            raise PeerLost("parameter server does not lead", got=frame.kind.name)
        self._applied = whole(frame, "applied")
        # A server that lives beats while we wait for our turn; one that is frozen does not.
        connection.settimeout(SILENCES * self._terms.silence_s)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _answer(connection: socket.socket, wanted: Kind, max_body_bytes: int) -> Frame:
    until = time.monotonic() + ANSWER_S
    while True:
        frame = receive(connection, max_body_bytes)
        if frame.kind is Kind.REFUSED:
            raise InvalidInput("parameter server refused", got=frame.head.get("message"))
        if frame.kind is wanted:
            return frame
        if frame.kind is not Kind.BEAT:
            raise InvalidFrame("parameter server said something else", got=frame.kind.name)
        if time.monotonic() > until:
            raise PeerLost("parameter server does not answer", wanted=f"within {ANSWER_S:.0f} s")
