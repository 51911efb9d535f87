"""`paceline WORDS` within the test's process: what it prints, and its exit code."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import jsonschema
from pydantic import BaseModel

from paceline.cli import cli, run
from paceline.cli.commands import GROUPS, group_of
from paceline.schemas import PRINTED, SCHEMAS


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def paceline(*words: str | Path, **environment: str) -> Ended:
    """Run `paceline WORDS` with changes of the environment; a start of Python would cost 2 s."""
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("paceline")
    handlers, code = list(logger.handlers), 0
    with (
        mock.patch.object(sys, "argv", ["paceline", *map(str, words)]),
        mock.patch.dict(os.environ, environment),
        # boto3's sessions keep the credentials of a process
        mock.patch.dict("paceline.storage.client._sessions", clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            logger.handlers[:] = handlers
    if "--json" in words and code in (0, 1, 3):
        require_schema(typed_command(words), out.getvalue())
    return Ended(code, out.getvalue(), err.getvalue())


def typed_command(words: Sequence[str | Path]) -> str:
    """Return the short form of the command that ``words`` name; "" for none."""
    command: click.Command | None = cli
    named: list[str] = []
    while isinstance(command, click.Group) and len(named) < len(words):
        context = click.Context(command)
        name, command, _ = command.resolve_command(context, [str(words[len(named)])])
        named.append(str(name))
    return short_of(tuple(named))


def short_of(words: tuple[str, ...]) -> str:
    """Return a command's words as the tables of ``cli.commands`` have them."""
    if words[0] in GROUPS and len(words) > 1:
        return " ".join((group_of(words[0]).entries[words[1]], *words[2:]))
    return " ".join(words)


def require_schema(command: str, printed: str) -> None:
    """Check that each line that ``command`` printed with --json is as one of its schemas has it."""
    first, *others = (schema_of(SCHEMAS[name]) for name in (*PRINTED[command], "error"))
    for line in printed.splitlines():
        answer = json.loads(line)
        if not any(jsonschema.Draft202012Validator(each).is_valid(answer) for each in others):
            jsonschema.validate(answer, first)


@functools.cache
def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema(mode="serialization")
