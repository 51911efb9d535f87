"""Label selectors: which of the registered workers a deployment is for.

``rack=r1`` selects by label, ``rack=r1,pool=a100`` where all hold, ``node-3,node-4`` by name; ``;``
joins alternatives. "" selects every worker that is alive. Pure: the caller supplies the workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import InvalidInput, NotFound
from paceline.schemas.records import Worker
from paceline.text import shortened


def select_workers(selector: str, workers: Iterable[Worker]) -> tuple[str, ...]:
    """Return the names of the workers that ``selector`` selects, in the order of ``workers``.

    Labels select among living workers; a name selects a registered one, lost or not. Raises
    InvalidInput for an unknown label, value or form, NotFound for an unknown name, or where no
    worker is left.
    """
    known = {each.worker_id: each for each in workers}
    alternatives = [each.strip() for each in selector.split(";") if each.strip()] or [""]
    chosen = {name for each in alternatives for name in _select(each, known)}
    if not chosen:
        raise NotFound(
            "no worker is selected",
            got=selector or "every living worker",
            wanted="at least one that is registered and alive",
            do="See `paceline workers`.",
        )
    return tuple(name for name in known if name in chosen)


def _select(selector: str, known: dict[str, Worker]) -> set[str]:
    terms = [each.strip() for each in selector.split(",") if each.strip()]
    names = [each for each in terms if "=" not in each]
    if names and len(names) < len(terms):
        raise InvalidInput(
            "names and labels in one selector",
            got=selector,
            wanted="names (node-3,node-4) or labels (rack=r1,pool=a100)",
            do="Give each its own --to: what any of them selects is taken.",
        )
    if unknown := [each for each in names if each not in known]:
        raise NotFound(
            "no such worker",
            got=shortened(tuple(unknown)),
            wanted=shortened(tuple(known)) or "a registered worker; there is none",
            do="See `paceline workers`.",
        )
    if names:
        return set(names)
    alive = {name: each.labels.named for name, each in known.items() if each.alive}
    for term in terms:
        alive = _with_label(term, alive)
    return set(alive)


def _with_label(term: str, alive: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return those of ``alive`` (labels by worker) that have the label ``term``."""
    key, _, value = (each.strip() for each in term.partition("="))
    values = {labels[key] for labels in alive.values() if key in labels}
    if not values:
        keys = sorted({key for labels in alive.values() for key in labels})
        raise InvalidInput(
            "unknown label",
            got=term,
            wanted=f"one of {', '.join(keys)}" if keys else "a label; no living worker has any",
            do="See `paceline workers`.",
        )
    if value not in values:
        raise InvalidInput(
            "no living worker has this label",
            got=term,
            wanted=f"{key}={shortened(tuple(sorted(values)))}",
            do="See `paceline workers`.",
        )
    return {name: labels for name, labels in alive.items() if labels.get(key) == value}
