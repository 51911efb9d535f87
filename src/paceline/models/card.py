"""Model cards (README.md): what a training's export, and a promoted version, say of themselves.

The same records give the same bytes. Figures that change from run to run (seconds, latency), and
the layout of the ranks, are left out: a card is a file of the version that the gate judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CARD_FILE = "README.md"
MAX_CARD_BYTES = 1024 * 1024  # of a base's card that is read
# What a fine-tuned model takes over from its base's card.
INHERITED = ("license", "license_name", "license_link", "language")


def card_text(
    title: str,
    rows: Mapping[str, str],
    judgement: Sequence[str],
    reproduce: str,
    where: str = "On the installation that trained it:",
    *,
    base_card: str,
    base_model: str,
    is_pretrained: bool,
) -> str:
    """Return a card with the ``rows`` of the training, the lines of its ``judgement``, and what
    `paceline reproduce` takes, and ``where``.

    ``base_card`` is the README.md of the base model, whose licence the card repeats. Of a model
    that transformers loads (``is_pretrained``) it says so; "" as ``base_model``: it has no name.
    """
    import yaml

    known = _metadata(base_card)
    facts: dict[str, Any] = {each: known[each] for each in INHERITED if _is_plain(known.get(each))}
    facts |= {"base_model": base_model} if base_model else {}
    if is_pretrained:
        facts |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    facts["tags"] = ["paceline"]
    licence = facts.get("license_name") or facts.get("license")
    front = yaml.safe_dump(facts, sort_keys=True, allow_unicode=True)
    lines = [
        f"---\n{front}---",
        f"# {title}",
        "",
        f"Licence: {licence or 'that of the base model, whose card names none'}.",
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Evaluation",
        "",
        *judgement,
        "",
        "## Reproduce",
        "",
        where,
        "",
        "```",
        f"paceline reproduce {reproduce}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def read_card(*paths: Path) -> str:
    """Return the first of these cards that is there and no larger than cards are; else ""."""
    for path in paths:
        if path.is_file() and path.stat().st_size <= MAX_CARD_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _is_plain(value: object) -> bool:
    """Return whether ``value`` is a short text, or a list of some: aliases of YAML may stand for
    gigabytes."""
    its = value if isinstance(value, list) else [value]
    return 0 < len(its) <= 100 and all(isinstance(e, str) and 0 < len(e) <= 500 for e in its)


def _metadata(card: str) -> Mapping[str, Any]:
    """Return what stands in ``card`` between its first two lines of ``---``; {} where nothing."""
    import yaml

    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.load(parts[1], yaml.BaseLoader)  # noqa: S506 - makes texts, lists and dicts
    except (yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
