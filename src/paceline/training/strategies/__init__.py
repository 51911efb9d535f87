"""Training with relaxed synchrony: local SGD, and an asynchronous parameter server.

``local_sgd`` lets each rank take several steps alone and then averages weights; it is a
``Parallel`` like any other. ``server`` and ``worker`` share versioned weights: workers pull them
and push gradients, stale by at most a bound (``update_ledger`` is the rule, without I/O); a standby
(``follower``) holds every acknowledged update and takes over. ``job`` is the entry point of a rank
in such a job; ``ranks`` is the same without checkpoints, for programs that start ranks themselves.
"""

from __future__ import annotations

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput

SERVING = 2  # ranks that compute no gradients: the server and its standby


def is_asynchronous(settings: TrainingSettings) -> bool:
    """Return whether ranks may fail independently: one failure does not end the gang."""
    return settings.synchrony.kind == "parameter-server"


def require_ranks(settings: TrainingSettings, ranks: int) -> int:
    """Return the number of workers; raises InvalidInput for a layout without a server."""
    if ranks < SERVING + 1:
        raise InvalidInput(
            "too few ranks for a parameter server",
            got=f"{ranks} ranks",
            wanted="a server, a standby and a worker at least: 3",
            do="Raise training.ranks, or change training.synchrony.kind.",
        )
    mesh = settings.mesh
    if mesh.shard * mesh.tp * mesh.pp > 1 or mesh.hook != "none":
        raise InvalidInput(
            "a parameter server serves whole replicas",
            got=f"shard {mesh.shard}, tp {mesh.tp}, pp {mesh.pp}, hook {mesh.hook}",
            wanted="1, 1, 1 and none",
        )
    if settings.precision == "float16":
        raise InvalidInput(
            "a parameter server scales no losses", got="float16", wanted="bfloat16 or float32"
        )
    workers = ranks - SERVING
    if mesh.dp not in (0, workers):
        raise InvalidInput(
            "mesh does not fit the workers of a parameter server",
            got=f"dp {mesh.dp}, {ranks} ranks",
            wanted=f"dp 0 or {workers}: server and standby have no share of a batch",
        )
    return workers


def replicas_of(settings: TrainingSettings) -> int:
    """Return the number of ranks that have a share of each batch."""
    if is_asynchronous(settings):
        return require_ranks(settings, settings.ranks)
    return settings.ranks
