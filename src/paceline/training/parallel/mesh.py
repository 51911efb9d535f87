"""Device mesh: ``MeshSpec`` is the arithmetic, ``open_mesh`` opens the process groups.

Five axes, outermost first: ``pp`` (groups of layers), ``dp`` (replicas), ``shard`` (parts of
parameters in a replica), ``cp`` (parts of each row), ``tp`` (parts of each matrix). Ranks with the
most traffic are neighbours, so ``tp`` stays on one host. MeshSpec does not need torch.distributed,
so a driver can reject a mesh before any rank starts. Does not depend on models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.config import MeshSettings
from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "shard", "cp", "tp")


@dataclass(frozen=True)
class MeshSpec:
    """The number of ranks along each axis."""

    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @classmethod
    def of(cls, settings: MeshSettings, ranks: int) -> MeshSpec:
        """Return the mesh of ``ranks`` ranks; ``dp = 0`` takes the remaining factor.

        Raises InvalidInput where the product of the axes is not the number of ranks.
        """
        fixed = settings.ranks_per_replica
        axes = f"shard {settings.shard} x tp {settings.tp} x pp {settings.pp}"
        axes += f" x cp {settings.cp}" if settings.cp > 1 else ""
        if settings.dp == 0:
            if ranks < 1 or ranks % fixed:
                raise InvalidInput(
                    "mesh does not divide the ranks",
                    got=f"{ranks} ranks, {axes}",
                    wanted=f"a multiple of {fixed} ranks",
                    do="Change training.ranks or training.mesh.",
                )
            return cls(ranks // fixed, settings.shard, settings.tp, settings.pp, settings.cp)
        if settings.dp * fixed != ranks:
            raise InvalidInput(
                "mesh does not fit the ranks",
                got=f"{ranks} ranks, dp {settings.dp} x {axes}",
                wanted=f"{settings.dp * fixed} ranks",
                do="Change training.ranks or training.mesh; dp 0 takes whatever is left.",
            )
        return cls(settings.dp, settings.shard, settings.tp, settings.pp, settings.cp)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.shape)

    @property
    def weight_shards(self) -> int:
        """Return the number of parts of parameters in a replica: ranks of one ``cp``, which read
        the same rows, share them as ranks of ``shard`` do."""
        return self.shard * self.cp

    @property
    def groups(self) -> dict[str, int]:
        """Return the sizes of the dimensions of a mesh of parameters: ``cp`` is in ``shard``."""
        return {"pp": self.pp, "dp": self.dp, "shard": self.weight_shards, "tp": self.tp}

    @property
    def data_world(self) -> int:
        """Return the number of shares of a global batch."""
        return self.dp * self.shard

    @property
    def axes(self) -> tuple[str, ...]:
        """Return those of ``groups`` that need process groups, in order.

        An axis of size 1 needs none; torch would create a group for each of its ranks, on all ranks
        one after the other: idle threads, and 3,000 rounds at 1,000 ranks. A ``shard`` of 1 is
        included where FSDP keeps replicas of cut models equal.
        """
        kept = {"shard"} if self.dp > 1 and self.tp * self.pp > 1 else set()
        return tuple(axis for axis, size in self.groups.items() if size > 1 or axis in kept)

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of ``rank`` by axis."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def __str__(self) -> str:
        parts = [f"{axis}{size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return "x".join(parts) or "single"


@dataclass(frozen=True)
class Mesh:
    """This rank's position on the mesh, and its process groups (none for a single rank)."""

    spec: MeshSpec
    rank: int = 0
    device_type: str = "cpu"
    device_mesh: DeviceMesh | None = None  # its dimensions are ``spec.axes``
    row_group: ProcessGroup | None = None  # ranks of this one's ``cp``

    @property
    def data_rank(self) -> int:
        """Return the index of the share of the global batch that this rank reads."""
        place = self.spec.place(self.rank)
        return place["dp"] * self.spec.shard + place["shard"]

    @property
    def data_world(self) -> int:
        """Return the number of shares."""
        return self.spec.data_world

    @property
    def stage(self) -> int:
        """Return this rank's position in the pipeline."""
        return self.spec.place(self.rank)["pp"]

    @property
    def first_stage(self) -> bool:
        """Return whether this rank holds the embedding."""
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        """Return whether this rank computes the loss."""
        return self.stage == self.spec.pp - 1

    def of(self, *axes: str) -> DeviceMesh:
        """Return the sub-mesh along ``axes`` that this rank is in; the axes must have groups."""
        assert self.device_mesh is not None, "a rank alone has no mesh"
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, axis: str) -> ProcessGroup:
        """Return the process group along ``axis``."""
        if axis == "cp":
            assert self.row_group is not None, "rows are whole"
            return self.row_group
        return self.of(axis).get_group()


def open_mesh(spec: MeshSpec, device_type: str = "cpu") -> Mesh:
    """Return this rank's mesh; all ranks of the default group call it together.

    Its groups get the timeout of the default group (torch's own default is half an hour). Raises
    InvalidInput where the default group is not as large as the mesh.
    """
    if spec.world_size == 1:
        return Mesh(spec, 0, device_type)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != spec.world_size:
        raise InvalidInput(
            "mesh does not fit the group", got=f"{joined} ranks", wanted=f"{spec.world_size} ranks"
        )
    sizes = tuple(spec.groups[axis] for axis in spec.axes)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=spec.axes)
    groups = [device_mesh[axis].get_group() for axis in spec.axes]
    row_group: ProcessGroup | None = None
    if spec.cp > 1:
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(spec.world_size):
            row = tuple(at for axis, at in spec.place(rank).items() if axis != "cp")
            rows.setdefault(row, []).append(rank)
        made: Any = dist.new_subgroups_by_enumeration  # untyped in torch
        row_group, _ = made(list(rows.values()))
        groups.append(row_group)
    timeout = timeout_of(dist.group.WORLD, device_type)
    if timeout is not None:
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return Mesh(spec, dist.get_rank(), device_type, device_mesh, row_group)


def timeout_of(group: ProcessGroup | None, device_type: str = "cpu") -> timedelta | None:
    """Return the timeout of ``group`` for a silent rank; None for a backend without one."""
    import torch

    assert group is not None, "ranks join their group first"
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
