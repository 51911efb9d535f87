"""A generation of step 0 out of whole tensors in memory: where a training that resumes begins.

One process writes it before any rank is started; ranks of every layout then resume it like any
other. Its position is empty: the data begin at their beginning.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.training.checkpoint.generations import Generation, Generations
from paceline.training.checkpoint.layout import Held, chunks_of, file_of, index_of, share_out
from paceline.training.checkpoint.records import Commit, SavedFile
from paceline.training.checkpoint.staging import Staging


def seed_generation(
    generations: Generations,
    tensors: Mapping[str, Tensor],
    *,
    job_id: str,
    config_digest: str,
    code_version: str,
    source: Mapping[str, Any],
) -> Commit:
    """Commit ``tensors`` (named as ``TrainState`` names them) as step 0; return the marker.

    ``source`` says where they come from. Raises TrainingFailed where a number is not finite.
    """
    written = share_out(Held.of([chunks_of(tensors)]))
    staging = Staging(written[0])
    staging.fill(tensors)
    staging.require_finite(0)
    saved = SavedFile(sha256=hashlib.sha256(staging.view).hexdigest(), bytes=staging.bytes)
    generation = Generation(0, random.getrandbits(32))
    generations.put_file(generation, file_of(0, 1), staging.path, saved)
    commit = Commit(
        job_id=job_id,
        step=0,
        position={},
        config_digest=config_digest,
        code_version=code_version,
        world_size=1,
        layout={},
        metrics={},
        environment={"imported_from": dict(source)},
        extra={},
        files={file_of(0, 1): saved},
    )
    return generations.commit(generation, commit, index_of(written))
