"""Records of clients that have only a URL and a token: the installation, and its flow runs.

A flow run is one of a Prefect deployment that the installation registered. Its result, with the
run's notes, is in the ledger (``flow_result_key``), because Prefect keeps results on its own disk.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.schemas.base import (
    RUN_ID,
    ModelId,
    Name,
    Record,
    Sha256,
    Text,
    digest_of,
    is_empty,
    is_none,
)
from paceline.schemas.evaluation import Evidence
from paceline.schemas.records import Approval, Deployment, Worker

FLOW_RESULT = "flow-result"  # the ledger's stage of results of flow runs
INTERRUPTED = "Interrupted"  # the name of the CANCELLED state of a flow run that Ctrl-C ended

# The Prefect deployments that a token of scope deploy may start, and their parameters that such a
# caller may give. Paths are left out: they would be read on the flow's machine.
FLOW_PARAMETERS: dict[str, frozenset[str]] = {
    "lifecycle": frozenset({"data", "model", "approver", "settings", "team", "project"}),
    "build-snapshot": frozenset({"data", "reading"}),
    "verify-model": frozenset({"model_id", "version", "full"}),
    "train-model": frozenset(
        [
            "model_id",
            "version",
            "snapshot_url",
            "labels",
            "continue_from",
            "evaluate_on",
            "steps",
            "ranks",
            "learning_rate",
            "mesh",
            "settings",
            "optimizer_ref",
            "team",
            "project",
            "purpose",
            "name",
            "resources",
            "checkpoint_policy",
            "seed",
            "priority",
            "budget",
        ]
    ),
    "evaluate-model": frozenset({"model_id", "base_version", "trained", "snapshot_url"}),
    "promote-model": frozenset(
        {"model_id", "report", "base_version", "trained", "snapshot_url", "approver"}
    ),
    "rollback-model": frozenset({"model_id"}),
    "sweep": frozenset(
        [
            "name",
            "model_id",
            "version",
            "snapshot_url",
            "search",
            "resources",
            "settings",
            "team",
            "project",
            "purpose",
            "priority",
            "code_ref",
            "budget",
        ]
    ),
}
FlowName = Literal[
    "lifecycle", "build-snapshot", "verify-model", "train-model", "evaluate-model",
    "promote-model", "rollback-model", "sweep",
]  # fmt: skip


def flow_result_key(flow_run_id: str) -> str:
    return digest_of({"flow_run": flow_run_id})


class InstallationView(Record):
    """What a client needs to know of an installation, and what its own token opens."""

    version: str  # of Paceline, where the coordinator runs
    coordinator_urls: tuple[str, ...]  # of every replica
    profile: dict[str, object]  # the sections storage, objects, cluster, relay and security's rules
    pages: dict[str, str]  # name → URL
    has_flows: bool  # whether flows can be started here
    token_name: str  # of the caller's own token, as the following fields
    token_scopes: tuple[str, ...]  # what it may do
    # whose jobs it submits and controls; None: any team's
    token_team: str | None = Field(default=None, exclude_if=is_none)
    # the same; None: any project's
    token_project: str | None = Field(default=None, exclude_if=is_none)
    token_expires_at: float | None = None  # seconds since the Unix epoch; None: no end


class StartFlow(Record):
    """Start a flow; a repeat with the same ``run_id`` and parameters finds the same flow run,
    unless that one ended badly.
    """

    flow: FlowName  # its name, such as train-model
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    parameters: dict[str, object] = Field(default={}, max_length=32)  # as the flow's form has them


class FlowRunView(Record):
    """A flow run, and lines of its log from the requested one on."""

    flow_run_id: str
    flow: Text  # its name, such as train-model
    run_id: Text
    team: Text = ""  # of a sweep's jobs
    project: Text = Field(default="", exclude_if=is_empty)
    state: str  # Prefect's type: SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, CRASHED, …
    message: Text = ""  # of its state
    page: str = ""  # in Prefect
    lines: tuple[Text, ...] = ()  # of the log, oldest first


# Stages of the ledger: what waits for an approval, by run; the decision on it; who started a run.
# Of the last two the coordinator is the only writer.
APPROVAL_REQUEST = "approval-request"
APPROVAL = "approval"
SUBMITTERS = "submitters"
OF_TEAM = "of_team"  # in the last: whether one of them has a token of a team or project


class ApprovalRequest(Record):
    """A promotion that waits for a person, with what is to be approved."""

    run_id: Annotated[str, Field(pattern=RUN_ID)]
    model_id: ModelId
    version: Text  # the candidate's
    evidence_digest: Sha256  # without the approver
    report_digest: Sha256  # SHA-256 of the evaluation report
    policy_digest: Sha256  # SHA-256 of the policy that the gate applied
    expires_at: float  # seconds since the Unix epoch
    flow_run_id: Text  # that waits
    page: Text  # of the waiting flow run in Prefect

    @property
    def key(self) -> str:
        """Return the ledger's input digest of the decision on this request."""
        return digest_of([self.run_id, self.model_id, self.evidence_digest])


class ApprovalList(Record):
    """The promotions that wait for a person."""

    approvals: tuple[ApprovalRequest, ...]  # one for each run
    # run → names of the tokens that submitted it; none: the installation itself
    submitters: dict[str, tuple[Text, ...]] = Field(default={}, exclude_if=is_empty)


class DecidePromotion(Record):
    """Approve or reject a promotion; ``evidence_digest`` is what the approver has seen."""

    evidence_digest: Sha256  # as the request has it; another one is refused
    approved: bool  # false: reject
    reason: str = Field(default="", max_length=500)


class ApprovalShown(Record):
    """Output of `paceline approve --json`: what was requested, and the decision if any.

    ``evidence`` is None where it was not recorded or cannot be read, and where POST /approvals
    answers.
    """

    status: Literal["waiting", "expired", "approved", "rejected"]
    request: ApprovalRequest  # what is to be decided
    approval: Approval | None = None  # the decision; None: none yet
    flow_run: Text = ""  # Prefect's state of the flow run that waits
    submitters: tuple[Text, ...] = ()  # names of the tokens that submitted the run
    evidence: Evidence | None = None  # its digest is the request's ``evidence_digest``
    no_evidence: Text = ""  # why GET /approvals/{run_id} has none


class WorkersShown(Record):
    """Output of `paceline workers --json`."""

    status: Literal["complete"] = "complete"
    workers: tuple[Worker, ...]


class DeploymentsShown(Record):
    """Output of `paceline deployment list --json`."""

    status: Literal["complete"] = "complete"
    deployments: tuple[Deployment, ...]


class LoggedIn(Record):
    """Output of `paceline login --json`."""

    status: Literal["complete"] = "complete"
    coordinators: tuple[str, ...]
    token_name: str
    scopes: tuple[str, ...]
    expires_at: float | None = None
    path: str  # of the file with the token


class Check(Record):
    """One finding of `paceline doctor`."""

    name: Name
    status: Literal["ok", "warning", "failed"]
    found: Text
    do: Text = ""  # what mends it


class Diagnosis(Record):
    """Output of `paceline doctor --json`."""

    status: Literal["ok", "warning", "failed"]
    place: Literal["client", "node", "control"]
    checks: tuple[Check, ...]
    bundle: str = ""  # the file that was written
