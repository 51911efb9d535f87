"""What the embedded installation runs besides its servers: the registration of our deployments.

The supervisor knows no flows; they are handed to it as a command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.fleet import Ready, ServiceSpec


def extra_services(state_dir: Path) -> list[ServiceSpec]:
    """Return the one-shot that registers prefect.yaml; the installation is ready without it."""
    return [
        ServiceSpec(
            name="prefect-deployments",
            argv=(sys.executable, "-m", "flows.register", "--state", str(state_dir)),
            ready=Ready(kind="exit"),
            after=("prefect",),
            blocking=False,
        )
    ]
