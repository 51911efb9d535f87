"""Write the JSON schemas of commands' output and of stored records.

Run: ``python -m paceline.schemas.json_schemas docs/schemas``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import BaseModel

from paceline.schemas.access import (
    AuditShown,
    FleetInitialised,
    TokenMade,
    TokenRevoked,
    TokensShown,
)
from paceline.schemas.command_results import (
    Changed,
    CheckpointExported,
    CheckpointsShown,
    Distribution,
    Failed,
    ModelImported,
    PlanTable,
    Published,
    Reproduction,
    RunSummary,
    SimulationReport,
    StatusReport,
)
from paceline.schemas.events import StreamItem, WatchLine
from paceline.schemas.plan import Plan
from paceline.schemas.records import Deployment, Receipt
from paceline.schemas.training import Evaluated, Evidence, Trained

SCHEMAS: dict[str, type[BaseModel]] = {
    "demo": RunSummary,
    "error": Failed,
    "deployment-plan": Plan,
    "plan": PlanTable,
    "simulate": SimulationReport,
    "publish": Published,
    "distribute": Distribution,
    "deployment": Deployment,
    "receipt": Receipt,
    "event-stream": StreamItem,
    "watch": WatchLine,
    "status": StatusReport,
    "changed": Changed,
    "train": Trained,
    "evaluate": Evaluated,
    "evidence": Evidence,
    "token-made": TokenMade,
    "tokens": TokensShown,
    "token-revoked": TokenRevoked,
    "audit": AuditShown,
    "init": FleetInitialised,
    "reproduce": Reproduction,
    "checkpoints": CheckpointsShown,
    "checkpoint-export": CheckpointExported,
    "checkpoint-import": ModelImported,
}


def schema_text(name: str) -> str:
    """Return the text of docs/schemas/``name``.json."""
    schema = SCHEMAS[name].model_json_schema(mode="serialization")
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write every schema into the directory named on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        (directory / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
