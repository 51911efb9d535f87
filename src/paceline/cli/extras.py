"""What the embedded installation runs besides its servers: Prefect's worker and our deployments.

The supervisor knows no flows; this is where they are handed to it as command lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.fleet.services import ServiceSpec

POOL = "paceline"


def extra_services(state_dir: Path) -> list[ServiceSpec]:
    """Return a process worker on the pool "paceline" that first registers the deployments of
    prefect.yaml; the installation is ready without waiting for it."""
    return [
        ServiceSpec(
            name="prefect-worker",
            argv=[sys.executable, "-m", "flows.serve", "--state", str(state_dir), "--pool", POOL],
            needs=("prefect",),
            blocking=False,
        )
    ]
