"""Faults of a race: chosen from a seed, done to real processes and links, noted as they happened.

What was observed goes into the result as ``{"at_s", "worker", "kind", "value"}``, seconds from the
accepted plan, as a simulation reads it (`paceline simulate --faults`) to replay the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from benchmarks.testbed import Testbed, shaping

EARLIEST, LATEST = 0.1, 0.85  # of the bound: during the transfer, not around it


@dataclass(frozen=True)
class Fault:
    """Something that happens to a host ``at_s`` after the start."""

    kind: Literal["kill", "freeze", "rate", "silence"]
    host: int
    at_s: float
    rate_mbit: float = 0.0  # of "rate": the host's new one


def kills(hosts: int, count: int, bound_s: float, seed: int) -> tuple[Fault, ...]:
    """Return ``count`` deaths of different hosts at random moments of the transfer."""
    random = Random(f"kills/{seed}")
    victims = random.sample(range(hosts), count)
    return tuple(
        Fault("kill", host, round(bound_s * random.uniform(EARLIEST, LATEST), 3))
        for host in victims
    )


def slow(hosts: int, rate_mbit: float, bound_s: float, seed: int) -> tuple[Fault, ...]:
    """Return one host that falls to ``rate_mbit`` at a random moment of the transfer."""
    random = Random(f"slow/{seed}")
    at_s = round(bound_s * random.uniform(EARLIEST, LATEST), 3)
    return (Fault("rate", random.randrange(hosts), at_s, rate_mbit),)


class Injector:
    """Does ``faults`` on a thread, from a start at ``time.monotonic()`` = ``start_s``."""

    def __init__(
        self,
        bed: Testbed,
        faults: tuple[Fault, ...],
        start_s: float,
        *,
        kill: Callable[[int], None],
        freeze: Callable[[int], None],
    ) -> None:
        self.observed: list[dict[str, Any]] = []
        self._bed, self._start_s = bed, start_s
        self._faults = sorted(faults, key=lambda each: each.at_s)
        self._kill, self._freeze = kill, freeze
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")
        self._thread.start()

    def stop(self) -> None:
        """Let what has not happened yet not happen."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for fault in self._faults:
            if self._over.wait(max(0.0, self._start_s + fault.at_s - time.monotonic())):
                return
            match fault.kind:
                case "kill":
                    self._kill(fault.host)
                case "freeze":
                    self._freeze(fault.host)
                case "rate":
                    self._bed.set_rate(fault.host, fault.rate_mbit)
                case "silence":
                    self._bed.cut(fault.host)
            at_s = round(time.monotonic() - self._start_s, 3)
            said = {"at_s": at_s, "kind": fault.kind, "worker": self._bed.hosts[fault.host].name}
            if fault.kind == "rate":
                said["value"] = fault.rate_mbit * shaping.GOODPUT  # simulations count goodput
            self.observed.append(said)
