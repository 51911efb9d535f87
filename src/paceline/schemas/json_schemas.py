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
    evaluation,
    events,
    flow_results,
    jobs,
    plan,
    records,
)

SCHEMAS: dict[str, type[BaseModel]] = {
    "demo": flow_results.RunSummary,
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
    "published": flow_results.PublishAnswer,
    "snapshot": flow_results.SnapshotAnswer,
    "distributed": flow_results.DistributeAnswer,
    "verify": flow_results.VerifyAnswer,
    "train": flow_results.TrainAnswer,
    "evaluate": flow_results.EvaluateAnswer,
    "promote": flow_results.PromoteAnswer,
    "rollback": flow_results.RollbackAnswer,
    "evidence": evaluation.Evidence,
    "token-made": access.TokenMade,
    "tokens": access.TokensShown,
    "token-revoked": access.TokenRevoked,
    "audit": access.AuditShown,
    "authority": access.AuthorityShown,
    "init": access.FleetInitialised,
    "login": clients.LoggedIn,
    "logout": command_results.LoggedOut,
    "up": command_results.Started,
    "down": command_results.Stopped,
    "where": command_results.Links,
    "key": command_results.KeyShown,
    "purposes": access.PurposesShown,
    "purpose": access.PurposeShown,
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
    "sweep": command_results.SweepShown,
    "sweep-started": command_results.SweepStarted,
    "checkpoints": command_results.CheckpointsShown,
    "checkpoint-export": command_results.CheckpointExported,
}

# command → schemas of what it prints with --json, one object (`watch`, `jobs logs --follow`: one a
# line). Of several it is by the command's form; where a command fails it is ``error``.
PRINTED: dict[str, tuple[str, ...]] = {
    "activate": ("changed",),
    "approve": ("approve",),
    "audit": ("audit",),
    "authority add": ("authority",),
    "authority retire": ("authority",),
    "authority show": ("authority",),
    "authority switch": ("authority",),
    "cancel": ("changed",),
    "checkpoints export": ("checkpoint-export",),
    "checkpoints list": ("checkpoints",),
    "cost": ("cost",),
    "demo": ("demo",),
    "deployment list": ("deployments",),
    "distribute": ("distributed", "distribute"),  # on an installation; with --into
    "doctor": ("doctor",),
    "down": ("down",),
    "estimate": ("estimate",),
    "evaluate": ("evaluate",),
    "generate": ("generate",),
    "init": ("init",),
    "jobs cancel": ("job",),
    "jobs list": ("jobs",),
    "jobs logs": ("job-log", "job-log-line"),  # with --follow the second
    "jobs pause": ("job",),
    "jobs resume": ("job",),
    "jobs review": ("job",),
    "jobs show": ("job",),
    "jobs submit": ("job",),
    "keys new": ("key",),
    "keys show": ("key",),
    "lifecycle": ("demo",),
    "login": ("login",),
    "logout": ("logout",),
    "model rollback": ("rollback",),
    "plan": ("plan",),
    "promote": ("promote",),
    "publish": ("published", "publish"),  # as a flow of the installation; from this machine
    "purposes allow": ("purpose",),
    "purposes list": ("purposes",),
    "purposes revoke": ("purpose",),
    "reproduce": ("reproduce",),
    "rollback": ("changed",),
    "simulate": ("simulate",),
    "snapshot": ("snapshot",),
    "status": ("status",),
    "sweep report": ("sweep",),
    "sweep run": ("sweep", "sweep-started"),  # with --detach the second
    "tokens create": ("token-made",),
    "tokens join": ("token-made",),
    "tokens list": ("tokens",),
    "tokens revoke": ("token-revoked",),
    "train": ("train",),
    "training start": ("train",),
    "up": ("up",),
    "verify": ("verify",),
    "watch": ("watch",),
    "where": ("where",),
    "workers": ("workers",),
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
