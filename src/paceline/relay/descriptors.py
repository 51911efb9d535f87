"""How many files this process may have open: every file of a model that arrives is.

Shells and services begin with a soft limit of 1,024, which a model of a thousand files passes; the
hard one is what the system really allows.
"""

from __future__ import annotations

import resource

from paceline.errors import InvalidInput
from paceline.manifest import Manifest

BESIDE = 16  # of a worker, beside its files: lock, marks, counts, port, connections
OURS = 64  # of the process


def allow_all() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(manifest: Manifest, workers: int) -> None:
    """Make room for ``workers`` in this process; raises InvalidInput where the system has none."""
    wanted = workers * (len(manifest.files) + BESIDE) + OURS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted <= soft:
        return
    if wanted > hard:
        raise InvalidInput(
            "too many files would be open in one process",
            got=f"{len(manifest.files)} files on each of {workers} workers: about {wanted}",
            wanted=f"at most {hard}",
            do="Raise the hard limit (ulimit -Hn), or ask for fewer workers.",
        )
    allow_all()
