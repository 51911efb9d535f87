"""A job whose snapshot a validation has refused is refused where it is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.data import ValidationReport
from paceline.schemas import canonical_json, digest_of
from tests.api.conftest import call
from tests.api.test_data_purposes import JOBS, at

__all__ = ["at"]  # a fixture
CHECK = {"name": "no sample is empty", "passed": False, "got": "3 of 10 rows", "examples": []}
BAD_SHARD = {"shard": "0" * 64, "split": "train", "bytes": 1, "documents": 1, "reason": "cut"}
UNKNOWN_MODEL = "no such published model"  # what is refused next


@pytest.fixture
def validated(at: Any, s3: Any) -> Iterator[Any]:
    """A function that stores a validation's report, as the flow does, and submits a job."""
    url = f"s3://paceline/records/validation/{digest_of({'snapshot': at.snapshot.digest})}.json"

    def submit(passed: bool, **found: Any) -> Any:
        report = ValidationReport(at.snapshot.digest, passed, False, 10, 9000, [CHECK], **found)
        s3.store().put_bytes(url, canonical_json(report.to_dict()))
        body = {"model_id": "m", "version": "v1", "dataSnapshot": at.snapshot.url}
        return call(at, "POST", JOBS, at.nlp, json=body).json()

    yield submit
    s3.store().delete(url)


def test_a_snapshot_that_failed_its_validation_is_refused_at_submission(validated: Any) -> None:
    answer = validated(passed=False)
    assert answer["code"] == "DataRejected", answer
    assert answer["got"] == "no sample is empty: 3 of 10 rows"
    assert "/records/validation/" in answer["where"]
    assert "\n" not in " ".join(map(str, answer.values()))


@pytest.mark.parametrize(
    ("passed", "found"),
    [(True, {}), (False, {"quarantined": [BAD_SHARD]})],
    ids=["passed", "shards that may be stored again"],
)
def test_a_snapshot_that_may_pass_its_next_validation_is_not(
    validated: Any, passed: bool, found: dict[str, Any]
) -> None:
    assert UNKNOWN_MODEL in validated(passed, **found)["detail"]
