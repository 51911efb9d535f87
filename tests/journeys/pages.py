"""The commands that a page of the docs shows, for journeys to type."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.journeys.hosts import ROOT


def commands_under(page: str, heading: str, **values: str) -> list[str]:
    """Return the lines of the ``sh`` blocks below ``heading`` of ``docs/PAGE``.

    ``values`` replace the placeholders in capitals.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    blocks = re.findall(r"^```sh\n(.*?)^```", sections[heading], re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert lines, f"{page} shows no commands under {heading!r}"
    return [filled(line, values) for line in lines]


def filled(line: str, values: Mapping[str, str]) -> str:
    """Return ``line`` with each placeholder's value."""
    for name, value in values.items():
        line = re.sub(rf"\b{name}\b", value, line)
    return line
