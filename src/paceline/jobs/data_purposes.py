"""Which data may be used for a purpose, and by whom: the decision on the table of purposes.

The table is the platform's: only an admin changes it, through the coordinator. While it is empty a
snapshot may be used for the purpose that it is labelled with, within its own project. As soon as it
has a rule, only what a rule allows is allowed. Pure; the same decision at submission, when a
training begins, and at its promotion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from paceline.errors import AccessDenied
from paceline.schemas import PurposeRule
from paceline.text import shortened

if TYPE_CHECKING:
    from paceline.data import Snapshot


def require_permitted(
    rules: Collection[PurposeRule],
    snapshot: Snapshot,
    purpose: str,
    users: Collection[tuple[str, str]],
    *,
    own_project: str,
    now: float,
) -> None:
    """Raise unless one of ``users`` (team, project) may use ``snapshot`` for ``purpose``.

    AccessDenied where the table does not allow it; InvalidSnapshot, where there is no table, for
    another label than ``purpose`` or another project than the installation's ``own_project``.
    """
    if not rules:
        from paceline.data import require_purpose

        require_purpose(snapshot, purpose, own_project)
        return
    in_force = [each for each in rules if each.is_in_force(now)]
    named = [each for each in in_force if each.purpose == purpose]
    fitting = [each for each in named if _covers(each, snapshot)]
    if any(_is_open_to(each, *user) for each in fitting for user in users):
        return
    team, project = next(iter(users))
    if not named:
        wanted = f"purpose {_listed(each.purpose for each in in_force)}"
    elif not fitting:
        wanted = f"data {_listed(entry for each in named for entry in _data_of(each))}"
    else:
        wanted = "; ".join(dict.fromkeys(map(_users_of, fitting)))
    raise AccessDenied(
        "the table of purposes does not allow this use of the data",
        got=f"purpose {purpose}, team {team}" + (f", project {project}" if project else ""),
        wanted=wanted,
        where=snapshot.url,
        do=f"An admin allows it: `paceline purposes allow {purpose} --data {snapshot.url} "
        f"--team {team}`.",
    )


def _covers(rule: PurposeRule, snapshot: Snapshot) -> bool:
    """Return whether the snapshot lies below a URL of the rule, or carries a label of it."""
    return any(
        f"{snapshot.url}/".startswith(f"{each.rstrip('/')}/")
        if "://" in each
        else each == snapshot.purpose
        for each in _data_of(rule)
    )


def _data_of(rule: PurposeRule) -> tuple[str, ...]:
    return rule.data or (rule.purpose,)


def _is_open_to(rule: PurposeRule, team: str, project: str) -> bool:
    return (not rule.teams or team in rule.teams) and (
        not rule.projects or project in rule.projects
    )


def _users_of(rule: PurposeRule) -> str:
    found = [f"team {_listed(rule.teams)}"] if rule.teams else []
    found += [f"project {_listed(rule.projects)}"] if rule.projects else []
    return ", ".join(found)


def _listed(names: Iterable[str]) -> str:
    return shortened(tuple(dict.fromkeys(names))) or "none"
