"""The generated reference says what each thing means, and hand-written tables follow the code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs import hooks
from paceline import errors
from tests.project.test_dials import ROOT


def rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield heading, name and last cell of each row of the tables of ``page``."""
    heading = ""
    for line in page.splitlines():
        heading = line if line.startswith("#") else heading
        if line.startswith("| `"):
            name, *_, last = re.split(r"(?<!\\) \| ", line[2:-2])
            yield heading, name.strip("`"), last.strip()


@pytest.mark.parametrize("page", ["profile_keys", "events"])
def test_every_key_and_every_event_has_a_meaning(page: str) -> None:
    found = [*rows(getattr(hooks, page)())]
    assert len(found) > 25
    assert not [(heading, name) for heading, name, meaning in found if not meaning]


def test_every_field_of_every_route_has_a_meaning() -> None:
    records = hooks.routes().split("## Records")[1]
    found = [*rows(records)]
    assert len(found) > 600
    assert all(f"### {name}\n" in records for name in ("Deployment", "TokenView", "Evidence"))
    assert not [(heading, name) for heading, name, meaning in found if not meaning]


def test_the_python_page_documents_each_name_and_what_it_returns() -> None:
    page = hooks.python()
    names, records = page.split("\n## Records\n")
    for each in re.split(r"^##+ ", names, flags=re.MULTILINE)[1:]:
        name, *parts = [part for part in each.split("\n\n") if part]
        assert any(not part.startswith("```") for part in parts), name
    fields = {(heading, name) for heading, name, _ in rows(records)}
    for record, field in {
        "Distribution": "receipts", "TrainResult": "export_url", "DeploymentView": "progress",
        "RunSummary": "gate", "EvaluateAnswer": "report_digest",
    }.items():  # fmt: skip
        assert (f"### {record}", field) in fields


def test_the_exit_codes_are_those_of_the_errors() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    listed = {int(code) for cell in cells for code in cell.split(",")}
    kinds = [each for each in vars(errors).values() if hasattr(each, "exit_code")]
    assert len(kinds) > 30
    # done, terminated, and a closed pipe are no errors
    assert listed == {0, 143, 141} | {each.exit_code for each in kinds}


def test_the_words_of_the_glossary_are_used_elsewhere() -> None:
    glossary = ROOT / "docs/reference/glossary.md"
    cells = re.findall(r"^\| (\w[^|]*) \|", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/paceline/**/*.py")]
    text = " ".join(each.read_text(encoding="utf-8") for each in pages if each != glossary)
    used = re.sub(r"[-\s_]+", " ", text).lower()
    words = [word.replace("-", " ") for cell in cells[1:] for word in re.split(r"[,:] ", cell)]
    assert len(words) > 60
    assert not [word for word in words if not re.search(rf"\b{word.lower()}", used)]
