"""`paceline snapshot` and `purposes`: make snapshots of data, and say what they may be used for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from paceline.cli.access import DURATION
from paceline.cli.commands import Group, Sections
from paceline.cli.flows import FlowCall, flow_options, placed
from paceline.cli.options import DATA_SIZE, json_option, show, show_table, state_option
from paceline.client import AccessClient
from paceline.config import find_installation
from paceline.errors import InvalidInput
from paceline.schemas import AllowPurpose, PurposeRule, PurposeShown, PurposesShown, one_of
from paceline.units import moment


@click.command(
    cls=Sections,
    sections={
        "Reading": "format_ text_field key_field slice_field features missing_features tokenizer "
        "max_tokens",
        "Record": "purpose project max_bytes shard_bytes",
    },
)
@click.argument("data", required=False)
@click.option("--format", "format_", type=click.Choice(["text", "jsonl", "parquet", "tar"]),
              help="Of the files.")  # fmt: skip
@click.option("--text-field", help="JSONL and Parquet: the column; tar: the member's extension.")
@click.option("--key-field", help="What names a sample, in DATA and in feature files.")
@click.option(
    "--slice-field",
    multiple=True,
    help="JSONL, Parquet: a column whose values the evaluation compares; may be repeated.",
)
@click.option("--features", multiple=True, help="Parquet file to join by key; may be repeated.")
@click.option("--missing-features", type=click.Choice(["refuse", "skip"]),
              help="What becomes of a sample without features.")  # fmt: skip
@click.option("--tokenizer", help="'bytes', or the path of a tokenizer.json.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Leave longer conversations out; no limit else.",
)
@click.option("--purpose", help="What the data may be used for.")
@click.option("--project", help="Which project the data belong to.")
@click.option("--max-bytes", **DATA_SIZE, help="Take no more of DATA than this: 16MiB.")
@click.option("--shard-bytes", **DATA_SIZE, help="Of a shard, at most: 1MiB.")
@flow_options
def snapshot(call: FlowCall, data: str | None, format_: str | None, **options: Any) -> int:
    """Make a snapshot of the samples at DATA: a directory, a file, or s3://bucket/prefix.

    Settings that are not given are the profile's [data].
    """
    reading = {"format": format_, **options}
    reading["features"] = [placed(each) for each in options["features"]] or None
    columns = options["slice_field"]
    reading["slice_field"] = columns[0] if len(columns) == 1 else None
    reading["slice_fields"] = list(columns) if len(columns) > 1 else None
    if options["tokenizer"] not in {None, "bytes"}:
        reading["tokenizer"] = placed(options["tokenizer"])
    reading = {name: value for name, value in reading.items() if value is not None}
    source = None if data is None else placed(data)
    return call.run("publish.build_snapshot", data=source, reading=reading)


@click.group(cls=Group)
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
    names = ("rule", "purpose", "data", "teams", "projects", "allowed by", "state", "reason")
    return show_table(PurposesShown(rules=tuple(found)), as_json, names, rows)


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
