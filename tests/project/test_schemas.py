"""docs/schemas is what the code says; `make schemas` writes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.schemas import SCHEMAS, schema_text

DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "schemas"


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_in_the_docs_is_the_one_in_the_code(name: str) -> None:
    assert (DIRECTORY / f"{name}.json").read_text(encoding="utf-8") == schema_text(name)


def test_no_schema_in_the_docs_is_left_over() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.json")} == set(SCHEMAS)
