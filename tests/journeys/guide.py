"""The commands of docs/how-to/bring-up-a-fleet.md, as journeys type them.

A journey names a heading and what the words in capitals stand for; what it types is the page's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from tests.journeys.hosts import ROOT, Ended, Host

PAGE = ROOT / "docs/how-to/bring-up-a-fleet.md"
_FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (`[A-Z0-9_`, ]+`) \|", re.MULTILINE)

typed: list[tuple[str, int]] = []  # heading and number of each block that was taken


def placeholders() -> set[str]:
    """Return the words in capitals that the page's first table explains."""
    return {
        word for row in _ROW.findall(PAGE.read_text()) for word in re.findall("[A-Z0-9_]+", row)
    }


def block(heading: str, number: int = 1, /, **values: str) -> str:
    """Return the ``number``-th block below ``heading``, with ``values`` for words in capitals.

    Fails the test where the page has no such block, a word of it has no value, or a value has no
    word in the block.
    """
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = [each for each in sections if each.startswith(f"{heading}\n")]
    blocks = _FENCE.findall(section)
    assert len(blocks) >= number, f"{PAGE.name}: {heading!r} has {len(blocks)} blocks"
    text: str = blocks[number - 1]
    words = {each for each in placeholders() if re.search(rf"\b{each}\b", text)}
    assert words == set(values), f"{PAGE.name}: {heading!r} {number} stands for {sorted(words)}"
    for word, value in values.items():
        text = re.sub(rf"\b{word}\b", lambda _, value=value: value, text)
    typed.append((heading, number))
    return text


def type_on(
    host: Host,
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    machines: Mapping[str, Host] | None = None,
) -> Ended:
    """Type a block on ``host``; its ``scp`` lines copy to ``machines`` (no host runs sshd)."""
    lines = text.splitlines(keepends=True)
    copies = [each for each in lines if each.startswith("scp ")]
    rest = "".join(each for each in lines if each not in copies)
    done = host.run("bash", "-ec", rest, env=env).ok()
    for each in copies:
        _, _, what, where = shlex.split(each)
        machine, _, into = where.partition(":")
        host.copy(what, (machines or {})[machine], into)
    return done
