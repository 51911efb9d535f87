"""docs/schemas is what the code says; `make schemas` writes it anew."""

from __future__ import annotations

from pathlib import Path

from paceline.schemas import SCHEMAS, schema_text

DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def test_the_schemas_in_the_docs_are_those_in_the_code() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.json")} == set(SCHEMAS)
    for name in SCHEMAS:
        assert (DIRECTORY / f"{name}.json").read_text(encoding="utf-8") == schema_text(name), name
