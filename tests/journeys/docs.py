"""Commands as the docs have them: fenced blocks ```` ```sh NAME ```` of a page."""

from __future__ import annotations

import re

from tests.journeys.hosts import ROOT


def commands(page: str) -> dict[str, str]:
    """Return the named blocks of ``docs/<page>``."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"^```sh (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
