"""Write the JSON schemas of commands' output and of stored records.

Run: ``python -m paceline.schemas.json_schemas docs/schemas``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import BaseModel

from paceline.schemas import (
    access,
    clients,
    command_results,
    cost,
    events,
    jobs,
    plan,
    records,
    training,
)

SCHEMAS: dict[str, type[BaseModel]] = {
    "demo": command_results.RunSummary,
    "error": command_results.Failed,
    "deployment-plan": plan.Plan,
    "plan": command_results.PlanTable,
    "simulate": command_results.SimulationReport,
    "publish": command_results.Published,
    "distribute": command_results.Distribution,
    "deployment": records.Deployment,
    "receipt": records.Receipt,
    "event-stream": events.StreamItem,
    "watch": events.WatchLine,
    "status": command_results.StatusReport,
    "changed": command_results.Changed,
    "train": training.Trained,
    "evaluate": training.Evaluated,
    "evidence": training.Evidence,
    "token-made": access.TokenMade,
    "tokens": access.TokensShown,
    "token-revoked": access.TokenRevoked,
    "audit": access.AuditShown,
    "authority": access.AuthorityShown,
    "init": access.FleetInitialised,
    "login": clients.LoggedIn,
    "workers": clients.WorkersShown,
    "deployments": clients.DeploymentsShown,
    "doctor": clients.Diagnosis,
    "approve": clients.ApprovalShown,
    "generate": command_results.Generated,
    "reproduce": command_results.Reproduction,
    "cost": cost.CostsShown,
    "estimate": cost.MeshEstimates,
    "jobs": jobs.JobsShown,
    "job": jobs.JobShown,
    "job-log": jobs.JobLogShown,
    "job-log-line": jobs.JobLogLine,
    "sweep": jobs.SweepShown,
    "checkpoints": command_results.CheckpointsShown,
    "checkpoint-export": command_results.CheckpointExported,
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
