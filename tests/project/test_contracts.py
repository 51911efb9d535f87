"""The frozen contracts: errors travel whole, records refuse what they do not know."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from paceline import errors
from paceline.errors import PacelineError
from paceline.schemas import (
    RUN_ID,
    CreateDeployment,
    canonical_json,
    digest_of,
    new_run_id,
)

KINDS = sorted(
    (
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, PacelineError)
    ),
    key=lambda each: each.__name__,
)


def test_an_error_crosses_a_process_with_all_its_parts() -> None:
    for kind in KINDS:
        error = kind("it broke", got=1, wanted="two", where="here", do="Mend it.")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert again.one_line() == error.one_line()
        assert again.one_line() == "it broke: got 1, wanted two, at here. Mend it."
        assert again.code == kind.__name__
        assert kind.exit_code != 0


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn = set(re.findall(r"^[│├└─ ]*([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE))
    assert {each.__name__ for each in KINDS} <= drawn


def test_a_message_stays_on_one_line() -> None:
    assert "\n" not in PacelineError("a\nb", got="c\nd").one_line()


def test_run_ids_are_well_formed_and_never_repeat() -> None:
    made = {new_run_id() for _ in range(12)}  # 24 bits a second: 200 met once in a thousand runs
    assert len(made) == 12
    assert all(re.fullmatch(RUN_ID, each) for each in made)


@given(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.none()),
)
def test_the_digest_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    turned = dict(reversed(list(value.items())))
    assert digest_of(value) == digest_of(turned)
    assert canonical_json(value) == canonical_json(turned)


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"loss": float("nan")})


def test_a_call_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        CreateDeployment.model_validate(
            {
                "model_id": "m", "version": "1", "source_url": "s3://b/k",
                "target_workers": ["node-0"], "topologie": "chain",
            }
        )  # fmt: skip
