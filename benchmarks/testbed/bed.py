"""Builds the namespaces, bridges and limits of a testbed, changes them live, and reads counters.

One core namespace holds a bridge a rack and a spine; hosts and the origin are namespaces of their
own, one veth each. Commands go to the kernel in batches: 64 hosts are there in about a second.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.testbed import shaping
from benchmarks.testbed.watcher import (
    NETNS,
    SCRATCH,
    namespaces,
    prefix_of_this_process,
    reap_stale,
    remove,
)
from paceline.errors import InvalidInput, MissingTool, NotReady

ORIGIN_ADDRESS = "10.77.200.1"
CORE_ADDRESS = "10.77.200.2"
MAX_HOSTS = 1000  # a bridge has 1,023 ports
CLOSE_S = 30.0

Direction = Literal["both", "in", "out"]
Place = int | Literal["origin", "core"]

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host of the bed."""

    index: int
    name: str  # "node-3", as simulations call it: also the name of its bridge port
    address: str
    rack: int
    rack_name: str
    namespace: str


def why_not() -> str | None:
    """Return why no testbed can be built here, or None where it can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"the testbed needs `{tool}` (Debian: iproute2, util-linux)"
    probe = f"pcprobe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"this machine allows no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None


def start(
    hosts: int = 8,
    rate_mbit: float = 50.0,
    *,
    racks: int = 1,
    oversubscription: float = 1.0,
    origin_mbit: float | None = None,
    congestion: str = "cubic",
    burst_segments: int = shaping.BURST_SEGMENTS,
) -> Testbed:
    """Return a running testbed.

    Hosts fill the racks evenly, in order. A rack's uplink carries its hosts' rates divided by
    ``oversubscription`` (with one rack it is not limited). ``origin_mbit``: as fast as one host
    unless said. ``burst_segments``: how many segments a sender hands down at once. A rate of
    infinity: links as fast as the kernel, one rack.
    Raises MissingTool where there is no root or no ``ip`` and ``tc``.
    """
    if not 1 <= hosts <= MAX_HOSTS or not 1 <= racks <= hosts or rate_mbit <= 0:
        raise InvalidInput(
            "no such testbed",
            got=f"{hosts} hosts in {racks} racks at {rate_mbit} Mbit/s",
            wanted=f"1 to {MAX_HOSTS} hosts, no more racks than hosts, a positive rate",
        )
    if reason := why_not():
        raise MissingTool(reason, do="Run this as root, on Linux with namespaces.")
    reap_stale()
    bed = Testbed(hosts, rate_mbit, racks, oversubscription, origin_mbit or rate_mbit, congestion)
    bed.burst_segments = burst_segments
    try:
        bed._build()
    except BaseException:
        bed.close()
        raise
    return bed


class Testbed:
    """A running testbed; ``close`` it, or use it with ``with``."""

    __test__ = False  # not a class of tests, whatever pytest thinks of its name

    def __init__(
        self,
        hosts: int,
        rate_mbit: float,
        racks: int,
        oversubscription: float,
        origin_mbit: float,
        congestion: str,
    ) -> None:
        self.prefix = prefix_of_this_process(next(_numbers))
        self.rate_mbit, self.origin_mbit = rate_mbit, origin_mbit
        self.racks, self.oversubscription = racks, oversubscription
        self.congestion = congestion
        self.burst_segments = shaping.BURST_SEGMENTS
        self.goodput_mbit = rate_mbit * shaping.GOODPUT
        self.core = f"{self.prefix}-core"
        self.origin = f"{self.prefix}-origin"
        self.hosts = [self._host(index, hosts, racks) for index in range(hosts)]
        self._rates = {each.index: rate_mbit for each in self.hosts}
        self._closed = False
        self._watcher = self._watch()

    def _host(self, index: int, hosts: int, racks: int) -> Host:
        number, rack = index + 1, index * racks // hosts
        name = f"node-{index:0{len(str(hosts - 1))}d}"
        return Host(
            index=index,
            name=name,
            address=f"10.77.{number >> 8}.{number & 255}",
            rack=rack,
            rack_name=f"rack-{rack}",
            namespace=f"{self.prefix}-{name}",
        )

    def _watch(self) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("watcher.py")
        scratch = [str(place / self.prefix) for place in SCRATCH]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), self.prefix, *scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for the owner
        )

    # ── building ─────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> None:
        members = [*(host.namespace for host in self.hosts), self.origin]
        self._ip(None, [f"netns add {name}" for name in (self.core, *members)])
        self._ip(self.core, self._wiring())
        if self.rate_mbit == math.inf:
            self._unlimited(members)
            return
        self._tc(self.core, self._core_limits())
        addresses = [*(host.address for host in self.hosts), ORIGIN_ADDRESS]
        rates = [*(self.rate_mbit for _ in self.hosts), self.origin_mbit]
        _allow(self.congestion)
        script = []
        for name, address, rate in zip(members, addresses, rates, strict=True):
            inside = [
                "link set lo up",
                f"addr add {address}/16 dev eth0",
                # No larger ones either: the shapers would cut them into single segments.
                f"link set eth0 gso_max_segs {self.burst_segments} up",
            ]
            limits = shaping.sending("eth0", rate, len(self.hosts))
            script += [f"ip -n {name} -batch - <<'E'", *inside, "E"]
            script += [f"tc -n {name} -batch - <<'E'", *limits, "E"]
            script += [
                f"nsenter --net={NETNS / name} sysctl -qw "
                f"net.ipv4.tcp_congestion_control={self.congestion} "
                f"net.ipv4.tcp_min_tso_segs={self.burst_segments} "
                "net.ipv4.tcp_no_metrics_save=1"
            ]
        _run(["sh", "-e"], "\n".join(script) + "\n")

    def _unlimited(self, members: Sequence[str]) -> None:
        addresses = [*(host.address for host in self.hosts), ORIGIN_ADDRESS]
        for name, address in zip(members, addresses, strict=True):
            up = ["link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"]
            self._ip(name, up)

    def _wiring(self) -> list[str]:
        lines = [
            "link set lo up",
            "link add spine type bridge",
            f"addr add {CORE_ADDRESS}/16 dev spine",
        ]
        lines += ["link set spine addrgenmode none up"]
        for rack in range(self.racks):
            lines += [
                f"link add rack{rack} type bridge",
                f"link add up{rack} type veth peer name down{rack}",
                f"link set up{rack} master rack{rack} addrgenmode none up",
                f"link set down{rack} master spine addrgenmode none up",
                f"link set rack{rack} addrgenmode none up",
            ]
        for host in self.hosts:
            lines += [
                f"link add {host.name} type veth peer name eth0 netns {host.namespace}",
                f"link set {host.name} master rack{host.rack} addrgenmode none up",
            ]
        return [
            *lines,
            f"link add origin type veth peer name eth0 netns {self.origin}",
            "link set origin master spine addrgenmode none up",
        ]

    def _core_limits(self) -> list[str]:
        lines = [shaping.receiving(host.name, self.rate_mbit) for host in self.hosts]
        lines.append(shaping.receiving("origin", self.origin_mbit))
        if self.racks > 1:
            for rack in range(self.racks):
                rate = self.uplink_mbit(rack)
                lines += [shaping.receiving(f"{way}{rack}", rate) for way in ("up", "down")]
        return lines

    def uplink_mbit(self, rack: int) -> float:
        """Return how fast the uplink of ``rack`` is, in each direction."""
        members = sum(host.rack == rack for host in self.hosts)
        return members * self.rate_mbit / self.oversubscription

    # ── using it ─────────────────────────────────────────────────────────────────────────────────

    def namespace(self, place: Place) -> str:
        """Return the name of the namespace of a host's index, of "origin" or of "core"."""
        if place == "core":
            return self.core
        return self.origin if place == "origin" else self.hosts[place].namespace

    def popen(self, place: Place, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` in a host (by index), the origin or the core; its pid is the program's."""
        inside = ["nsenter", f"--net={NETNS / self.namespace(place)}", "--", *argv]
        return subprocess.Popen(inside, **popen)

    def scratch(self, *, memory: bool = True) -> Path:
        """Return a directory that goes with the bed: in memory (tmpfs), or on the disk."""
        path = SCRATCH[0 if memory else 1] / self.prefix
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def set_rate(self, host: int, rate_mbit: float) -> None:
        """Give a host another rate in both directions, at once and without losing a packet."""
        name = self.hosts[host].name
        self._tc(self.hosts[host].namespace, [shaping.sending_changed("eth0", rate_mbit)])
        self._tc(self.core, [shaping.receiving(name, rate_mbit, "change")])
        self._rates[host] = rate_mbit

    def cut(self, host: int, direction: Direction = "both") -> None:
        """Swallow what a host receives ("in"), sends ("out") or both; nobody is told."""
        if direction in ("both", "in"):
            name = self.hosts[host].name
            self._tc(self.core, [f"qdisc replace dev {name} root handle 9: blackhole"])
        if direction in ("both", "out"):
            self._tc(
                self.hosts[host].namespace, ["qdisc replace dev eth0 root handle 9: blackhole"]
            )

    def mend(self, host: int) -> None:
        """Undo ``cut``."""
        rate, name = self._rates[host], self.hosts[host].name
        self._tc(self.core, [f"qdisc del dev {name} root", shaping.receiving(name, rate)])
        limits = shaping.sending("eth0", rate, len(self.hosts))
        self._tc(self.hosts[host].namespace, ["qdisc del dev eth0 root", *limits])

    def counters(self) -> dict[str, int]:
        """Return bytes so far: ``origin_out``, ``cross_rack`` (what left racks through their
        uplinks) and ``node-3_in``, ``node-3_out`` of each host.

        Counted at bridge ports, where a burst of segments is one packet: headers count less than
        on a wire, payload is exact.
        """
        said = _run(["ip", "-n", self.core, "-s", "-j", "link", "show"])
        links = {each["ifname"]: each["stats64"] for each in json.loads(said)}
        found = {"origin_out": links["origin"]["rx"]["bytes"]}
        found["cross_rack"] = sum(links[f"up{rack}"]["tx"]["bytes"] for rack in range(self.racks))
        for host in self.hosts:
            found[f"{host.name}_in"] = links[host.name]["tx"]["bytes"]
            found[f"{host.name}_out"] = links[host.name]["rx"]["bytes"]
        return found

    def drops(self) -> dict[str, int]:
        """Return how many packets each bridge port and uplink has dropped towards its host."""
        said = _run(["tc", "-n", self.core, "-s", "-j", "qdisc", "show"])
        return {
            each["dev"]: each["drops"]
            for each in json.loads(said)
            if each["kind"] == "tbf" and each["drops"]
        }

    def close(self) -> None:
        """Kill what runs in the bed and remove it; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        try:
            self._watcher.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
        if namespaces(self.prefix):  # the watcher was killed: do it here
            remove(self.prefix, [place / self.prefix for place in SCRATCH])

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ip(self, namespace: str | None, lines: list[str]) -> None:
        where = ["-n", namespace] if namespace else []
        _run(["ip", *where, "-batch", "-"], "\n".join(lines) + "\n")

    def _tc(self, namespace: str, lines: list[str]) -> None:
        _run(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def _allow(congestion: str) -> None:
    """Let namespaces choose ``congestion``: only what the machine allows may be set in them."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    known = allowed.read_text().split()
    if congestion not in known:
        try:
            allowed.write_text(" ".join([*known, congestion]))
        except OSError as error:
            available = allowed.with_name("tcp_available_congestion_control").read_text().strip()
            raise MissingTool(
                "this congestion control cannot be used", got=congestion, wanted=available
            ) from error


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotReady(
            "the testbed could not be built or changed",
            got=(done.stderr or done.stdout).strip()[-500:],
            where=" ".join(argv[:4]),
        )
    return done.stdout
