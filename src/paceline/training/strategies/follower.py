"""The standby of a parameter server: find the leader, copy its state, apply each update, take over.

``ranks`` and ``job`` decide when to follow and whom.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import CorruptData, InvalidFrame, PeerLost
from paceline.training.launcher.independent_restart import STATE_LOST_EXIT
from paceline.training.strategies.frames import Frame, FrameKind, numbers_of, receive, send, whole
from paceline.training.strategies.learner import norm_of
from paceline.training.strategies.protocol import GREET_S, Address, BatchReport
from paceline.training.strategies.server import ParameterServer
from paceline.training.strategies.update_ledger import Update, UpdateLedger

log = logging.getLogger(__name__)

RETRY_S = 0.1


class NoLeader(PeerLost):
    """No leading server was found whose state could be copied: it is lost, or never existed."""

    exit_code = STATE_LOST_EXIT


def follow(
    server: ParameterServer,
    addresses: Callable[[], Sequence[Address]],
    deadline_s: float,
    on_word: Callable[[], None] = lambda: None,
) -> str:
    """Follow the leader; return "released" where all work is done, or "leads" after a takeover.

    When the leader is lost, this rank claims the next epoch and ``server`` leads; its ``serve`` may
    run in another thread meanwhile. ``on_word`` is called for each frame from the leader. Raises
    NobodyLeads where none is found within ``deadline_s``, PeerLost where another rank holds the
    claim.
    """
    leader, state = _met(server, addresses, deadline_s)
    with leader:
        epoch = whole(state, "epoch")
        try:
            _take_state(server, bytes(state.body))
            send(leader, Frame(FrameKind.FOLLOWED, {"version": server.ledger.version}))
            leader.settimeout(server.terms.silence_s)
            while True:
                frame = receive(leader, server.body_bytes)
                on_word()
                if frame.kind is FrameKind.RELEASED:
                    server.done.set()
                    server.release()
                    return "released"
                if frame.kind is FrameKind.BEAT:
                    epoch = whole(frame, "epoch")
                    continue
                _take_update(server, leader, frame)
        except PeerLost as error:
            log.warning("leader lost: %s", error)
    server.lead(epoch + 1)
    return "leads"


def _met(
    server: ParameterServer, addresses: Callable[[], Sequence[Address]], deadline_s: float
) -> tuple[socket.socket, Frame]:
    """Return a connection to the leader, and the state that it sent."""
    until = time.monotonic() + deadline_s
    said: Any = "nobody answers"
    while True:
        for address in addresses():
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection(address, timeout=GREET_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send(
                    connection, Frame(FrameKind.HELLO, {"role": "standby", "key": server.terms.key})
                )
                frame = receive(connection, server.state_bytes)
                if frame.kind is FrameKind.STATE:
                    return connection, frame
                said = frame.kind.name
            except (OSError, PeerLost) as error:
                said = error
            if connection is not None:
                connection.close()
        if time.monotonic() > until:
            raise NoLeader("no parameter server to follow", got=said, where=list(addresses()))
        time.sleep(RETRY_S)


def _take_state(server: ParameterServer, raw: bytes) -> None:
    with server.changed:
        said = server.learner.from_bytes(raw)
        try:
            ledger, steward = said["ledger"], said["steward"]
        except KeyError as error:
            raise CorruptData("state of a parameter server is incomplete", got=error) from error
        server.ledger = UpdateLedger.from_json(ledger, server.terms.max_staleness)
        server.steward.restore(steward)


def _take_update(server: ParameterServer, leader: socket.socket, frame: Frame) -> None:
    if frame.kind is not FrameKind.UPDATE:
        raise InvalidFrame("leader said what leaders do not", got=frame.kind.name)
    gradient = numbers_of(frame, server.learner.count, server.learner.dtype)
    update = Update(*(whole(frame, each) for each in ("worker", "sequence", "base", "version")))
    note = BatchReport.from_head(frame.head.get("note"))
    taken = frame.head.get("taken") is True
    norm = norm_of(gradient)
    if taken and not math.isfinite(norm):
        raise InvalidFrame("leader took a gradient that is not finite", got=norm)
    with server.changed:
        server.take(update, gradient, note, norm, taken)
    send(leader, Frame(FrameKind.FOLLOWED, {"version": update.version}))
