"""Events as they are kept: numbered, and made of nothing that a store or a reader would refuse.

One event that JSON, UTF-8 or a database does not take would hold up all that come after it.
"""

from __future__ import annotations

import math

from paceline.coordinator.messages import Observed
from paceline.wire.events import Event

LONGEST = 16_384  # characters of one text: 10,000 events may wait, and a million are kept


def numbered(told: Observed, seq: int) -> Event:
    """Return what ``told`` tells, under its number."""
    data = fit(told.data)
    assert isinstance(data, dict)
    return Event(
        seq=seq,
        name=told.name,
        at=told.at,
        deployment_id=_name(told.deployment_id),
        worker_id=_name(told.worker_id),
        data=data,
    )


def cleaned(event: Event) -> Event:
    """Return ``event`` as ``numbered`` would have made it."""
    changed = {
        "deployment_id": _name(event.deployment_id),
        "worker_id": _name(event.worker_id),
        "data": fit(event.data),
    }
    return event.model_copy(update=changed)


def fit(value: object) -> object:
    """Return ``value`` as JSON has it: no NaN, no half characters, text for the rest."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            return _text(value)
        case dict():
            return {_text(str(key)): fit(each) for key, each in value.items()}
        case list() | tuple():
            return [fit(each) for each in value]
        case _:
            return _text(str(value))


def _text(text: str) -> str:
    text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    return text.encode("utf-8", "replace").decode()


def _name(name: str | None) -> str | None:
    return None if name is None else _text(name).replace("\0", "\ufffd")
