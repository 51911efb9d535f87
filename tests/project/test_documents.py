"""What README and the docs name exists: paths, make targets, commands, options."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from paceline.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOPS = ("src", "flows", "tasks", "docs", "profiles", "tests", "deployments", "benchmarks", ".ci")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    named = set(re.findall(r"`([\w./-]+/[\w./-]*)`", text)) | set(
        re.findall(r"\]\(([\w./-]+)\)", text)
    )
    missing = [each for each in named if each.split("/")[0] in TOPS and not (ROOT / each).exists()]
    assert not missing
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (document.parent / link).exists(), link


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


@pytest.mark.parametrize(
    "document",
    [
        ROOT / "README.md",
        *(
            page
            for part in ("how-to", "tutorials", "explanation")
            for page in sorted((ROOT / "docs" / part).glob("*.md"))
        ),
    ],
    ids=lambda path: path.name,
)
def test_every_command_that_a_page_names_exists_with_its_options(document: Path) -> None:
    text = document.read_text()
    for line in re.findall(r"^paceline (.+?)(?:\s+#.*)?$", text, re.MULTILINE):
        name, *words = line.split()
        assert name in COMMANDS, line
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        assert command is not None
        known = {option for each in command.params for option in each.opts}
        assert {each for each in words if each.startswith("--")} <= known, line


def test_every_command_has_its_help() -> None:
    for name, (_, _, summary) in COMMANDS.items():
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help, name
        assert summary.endswith("."), name
