"""`paceline tokens`, `audit` and `approve`: who may call the coordinator, and what people decided.

`tokens` manages who may call the coordinator, `audit` shows who changed what, `approve` decides a
promotion in the name of a token's owner.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from pydantic import BaseModel, ValidationError

from paceline.cli.commands import Group
from paceline.cli.options import (
    json_option,
    notice,
    parsed,
    resolve_deployment_id,
    show,
    show_table,
    state_option,
)
from paceline.client import START_S, AccessClient, CoordinatorClient, retry
from paceline.config import (
    find_installation,
)
from paceline.errors import Conflict, CorruptData, InvalidInput, TemporaryError
from paceline.schemas import (
    ApprovalShown,
    AuditShown,
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    DecidePromotion,
    Event,
    GrantedScope,
    TokenMade,
    TokenRevoked,
    TokensShown,
    TokenView,
    is_run_id,
    one_of,
)
from paceline.text import printable
from paceline.units import humane, moment, seconds

SCOPES = tuple(str(each) for each in get_args(GrantedScope))
Call = TypeVar("Call", bound=BaseModel)
DURATION: dict[str, Any] = {"metavar": "DURATION", "callback": parsed(seconds)}


@click.group(cls=Group)
def tokens() -> None:
    """Make, list and revoke the tokens that open the coordinator."""


@tokens.command()
@click.option("--name", required=True, help="Whom it is for, as audit rows will say.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What it allows (repeatable); deploy, train and approve include read, admin all.",
)
@click.option("--ttl", **DURATION, default=None, help="When it expires, e.g. 30d; default: never.")
@click.option("--worker-id", default=None, help="The worker that it identifies (scope worker).")
@click.option(
    "--team", default=None, help="Its jobs are this team's, and no other's (scope train)."
)
@click.option("--project", default=None, help="Its jobs are this project's; as --team.")
@state_option
@json_option
def create(
    scopes: tuple[str, ...], ttl: float | None, state: Path | None, as_json: bool, **given: Any
) -> int:
    """Make a bearer token and print it, this once; only its hash is kept."""
    client = _client(state)
    call = _checked(CreateToken, {"scopes": scopes, "ttl_seconds": ttl, **given})
    made = client.create_token(call)
    _say_made(made, as_json)
    if not as_json and "worker" not in scopes:
        pin = f" --authority {made.ca_sha256}" if made.ca_sha256 else ""
        click.echo(f"use it with: paceline login {client.base_url}{pin}", err=True)
    return 0


@tokens.command()
@click.option("--worker-id", default=None, help="The one worker that the node will be.")
@click.option(
    "--nodes", type=int, default=None, help="For so many nodes with new names, at most 10,000."
)
@click.option("--ttl", **DURATION, default="1h", show_default=True, help="At most 7d.")
@click.option(
    "--from",
    "networks",
    multiple=True,
    metavar="CIDR",
    help="Nodes of this network alone may use it (repeatable); default: of any.",
)
@state_option
@json_option
def join(
    worker_id: str | None,
    nodes: int | None,
    ttl: float,
    networks: tuple[str, ...],
    state: Path | None,
    as_json: bool,
) -> int:
    """Make a token with which one node may join, once, or --nodes of them, and print it.

    On a node: paceline agent --state DIR --worker-id ID --coordinator URL --join TOKEN
    """
    if (worker_id is None) == (nodes is None):
        raise click.UsageError("Name --worker-id for one node, or --nodes for many.")
    given = {"worker_id": worker_id, "nodes": nodes, "ttl_seconds": ttl, "networks": networks}
    made = _client(state).create_join_token(_checked(CreateJoinToken, given))
    _say_made(made, as_json)
    return 0


@tokens.command("list")
@state_option
@json_option
def list_tokens(state: Path | None, as_json: bool) -> int:
    """Show every token: what it opens, until when, and when it was last used."""
    found = _client(state).tokens()
    rows = [
        (
            each.token_id,
            each.name,
            ", ".join(each.scopes),
            each.worker_id or ", ".join(filter(None, (each.team, each.project))),
            _state(each),
            _at(each.last_used_at),
        )
        for each in found
    ]
    names = ("id", "name", "scopes", "bound to", "state", "last used")
    return show_table(TokensShown(tokens=tuple(found)), as_json, names, rows)


@tokens.command()
@click.argument("token_id", required=False)
@click.option("--worker-id", default=None, help="Take this worker out: every token of it ends.")
@state_option
@json_option
def revoke(token_id: str | None, worker_id: str | None, state: Path | None, as_json: bool) -> int:
    """Have the token with this id open nothing any more.

    A worker's token ends with everything that worker has; so does --worker-id. Other workers
    refuse its certificate from their next beat on.
    """
    if (token_id is None) == (worker_id is None):
        raise click.UsageError("Name a token's id, or --worker-id.")
    client = _client(state)
    if worker_id is not None:
        ended = client.revoke_worker(worker_id)
    else:
        assert token_id is not None
        whole = one_of("token", token_id, [each.token_id for each in client.tokens()])
        client.revoke_token(whole)
        ended = [whole]
    done = TokenRevoked(token_id=ended[0], token_ids=tuple(ended))
    show(done, as_json, *(f"{each} opens nothing any more" for each in ended))
    return 0


@click.command()
@click.option("--deployment", default=None, help="Of this deployment only.")
@click.option("--worker-id", default=None, help="Of this worker only.")
@click.option("--name", "names", multiple=True, help="Of this kind, e.g. change.refused.")
@click.option("--since", **DURATION, default=None, help="Of the last so long, e.g. 12h.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True,
              help="Rows to show, at most.")  # fmt: skip
@state_option
@json_option
def audit(
    deployment: str | None, since: float | None, state: Path | None, as_json: bool, **wanted: Any
) -> int:
    """Show the newest of what happened: who changed what, from where, and what was refused."""
    client = _client(state)
    rows = client.audit(
        deployment_id=deployment and resolve_deployment_id(client, deployment),
        since=None if since is None else max(0.0, time.time() - since),
        newest_first=True,
        **wanted,
    )
    rows.reverse()
    if rows or as_json:
        show(AuditShown(events=tuple(rows)), as_json, *map(_line, rows))
    return 0


def _client(state: Path | None) -> AccessClient:
    return AccessClient.of(find_installation(state))


def _checked(kind: type[Call], given: Mapping[str, object]) -> Call:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0] if first["loc"] else "").replace("_", "-")
        option = option.removesuffix("-seconds").replace("--networks", "--from")
        raise InvalidInput(
            "not a token that can be made",
            got=f"{option} {first.get('input')!r}",
            wanted=first["msg"],
        ) from error


def _say_made(made: CreatedToken, as_json: bool) -> None:
    show(TokenMade.model_validate(made.model_dump()), as_json, made.token)
    if as_json:
        return
    until = f"until {_at(made.record.expires_at)}" if made.record.expires_at else "without end"
    click.echo(f"id {made.record.token_id}, {until}; it is shown this once", err=True)


def _state(token: TokenView) -> str:
    if token.revoked_at is not None:
        return f"revoked {_at(token.revoked_at)}"
    if token.used_at is not None:
        return f"spent {_at(token.used_at)}"
    if token.expires_at is None:
        return "good"
    ended = token.expires_at <= time.time()
    state = f"{'expired' if ended else 'good until'} {_at(token.expires_at)}"
    if token.nodes is not None:
        state += f", {token.nodes - (token.joined or 0)} of {token.nodes} uses left"
    return f"{state}, from {', '.join(token.networks)}" if token.networks else state


def _at(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else ""


def _line(event: Event) -> str:
    on = {"deployment": event.deployment_id, "worker": event.worker_id} | event.data
    details = " ".join(
        f"{key}={humane(key, value)}" for key, value in on.items() if value not in (None, "")
    )
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at))
    return f"{event.seq:>7} {when} {event.name.value} {details}"


SHORTEST_DIGEST = 12  # as it is shown


@click.command()
@click.argument("run_id")
@click.option("--reject", is_flag=True, help="Reject it: nothing is promoted.")
@click.option("--reason", default="", help="Why; kept with the decision.")
@click.option("--evidence", metavar="DIGEST", help="Its digest; refuse if it is about another.")
@click.option("--show", "only_show", is_flag=True, help="Show what waits, and decide nothing.")
@state_option
@json_option
def approve(
    run_id: str,
    reject: bool,
    reason: str,
    evidence: str | None,
    only_show: bool,
    state: Path | None,
    as_json: bool,
) -> int:
    """Approve (or reject) the promotion of RUN_ID, with a token of scope approve.

    The approver is the token's owner. The promotion then goes on by itself.
    """
    client = CoordinatorClient.of(find_installation(state))
    if not is_run_id(run_id):
        run_id = one_of("promotion", run_id, [each.run_id for each in client.approvals()])
    try:
        shown = client.approval(run_id)
    except (TemporaryError, CorruptData) as error:  # it can be decided, or rejected, without
        waiting = {each.run_id: each for each in client.approvals()}
        if run_id not in waiting or only_show or not (reject or isinstance(error, TemporaryError)):
            raise
        why = error.one_line()
        shown = ApprovalShown(status="waiting", request=waiting[run_id], no_evidence=why)
    whole = shown.request.evidence_digest
    if evidence is not None and not (
        len(evidence) >= SHORTEST_DIGEST and whole.startswith(evidence.lower())
    ):
        raise Conflict(
            "the promotion is about other evidence",
            got=evidence,
            wanted=f"{whole[:12]}, at least {SHORTEST_DIGEST} digits of it",
            where=run_id,
            do=f"Look at it again: paceline approve {run_id} --show",
        )
    if not only_show:
        call = DecidePromotion(evidence_digest=whole, approved=not reject, reason=reason)
        # a repeat of the same decision resumes what Prefect was too busy to resume
        decided = retry(lambda: client.decide_promotion(run_id, call), START_S, notice)
        found = {"evidence": shown.evidence, "no_evidence": shown.no_evidence}
        shown = decided.model_copy(update=found)
    from paceline.cli.installation import approval_page

    page = approval_page(client, run_id)
    show(shown.model_dump(mode="json"), as_json, *map(printable, _approval_lines(shown, page)))
    return 0


def _approval_lines(shown: ApprovalShown, page: str) -> list[str]:
    from paceline.evaluation import judgement_lines

    request, approval, found = shown.request, shown.approval, shown.evidence
    facts = {"asked by": ", ".join(shown.submitters) or "the installation"}
    if found is None:
        lines = ["", f"no figures: {shown.no_evidence}"]
    else:
        lines = ["", *judgement_lines(found)]
        url, digest = found.training_snapshot_url, found.training_snapshot_digest
        facts["base"] = f"{found.model_id} {found.base_version}"
        facts["training"] = f"{found.job_id}, on {url} (snapshot {str(digest)[:12]})"
        facts["weights"] = f"{found.weights_digest[:12]}, manifest {found.manifest_digest[:12]}"
        facts |= {"reviewed": "; ".join(found.reviewed)} if found.reviewed else {}
    digests = request.evidence_digest, request.report_digest, request.policy_digest
    facts["evidence"] = "{:.12}, report {:.12}, policy {:.12}".format(*digests)
    facts["page"] = page
    facts["expires"] = moment(request.expires_at)
    if shown.status == "waiting":
        decide = f"paceline approve {request.run_id} --evidence {request.evidence_digest:.12}"
        lines += ["", f"next:     {decide} [--reject] --reason WHY"]
    if approval is not None:
        why = f": {approval.reason}" if approval.reason else ""
        facts["decided"] = (
            f"{shown.status} by {approval.approver} (token {approval.token_id}), "
            f"{moment(approval.at)}{why}"
        )
    head = f"{request.model_id} {request.version}, {request.run_id}: {shown.status}"
    return [head, *(f"  {name:<9} {value}" for name, value in facts.items()), *lines]
