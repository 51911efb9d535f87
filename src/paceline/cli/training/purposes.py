"""`paceline purposes`: which data may be used for a purpose, and by which teams."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from paceline.cli.access import DURATION
from paceline.cli.options import json_option, print_table, show, state_option
from paceline.client import AccessClient
from paceline.config import find_installation
from paceline.errors import InvalidInput
from paceline.schemas import AllowPurpose, PurposeRule, PurposeShown, PurposesShown, one_of
from paceline.units import moment


@click.group()
def purposes() -> None:
    """What data may be used for, and by whom; an admin's table.

    While it has no rule, a snapshot may be used for the purpose that it is labelled with.
    """


@purposes.command("list")
@state_option
@json_option
def list_purposes(state: Path | None, as_json: bool) -> int:
    """Show every rule, who allowed it, and those that ended."""
    found = _client(state).data_purposes()
    if as_json:
        click.echo(PurposesShown(rules=tuple(found)).model_dump_json())
        return 0
    rows = [
        (
            each.rule_id,
            each.purpose,
            ", ".join(each.data) or f"labelled {each.purpose}",
            ", ".join(each.teams) or "any",
            ", ".join(each.projects) or "any",
            f"{each.approver}, {moment(each.allowed_at)}",
            _state(each),
            each.reason,
        )
        for each in found
    ]
    print_table(
        ("rule", "purpose", "data", "teams", "projects", "allowed by", "state", "reason"), rows
    )
    return 0


@purposes.command()
@click.argument("purpose")
@click.option(
    "--data",
    multiple=True,
    metavar="URL|LABEL",
    help="The beginning of snapshots' URLs, or a label of snapshots (default: PURPOSE).",
)
@click.option("--team", "teams", multiple=True, help="Only this team may name it; repeatable.")
@click.option("--project", "projects", multiple=True, help="Only this project; repeatable.")
@click.option("--ttl", **DURATION, default=None, help="Its life, e.g. 30d; default: no end.")
@click.option("--reason", default="", help="Why; kept with the rule and in the audit history.")
@state_option
@json_option
def allow(purpose: str, ttl: float | None, state: Path | None, as_json: bool, **given: Any) -> int:
    """Allow data to be used for PURPOSE; needs a token of scope admin."""
    try:
        call = AllowPurpose(purpose=purpose, ttl_seconds=ttl, **given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput("not a rule", got=first["msg"], where=where) from error
    made = _client(state).allow_purpose(call)
    show(PurposeShown(**dict(made)), as_json, f"{made.rule_id}: {made.purpose} is allowed")
    return 0


@purposes.command()
@click.argument("rule")
@state_option
@json_option
def revoke(rule: str, state: Path | None, as_json: bool) -> int:
    """End RULE: what rests on it is refused when it begins, and at promotion."""
    client = _client(state)
    known = [each.rule_id for each in client.data_purposes()]
    made = client.revoke_purpose(one_of("rule", rule, known))
    show(PurposeShown(**dict(made)), as_json, f"{made.rule_id} allows nothing any more")
    return 0


def _client(state: Path | None) -> AccessClient:
    return AccessClient.of(find_installation(state))


def _state(rule: PurposeRule) -> str:
    if rule.revoked_at is not None:
        return f"revoked by {rule.revoked_by}, {moment(rule.revoked_at)}"
    if rule.expires_at is None:
        return "in force"
    ended = not rule.is_in_force(time.time())
    return f"{'expired' if ended else 'in force until'} {moment(rule.expires_at)}"
