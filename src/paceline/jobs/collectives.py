"""How long collectives take between ranks, by latency α and bandwidth β of the links.

A ring, a ring in each host with one between hosts, or a tree, whichever is fastest (Thakur et al.
2005; Sanders et al. 2009 for trees at full bandwidth). Nothing else uses the links meanwhile. All
times in seconds, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, prod

from paceline.config import AcceleratorSettings, LinkSettings
from paceline.training.parallel import AXES, MeshSpec

US, GB = 1e-6, 1e9


@dataclass(frozen=True)
class RankGroup:
    """The ranks along one axis of a mesh: ``inside`` on each of ``hosts`` hosts."""

    inside: int
    hosts: int
    near: LinkSettings  # between ranks of a host
    far: LinkSettings  # of one rank to another host

    @classmethod
    def along(cls, axis: str, spec: MeshSpec, accelerator: AcceleratorSettings) -> RankGroup:
        """Return the ranks along ``axis``; ranks fill one host after another, ``tp`` innermost.

        "weights" are those that share a replica's parameters: ``shard`` and ``cp``.
        """
        if axis == "weights":
            return cls.of(spec.weight_shards, spec.tp, accelerator)
        inner = spec.shape[AXES.index(axis) + 1 :]
        return cls.of(getattr(spec, axis), prod(inner), accelerator)

    @classmethod
    def of(cls, size: int, stride: int, accelerator: AcceleratorSettings) -> RankGroup:
        """Return ``size`` ranks, of which each is the ``stride``-th after the one before."""
        inside = max(1, min(size, accelerator.per_host // stride))
        return cls(inside, ceil(size / inside), accelerator.inside, accelerator.between)

    @property
    def size(self) -> int:
        """Return the number of ranks, as many on each host."""
        return self.inside * self.hosts

    def all_gather(self, size: float) -> float:
        """Return the time after which each rank has ``size`` bytes, of which it held its share.

        A reduce-scatter of ``size`` bytes takes as long.
        """
        if self.hosts == 1:
            return _ring(self.inside, size, self.near)
        levels = _ring(self.hosts, size / self.inside, self.far)
        levels += _ring(self.inside, size, self.near)
        return min(levels, _ring(self.size, size, self._slowest))

    def all_reduce(self, size: float) -> float:
        """Return the time after which each rank has the sum of all ranks' ``size`` bytes."""
        if self.size == 1:
            return 0.0
        depth_s = ceil(log2(self.inside)) * self.near.latency_us * US
        depth_s += ceil(log2(self.hosts)) * self.far.latency_us * US
        tree = 2 * (depth_s + size / (self._slowest.gb_s * GB))
        return min(2 * self.all_gather(size), tree)

    def send(self, size: float) -> float:
        """Return the time of ``size`` bytes from one rank to the next, on another host if any."""
        return (
            0.0 if self.size == 1 else _transfer(size, self.near if self.hosts == 1 else self.far)
        )

    def all_to_all(self, size: float) -> float:
        """Return the time after which each of the ranks has an equal part of every other's ``size``
        bytes, each over a link of its own."""
        return _ring(self.size, size, self.near if self.hosts == 1 else self.far)

    @property
    def _slowest(self) -> LinkSettings:
        """Return the link that bounds a ring through all hosts: each host sends on all its own."""
        if self.hosts == 1:
            return self.near
        rate = min(self.near.gb_s, self.inside * self.far.gb_s)
        return LinkSettings(latency_us=self.far.latency_us, gb_s=rate)


def _transfer(size: float, link: LinkSettings) -> float:
    return link.latency_us * US + size / (link.gb_s * GB)


def _ring(ranks: int, size: float, link: LinkSettings) -> float:
    return (ranks - 1) * _transfer(size / ranks, link)
