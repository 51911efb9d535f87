"""Replicas: each rank has the whole model, and gradients are added up while they come (DDP).

A hook decides how gradients travel: as they are, as fp16 or bf16, or as PowerSGD's two thin
matrices (arXiv 1905.13727). DDP and its hooks average; the caller scales the loss accordingly.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.training.mesh import Mesh

BUCKET_MB = 4  # several buckets even for small models, so that sending overlaps the backward pass


def replicate(model: nn.Module, mesh: Mesh) -> DistributedDataParallel:
    """Return ``model`` with its gradients averaged over replicas, in buckets, while they come."""
    return DistributedDataParallel(
        model,
        process_group=mesh.group("dp"),
        bucket_cap_mb=BUCKET_MB,
        gradient_as_bucket_view=True,
    )
