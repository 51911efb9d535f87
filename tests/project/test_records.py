"""What crosses a process is what it says: nothing that only passes for a number or a truth."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.schemas import Count, Record


class Pair(Record):
    """One of each kind, plain and inside."""

    count: Count = 0
    share: float = 0.0
    done: bool = False
    counts: tuple[int, ...] = ()
    by_name: dict[str, int] = {}


@pytest.mark.parametrize(
    "given",
    [
        {"count": True},
        {"count": "1"},
        {"count": 1.5},
        {"share": True},
        {"share": "0.5"},
        {"done": 1},
        {"done": "true"},
        {"counts": [1, True]},
        {"by_name": {"a": "1"}},
    ],
    ids=str,
)
def test_a_look_alike_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        Pair.model_validate(given)
    (error,) = refused.value.errors()
    assert error["loc"][0] in given


def test_what_json_writes_is_read() -> None:
    pair = Pair(count=1, share=2, done=True, counts=(1, 2), by_name={"a": 1})
    assert Pair.model_validate_json(pair.model_dump_json()) == pair
    assert Pair.model_validate(pair.model_dump(mode="json")) == pair  # lists for tuples
