"""Which of a user's modules may run here, and what they find in their environment: one rule for all
that ``security.code_sources`` covers."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence

# What user code may find in its environment; everything else is taken away before its import.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|PWD|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS|FAULTHANDLER|UTF8)"
    r"|(OMP|MKL|KMP|OPENBLAS|GLOO|NCCL|TORCH|TORCHINDUCTOR|CUDA|NVIDIA|CUBLAS|ATEN|ONEDNN)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|PACELINE_(ATTEMPT|WORKER_ID)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_AUTH", re.IGNORECASE)


def module_allowed(module: str, sources: Sequence[str]) -> bool:
    """Return whether ``module`` is one of ``sources``, or inside of one."""
    return any(module == each or module.startswith(f"{each}.") for each in sources)


def scrub(environment: MutableMapping[str, str], *, secrets_only: bool = False) -> list[str]:
    """Remove every variable that user code has no need of, or just those that are called like a
    secret; return their names.

    Libraries that were imported before keep what they have read.
    """
    removed = [
        name
        for name in environment
        if _SECRET.search(name) or not (secrets_only or _KEPT.fullmatch(name))
    ]
    for name in removed:
        del environment[name]
    return removed
