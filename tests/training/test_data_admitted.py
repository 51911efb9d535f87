"""Data that a job cannot be trained on is refused before any rank is started."""

from __future__ import annotations

import logging

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


def test_what_reading_costs_many_nodes_is_said(
    camp: Camp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = camp.job("many", ranks=6)
    admit(job, "node-0", camp.store)
    assert not caplog.messages, "of so little data nothing is"
    monkeypatch.setattr("paceline.data.loading.columns.TOLD_BYTES", 0)
    with caplog.at_level(logging.WARNING):
        admit(job, "node-0", camp.store)
    (said,) = caplog.messages
    assert "fetch the data 6.0 times in all" in said and "fewer nodes" in said
