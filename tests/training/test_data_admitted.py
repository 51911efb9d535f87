"""Data that a job cannot be trained on is refused before any rank is started."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.training.launcher import admit
from tests.training.conftest import Camp

NOWHERE = "tests.data.nothing_here"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"transform": f"{NOWHERE}:clean"}, "no such transform"),
        ({"columns": 4}, "columns do not divide the global batch"),
        ({"token_features": ["pitch"]}, "token_features that the snapshot does not have"),
    ],
)
def test_what_ranks_could_not_do_is_refused(camp: Camp, data: dict, words: str) -> None:
    with camp.trusting(NOWHERE), pytest.raises(InvalidInput, match=words) as caught:
        admit(camp.job("refused", data=data), "node-0", camp.store)
    assert caught.value.do
