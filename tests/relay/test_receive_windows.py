"""Several streams into one link have windows in the proportion of their planned rates."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from paceline.relay.transport import HOLD_S, LEAST_BYTES, MOST_BYTES, ReceiveWindow, no_limit


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def window(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # Linux doubles what is asked


def test_an_only_source_keeps_the_kernels_own_sizing(sock: socket.socket) -> None:
    before = window(sock)
    ReceiveWindow(no_limit).apply(sock)
    ReceiveWindow(lambda: 2 * MOST_BYTES / HOLD_S).apply(sock)
    assert window(sock) == before


def test_windows_follow_the_planned_rates(sock: socket.socket) -> None:
    rates = [2e6]
    planned_rate = ReceiveWindow(lambda: rates[0])
    planned_rate.apply(sock)
    assert window(sock) == pytest.approx(2e6 * HOLD_S, rel=0.05)
    rates[0] = 4e6
    planned_rate.apply(sock)
    assert window(sock) == pytest.approx(4e6 * HOLD_S, rel=0.05)
    planned_rate.apply(sock, connections=2)
    assert window(sock) == pytest.approx(2e6 * HOLD_S, rel=0.05)
    rates[0] = 1.0
    planned_rate.apply(sock)
    assert window(sock) == LEAST_BYTES


def test_a_stream_that_gets_the_whole_link_is_let_go(sock: socket.socket) -> None:
    rates = [2e6]
    planned_rate = ReceiveWindow(lambda: rates[0])
    planned_rate.apply(sock)
    rates[0] = 0.0
    planned_rate.apply(sock)
    assert window(sock) >= MOST_BYTES * 0.95
