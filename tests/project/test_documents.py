"""What README and the docs name exists: paths, make targets, commands, options."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from paceline.cli import COMMANDS, cli
from paceline.cli.commands import leaves

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOPS = ("src", "flows", "tasks", "docs", "profiles", "tests", "deployments", "benchmarks", ".ci")


def test_every_path_that_a_document_names_exists() -> None:
    missing = []
    for document in DOCUMENTS:
        text = document.read_text()
        links = set(re.findall(r"\]\(([\w./-]+)\)", text))
        named = set(re.findall(r"`([\w./-]+/[\w./-]*)`", text)) | links
        named = {each for each in named if each.split("/")[0] in TOPS}
        missing += [(document.name, each) for each in named if not (ROOT / each).exists()]
        missing += [(document.name, e) for e in links if not (document.parent / e).exists()]
    assert not missing


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_every_command_that_a_page_names_exists_with_its_options() -> None:
    parts = ("how-to", "tutorials", "explanation")
    pages = [page for part in parts for page in (ROOT / "docs" / part).glob("*.md")]
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *pages))
    for line in re.findall(r"^paceline (.+?)(?:\s+#.*)?$", text, re.MULTILINE):
        words, command = line.split(), cli
        while isinstance(command, click.Group):
            command = command.get_command(None, words.pop(0))  # type: ignore[arg-type]
        assert command is not None, line
        known = {option for each in command.params for option in each.opts}
        assert {each for each in words if each.startswith("--")} <= known, line


def test_every_command_has_its_help() -> None:
    for name, (_, _, summary) in COMMANDS.items():
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help, name
        assert summary.endswith("."), name


def texts(code: str) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings."""
    tree = ast.parse(code)
    docs = [getattr(node, "body", [None]) for node in ast.walk(tree)]
    ours = {id(body[0].value) for body in docs if isinstance(body, list) and body
            and isinstance(body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ours:
            yield node.value


def test_no_message_and_no_help_names_a_file_that_a_wheel_lacks() -> None:
    modules = [*ROOT.glob("src/paceline/**/*.py"), *ROOT.glob("tasks/**/*.py")]
    codes = {path.name: code for path in modules if "docs/" in (code := path.read_text("utf-8"))}
    said = [(name, text) for name, code in codes.items() for text in texts(code) if "docs/" in text]
    assert len(modules) > 300
    assert not said
    every = [(name, cli.get_command(None, name)) for name in COMMANDS]  # type: ignore[arg-type]
    helps = {
        words: command.help or ""
        for name, each in every
        if each is not None
        for words, command in leaves(name, each)
    }
    assert len(helps) > 40
    assert not [name for name, text in helps.items() if re.search(r"\bdocs/(?!schemas)", text)]


def test_the_code_map_lists_the_layers_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    page = (ROOT / "docs/explanation/code-map.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(r"^## Layers\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    layers = [re.split(r" {2,}|$", line)[0] for line in drawn.splitlines()]
    assert layers == contracts["contracts"][0]["layers"]
