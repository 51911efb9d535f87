"""One id ties a run's Prefect, Dask, MLflow, logs and metrics together."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from pydantic import StringConstraints

RUN_ID = r"^run-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}$"
RunId = Annotated[str, StringConstraints(pattern=RUN_ID)]


def new_run_id() -> str:
    """Return a fresh run id that sorts by its UTC start, e.g. ``run-20261120-153600-9f3a1c``."""
    return time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)
