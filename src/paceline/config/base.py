"""What every section of a profile is made from; what a user's code may see of this process."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict

MIB = 1024 * 1024
# Names, joined by "/" as hubs and registries have them: meta-llama/Llama-3.1-8B.
MODEL_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}$"


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def matching(pattern: str, wanted: str) -> Any:
    """Return a validator of strings that match all of ``pattern``; others are no ``wanted``."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(wanted)
        return value

    return AfterValidator(check)


# Environment variables that user code may see; all others are removed before its import.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|PWD|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS|FAULTHANDLER|UTF8)"
    r"|(OMP|MKL|KMP|OPENBLAS|GLOO|NCCL|TORCH|TORCHINDUCTOR|CUDA|NVIDIA|CUBLAS|ATEN|ONEDNN)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|PACELINE_(ATTEMPT|WORKER_ID)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_AUTH", re.IGNORECASE)


def module_allowed(module: str, sources: Sequence[str]) -> bool:
    """Return whether ``module`` is one of ``sources`` or a submodule of one."""
    return any(module == each or module.startswith(f"{each}.") for each in sources)


def scrub_variables(
    environment: MutableMapping[str, str], *, secrets_only: bool = False
) -> list[str]:
    """Remove the variables that user code does not need; return their names.

    With ``secrets_only``, remove only those whose name looks like a secret's. Libraries that were
    imported before keep what they have read.
    """
    removed = [
        name
        for name in environment
        if _SECRET.search(name) or not (secrets_only or _KEPT.fullmatch(name))
    ]
    for name in removed:
        del environment[name]
    return removed
