"""The limits as lines of ``tc -batch``: who may send and receive how fast. Text only; runs nothing.

A host sends through htb with one class a destination, so that its streams share fairly (one FIFO
gave 97/92/5 where classes give 65/65/62) and receives through tbf at its bridge port. Neither fq
nor netem is needed. Rates are those of the wire: a TCP stream sees ``goodput``.
"""

from __future__ import annotations

from collections.abc import Iterator

GOODPUT = 1448 / 1514  # payload of a full segment by what the shapers count: Ethernet frames
CLASSES = 64  # destinations with a class of their own; beyond, they share by address
QUANTUM = 6056  # four frames: what a class may send before the next one's turn
# A sender hands its card up to 44 segments at once on a fast link, and the receiver's card gathers
# them again: 10 here, although the link is slow. The kernel's own choice for a slow link, 2, costs
# five times the packets, and acknowledging every 2 segments takes 2 % of a full-duplex link.
BURST_SEGMENTS = 10
BURST_S = 0.004  # what an idle link may catch up; 0.01 % of a transfer of a minute
LEAST_BURST = 16 * 1024
QUEUE_S = 0.05
LEAST_QUEUE = 96 * 1024  # two of the largest segments that a sender hands down, with room


def burst_bytes(rate_mbit: float) -> int:
    """Return how much may pass at once after a pause."""
    return max(LEAST_BURST, int(rate_mbit * 1e6 / 8 * BURST_S))


def queue_bytes(rate_mbit: float) -> int:
    """Return how much may wait before the shaper drops: 50 ms of the link.

    A sender fills its own queue only as far as TCP small queues lets it (about 1 ms), so this
    bounds what several senders pile up before one receiver.
    """
    return max(LEAST_QUEUE, int(rate_mbit * 1e6 / 8 * QUEUE_S))


def _kbit(rate_mbit: float) -> str:
    return f"{max(8, round(rate_mbit * 1000))}kbit"


def sending(device: str, rate_mbit: float, destinations: int) -> Iterator[str]:
    """Yield what limits sending on ``device``: one class for each of ``destinations``."""
    classes = max(1, min(destinations, CLASSES))
    burst, queue = burst_bytes(rate_mbit), queue_bytes(rate_mbit)
    yield f"qdisc add dev {device} root handle 1: htb default 2"
    yield f"class add dev {device} parent 1: classid 1:1 {_root(rate_mbit)}"
    for number in range(2, 3 + classes):  # 1:2 takes what goes elsewhere: ARP, the origin
        minor = f"{number:x}"
        yield (
            f"class add dev {device} parent 1:1 classid 1:{minor} htb rate 8kbit "
            f"ceil {_kbit(10_000)} burst 2k cburst {burst} quantum {QUANTUM}"
        )
        handle = f"{0x100 + number:x}"
        yield f"qdisc add dev {device} parent 1:{minor} handle {handle}: bfifo limit {queue}"
    match = f"filter add dev {device} parent 1: prio 1 protocol ip"
    yield f"{match} handle 2: u32 divisor 256"
    yield (f"{match} u32 ht 800:: match ip dst 10.0.0.0/8 hashkey mask 0x000000ff at 16 link 2:")
    for low in range(min(destinations + 1, 256)):
        yield f"{match} u32 ht 2:{low:x}: match u32 0 0 flowid 1:{3 + low % classes:x}"


def sending_changed(device: str, rate_mbit: float) -> str:
    """Return what gives ``device`` another rate of sending, without losing what waits."""
    return f"class change dev {device} parent 1: classid 1:1 {_root(rate_mbit)}"


def receiving(device: str, rate_mbit: float, verb: str = "add") -> str:
    """Return what limits what leaves ``device``: a bridge port towards its host, an uplink."""
    return (
        f"qdisc {verb} dev {device} root handle 1: tbf rate {_kbit(rate_mbit)} "
        f"burst {burst_bytes(rate_mbit)} limit {queue_bytes(rate_mbit)}"
    )


def _root(rate_mbit: float) -> str:
    burst = burst_bytes(rate_mbit)
    return (
        f"htb rate {_kbit(rate_mbit)} ceil {_kbit(rate_mbit)} "
        f"burst {burst} cburst {burst} quantum {QUANTUM}"
    )
