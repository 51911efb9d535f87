"""Every command as a person finds it: a group, an example that parses, one meaning, completion."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from paceline.cli.commands import COMMANDS, EXAMPLES, GROUPS, example_of, group_of, leaves
from paceline.cli.main import cli
from tests.support.command import paceline


def walked(command: click.Command, *words: str) -> list[tuple[tuple[str, ...], click.Command]]:
    """Return every command that is no group, by what is typed."""
    if not isinstance(command, click.Group):
        return [(words, command)]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += walked(child, *words, name)
    return found


EVERY = walked(cli)


@pytest.mark.parametrize("words", [words for words, _ in EVERY], ids=" ".join)
def test_the_help_of_each_command_has_an_example(words: tuple[str, ...]) -> None:
    done = paceline(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: paceline {' '.join(words)} ")
    _, _, example = done.stdout.partition("For example:\n")
    assert example.strip().startswith("paceline ")


def test_each_example_is_accepted_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("my-model", "texts", "dcp"):
        (tmp_path / each).mkdir()
    lines = [
        line for words in EXAMPLES for line in example_of(words).replace("\\\n", "").split("\n")
    ]
    assert len(lines) >= len(EXAMPLES)
    for line in lines:
        context: click.Context | None = None
        command: click.Command = cli
        typed = shlex.split(line.partition(" > ")[0])[1:]
        while isinstance(command, click.Group):
            parent = click.Context(command, context)
            _, found, typed = command.resolve_command(parent, typed)
            assert found is not None, line
            context, command = parent, found
        command.make_context(line, typed, context)  # raises for an option that it has not


def test_each_word_is_in_one_group_or_starts_the_help() -> None:
    grouped = [words for name in GROUPS for words in group_of(name).entries.values()]
    short = [each for each in grouped if each in COMMANDS]
    assert len(short) == len(set(short))
    listed = paceline("--help").stdout
    ambiguous = {"train", "rollback"}  # as one word; in groups each meaning has its own
    for word in set(COMMANDS) - set(short) - ambiguous:
        assert f"\n  {word} " in listed
    for name in GROUPS:
        assert f"\n  {name} " in listed
        for words in group_of(name).entries:
            assert words in listed


def test_a_command_has_the_same_options_by_its_short_form_and_in_its_group() -> None:
    by_words = dict(EVERY)
    for name in GROUPS:
        for typed, words in group_of(name).entries.items():
            if words in COMMANDS:
                for short, command in leaves(words, by_words.get((words,)) or click.Group(words)):
                    longer = by_words[name, typed, *short.split()[1:]]
                    assert [each.opts for each in longer.params] == [
                        each.opts for each in command.params
                    ]


def test_a_meaning_of_train_offers_only_its_own_options() -> None:
    here, there = (paceline("training", each, "--help").stdout for each in ("local", "start"))
    assert "--text" in here
    assert "MODEL_ID" not in here
    assert "--text" not in there
    assert "MODEL_ID VERSION" in there.replace("[", "").replace("]", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_and_completes_without_imports(shell: str) -> None:
    script = paceline("completion", shell).stdout
    assert "_PACELINE_COMPLETE" in script
    code = (
        "import sys\n"
        "from paceline.cli import run\n"
        "try:\n    run()\n"
        "finally:\n    print({'pydantic', 'rich', 'torch', 'prefect'} & {*sys.modules} or '')\n"
    )
    asked = {
        "_PACELINE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "paceline deployment ca",
        "COMP_CWORD": "ca" if shell == "fish" else "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "cancel" in done.stdout
    assert "watch" not in done.stdout
    assert "{" not in done.stdout, done.stdout


BAD = ["where nonsense", "evaluate nonsense", "promote a/b", "rollback ../x", "model rollback ../x"]


@pytest.mark.parametrize("words", BAD)
def test_a_bad_id_is_refused_at_once(tmp_path: Path, words: str) -> None:
    done = paceline(*words.split(), "--json", "--state", tmp_path)
    assert done.returncode in (2, 75)
    assert json.loads(done.stdout)["status"] == "failed"
