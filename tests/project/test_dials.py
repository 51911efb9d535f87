"""Every dial that README, the docs and the examples name is one that a profile has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from paceline.config import Profile

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/how-to").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
ALERTS_TOO = {"relay"}  # names of alerts look like its dials
SECTIONS = "|".join(
    name
    for name, field in Profile.model_fields.items()
    if name not in ALERTS_TOO
    and isinstance(field.annotation, type)
    and issubclass(field.annotation, BaseModel)
)
FILES = ("json", "yml", "safetensors", "toml")
NAMED = re.compile(
    rf"(?:--set \\?[\"']?|`)((?:{SECTIONS})\.(?!{'|'.join(FILES)})[a-z_]+(?:\.(?!yml)[a-z_]+)*)"
    r"(?=[`= ]|\.\*)"
)


def is_dial(dotted: str) -> bool:
    """Return whether ``dotted`` leads to a key, or a section, of the profile."""
    model: object = Profile
    for part in dotted.split("."):
        sections = [  # an optional section is a union with None
            each
            for each in (model, *get_args(model))
            if isinstance(each, type) and issubclass(each, BaseModel)
        ]
        if not sections or part not in sections[0].model_fields:
            return False
        model = sections[0].model_fields[part].annotation
    return True


def test_dials_that_are_named_exist() -> None:
    named = {(page.name, each) for page in PAGES for each in NAMED.findall(page.read_text("utf-8"))}
    assert not [(page, each) for page, each in sorted(named) if not is_dial(each)]


def test_a_dial_that_does_not_exist_would_be_noticed() -> None:
    assert is_dial("training.mesh.tp") and is_dial("training.guard")
    assert is_dial("training.early_stopping.patience")
    assert not is_dial("training.mesh.ttp") and not is_dial("training.steps.more")
    assert NAMED.findall("`training.stpes` and --set 'data.paht=3'") == [
        "training.stpes", "data.paht"
    ]  # fmt: skip
