"""Which data may be used for a purpose is what the platform's table says, not the submitter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.errors import AccessDenied, InvalidSnapshot
from paceline.jobs import require_permitted
from paceline.schemas import AllowPurpose, PurposeRule

URL = "s3://b/data/snapshots/5c1f"
NOW = 1000.0


def rule(purpose: str = "research", **more: Any) -> PurposeRule:
    fields = {"data": (), "teams": (), "projects": (), "approver": "root", "allowed_at": 1.0}
    return PurposeRule(rule_id="dp-" + "0" * 12, purpose=purpose, **{**fields, **more})


def ask(
    rules: list[PurposeRule], purpose: str = "research", team: str = "nlp", project: str = ""
) -> None:
    snapshot: Any = SimpleNamespace(url=URL, purpose="language-model-training", project="demo")
    user = [(team, project)]
    require_permitted(rules, snapshot, purpose, user, own_project="demo", now=NOW)


def test_without_a_table_a_snapshot_serves_the_purpose_of_its_label() -> None:
    ask([], "language-model-training")
    with pytest.raises(InvalidSnapshot, match="labelled for another purpose"):
        ask([])


@pytest.mark.parametrize(
    "more",
    [
        {"data": (URL,)},
        {"data": ("s3://b/data/",)},
        {"data": ("s3://elsewhere", "s3://b")},
        {"data": ("language-model-training",)},
        {"data": (URL,), "teams": ("vision", "nlp")},
        {"data": (URL,), "expires_at": NOW + 1},
    ],
    ids=str,
)
def test_a_rule_allows_its_data_to_its_teams(more: dict[str, Any]) -> None:
    ask([rule("ads"), rule(**more)])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([rule("ads", data=(URL,))], "wanted purpose ads"),
        ([rule("language-model-training")], "wanted purpose language-model-training"),
        ([rule()], "wanted data research"),
        ([rule(data=("s3://b/data/snapshots/5c",))], "wanted data s3://b/data/snapshots/5c"),
        ([rule(data=(URL,), teams=("vision",))], "wanted team vision"),
        ([rule(data=(URL,), projects=("asr",))], "wanted project asr"),
        ([rule(data=(URL,), expires_at=NOW)], "wanted purpose none"),
        ([rule(data=(URL,), revoked_at=2.0)], "wanted purpose none"),
    ],
    ids=["other purpose", "its label", "no data", "half a name", "team", "project", "expired",
         "revoked"],
)  # fmt: skip
def test_what_no_rule_allows_is_refused_with_what_would_be(
    rules: list[PurposeRule], said: str
) -> None:
    with pytest.raises(AccessDenied) as refused:
        ask(rules)
    line = refused.value.one_line()
    assert said in line
    assert f"paceline purposes allow research --data {URL} --team nlp" in line


def test_one_of_several_users_is_enough() -> None:
    snapshot: Any = SimpleNamespace(url=URL, purpose="x", project="demo")
    rules = [rule(data=(URL,), teams=("nlp",), projects=("asr",))]
    users = [("vision", "asr"), ("nlp", "asr")]
    require_permitted(rules, snapshot, "research", users, own_project="demo", now=NOW)
    with pytest.raises(AccessDenied):
        crossed = [("vision", "asr"), ("nlp", "tts")]
        require_permitted(rules, snapshot, "research", crossed, own_project="demo", now=NOW)


@pytest.mark.parametrize("data", ["http://b/x", "s3://", "s3://b/ x", "../x", "", "a" * 2000])
def test_data_of_a_rule_are_a_url_or_a_label(data: str) -> None:
    with pytest.raises(ValidationError):
        AllowPurpose(purpose="research", data=(data,))
