"""``parallelise``: a plain model and a mesh in, what the loop drives out."""

from __future__ import annotations

from torch import nn

from paceline.errors import InvalidInput
from paceline.profile import TrainingSettings
from paceline.training.mesh import Mesh
from paceline.training.parallel.base import Parallel
from paceline.training.parallel.data import replicate
from paceline.training.parallel.straight import Straight
from paceline.training.workload import Workload


def parallelise(
    model: nn.Module, mesh: Mesh, settings: TrainingSettings, workload: Workload
) -> Parallel:
    """Return ``model`` spread over ``mesh`` as ``settings`` say; all ranks call it together.

    ``model`` is the whole model, the same values on every rank.
    """
    spec = mesh.spec
    if spec.shard * spec.tp * spec.pp > 1 or settings.compile:
        raise InvalidInput("mesh is not supported yet", got=str(spec), wanted="replicas")
    run = replicate(model, mesh) if spec.dp > 1 else model
    return Straight(model, run, mesh, workload)
