"""The commands of the how-to pages, as journeys type them.

A journey names a block and what the words in capitals stand for; what it types is the page's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from tests.journeys.hosts import ROOT, Ended, Host

PAGE = ROOT / "docs/how-to/bring-up-a-fleet.md"
_FENCE = re.compile(r"^```sh \S+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def commands(page: str, kind: str = "sh") -> dict[str, str]:
    """Return the blocks of ``docs/PAGE`` by their names (```` ```sh NAME ````)."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(rf"^```{kind} (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


KEPT = {"snapshot": "snapshot.json", "training start": "trained.json", "evaluate": "report.json"}


def keeping(text: str) -> str:
    """Return ``text`` whose commands print JSON into a file each, which the journey reads."""

    def kept(line: re.Match[str]) -> str:
        return f"{line[0]} --json > {KEPT[line[1]]}"

    return re.sub(rf"^paceline ({'|'.join(KEPT)}) .+$", kept, text, flags=re.MULTILINE)


def commands_under(page: str, heading: str, **values: str) -> list[str]:
    """Return the lines of the ``sh`` blocks below ``heading`` of ``docs/PAGE``; ``values`` replace
    the words in capitals.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    lines = [line for each in _FENCE.findall(sections[heading]) for line in each.splitlines()]
    assert lines, f"{page} shows no commands under {heading!r}"
    return [filled(line, values) for line in lines if line.strip()]


def filled(line: str, values: Mapping[str, str]) -> str:
    """Return ``line`` with each placeholder's value."""
    for name, value in values.items():
        line = re.sub(rf"\b{name}\b", value, line)
    return line
