"""What goes wrong, when and where: seeded, or as somebody observed it on real machines.

A schedule file is a JSON list of objects: ``{"at_s": 12.5, "worker": "node-3", "kind": "kill"}``.

kind     what happens
kill     the process dies; its peers see a reset at once (restart_s: it comes back after so long)
silence  the host is gone without a word: nothing arrives, nothing is refused
freeze   the process stops for ``for_s`` seconds and goes on (0: it never does, like silence)
rate     its link carries ``value`` Mbit/s from then on
corrupt  the share ``value`` of the pieces that it sends from then on are corrupt
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

from pydantic import TypeAdapter, ValidationError

from paceline.errors import InvalidInput
from paceline.wire.base import Record

Kind = Literal["kill", "silence", "freeze", "rate", "corrupt"]
KINDS = get_args(Kind)
MOST_FAULTS = 100_000


class _Line(Record):
    at_s: float
    worker: str
    kind: Kind
    for_s: float = 0.0
    restart_s: float | None = None
    value: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong, ``at_s`` seconds after the plan was accepted."""

    at_s: float
    worker: str
    kind: Kind
    for_s: float = 0.0
    restart_s: float | None = None
    value: float = 0.0


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the schedule in ``path``; raises InvalidInput."""
    try:
        lines = TypeAdapter(list[_Line]).validate_python(json.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
        raise InvalidInput(
            "cannot read the fault schedule",
            got=_said(error)[:300],
            wanted='a JSON list such as [{"at_s": 1, "worker": "node-0", "kind": "kill"}]',
            where=path,
        ) from error
    if len(lines) > MOST_FAULTS or any(not 0 <= line.at_s < 1e9 for line in lines):
        raise InvalidInput(
            "bad fault schedule", wanted=f"at most {MOST_FAULTS} faults at times >= 0", where=path
        )
    return tuple(Fault(**line.model_dump()) for line in lines)


def _said(error: Exception) -> str:
    """Return what is wrong, in one line: of a bad line which one, which of its fields, and why."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors(include_url=False)[0]
    line, *field = first["loc"] or ("",)
    where = f"fault {line + 1}" if isinstance(line, int) else "the file"
    return " ".join([f"{where}:", *map(str, field), first["msg"]])


def seeded_deaths(
    names: list[str], *, share: float, silent: float, within_s: float, random: Random
) -> list[Fault]:
    """Return the deaths of ``share`` of the workers, uniformly over ``within_s``."""
    victims = random.sample(names, min(len(names) - 1, round(share * len(names))))
    return [
        Fault(
            at_s=random.random() * within_s,
            worker=victim,
            kind="silence" if random.random() < silent else "kill",
        )
        for victim in victims
    ]
