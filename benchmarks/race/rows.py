"""The rows of the link-bound table: who runs, what goes wrong, how the racks are wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.peers.aria2 import run_aria2, run_aria2_s3
from benchmarks.peers.chain import run_chain
from benchmarks.peers.s3 import run_s3
from benchmarks.peers.torrent import run_torrent
from benchmarks.race.case import Case, Outcome
from benchmarks.race.faults import Fault, kills, slow
from benchmarks.race.relay import run_relay

Trouble = Literal["none", "kill", "slow"]
SLOW_SHARE = 0.2  # of its link that a straggler keeps
OVERSUBSCRIPTION = 4.0
LEAST_RACK = 4  # hosts


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    run: Callable[[Case], Outcome]
    settings: dict[str, Any] = field(default_factory=dict)
    trouble: Trouble = "none"
    racked: bool = False
    everyone_from_origin: bool = False  # takes N times as long: few hosts, a smaller model
    goal: float | None = None  # of seconds / bound
    clumsy: float = 1.5  # roughly how many bounds it takes, for the time budget

    def racks(self, hosts: int) -> int:
        """Return into how many racks ``hosts`` go."""
        return max(2, hosts // max(LEAST_RACK, hosts // 4)) if self.racked else 1

    def faults(self, hosts: int, rate_mbit: float, bound_s: float, seed: int) -> tuple[Fault, ...]:
        """Return what goes wrong: one death in sixteen hosts (in eight of 8), or one straggler."""
        if self.trouble == "kill":
            return kills(hosts, max(1, hosts // 16), bound_s, seed)
        if self.trouble == "slow":
            return slow(hosts, rate_mbit * SLOW_SHARE, bound_s, seed)
        return ()

    def expected_s(self, hosts: int, bound_s: float) -> float:
        """Return roughly how long a run takes, all in."""
        return 15.0 + 0.5 * hosts + bound_s * (hosts if self.everyone_from_origin else self.clumsy)


def _relay(name: str, topology: str, **more: Any) -> Row:
    return Row(name=name, run=run_relay, settings={"topology": topology}, **more)


ROWS = {
    row.name: row
    for row in (
        _relay("auto", "auto", goal=1.03, clumsy=1.1),
        _relay("auto-killed", "auto", trouble="kill", goal=1.06, clumsy=1.2),
        _relay("auto-slowed", "auto", trouble="slow", goal=1.06, clumsy=1.2),
        _relay("auto-racks", "auto", racked=True, goal=1.06, clumsy=1.1),
        Row(
            name="auto-mtls", run=run_relay, settings={"topology": "auto", "mtls": True}, goal=1.06
        ),
        _relay("chain", "chain", clumsy=1.1),
        _relay("tree", "tree", clumsy=2.2),
        _relay("tree-of-chains", "tree-of-chains", clumsy=1.3),
        _relay("mesh", "mesh", clumsy=1.3),
        _relay("direct", "direct", everyone_from_origin=True),
        Row(name="bare-chain", run=run_chain, clumsy=1.2),
        Row(name="bare-chain-tls", run=run_chain, settings={"tls": True}, clumsy=1.2),
        Row(name="libtorrent", run=run_torrent, clumsy=2.0),
        Row(name="aria2", run=run_aria2, clumsy=2.5),
        Row(name="aria2-s3", run=run_aria2_s3, everyone_from_origin=True),
        Row(name="boto3-s3", run=run_s3, everyone_from_origin=True),
    )
}
