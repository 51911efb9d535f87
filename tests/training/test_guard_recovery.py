"""Fault 23: a loss that is no number, planted; the job goes back and passes over its batch."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data import Batch
from paceline.training.checkpoint import Generations
from paceline.training.loop import BadStep, TransformerWorkload
from tests.training.conftest import BUCKET, Camp

BAD = 9  # a batch between the generations of steps 8 and 12


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of batch ``BAD`` is no number, whenever it is read."""
    newest: list[int] = []
    inputs, loss_sum = TransformerWorkload.inputs, TransformerWorkload.loss_sum

    def reading(self: TransformerWorkload, batch: Batch, device: Any) -> Any:
        newest[:] = [batch.step]
        return inputs(self, batch, device)

    def spoilt(self: TransformerWorkload, outputs: Any, *targets: Any) -> Any:
        return loss_sum(self, outputs, *targets) * (float("nan") if newest == [BAD] else 1.0)

    monkeypatch.setattr(TransformerWorkload, "inputs", reading)
    monkeypatch.setattr(TransformerWorkload, "loss_sum", spoilt)


def generations(camp: Camp, job_id: str) -> list[int]:
    return Generations(camp.store, f"s3://{BUCKET}/checkpoints/{job_id}").steps()


def test_the_job_returns_to_a_healthy_checkpoint_and_skips_the_batch(
    camp: Camp, poisoned: None
) -> None:
    with pytest.raises(BadStep) as caught:
        camp.run_alone(camp.job("rolls-back"))
    assert (caught.value.step, caught.value.batch) == (BAD, BAD)
    newest, *_ = generations(camp, "rolls-back")
    assert newest <= 8, "nothing behind the bad batch was saved"
    code, said = camp.run_alone(camp.job("rolls-back", skip_batches=(BAD,)))
    assert code == 0
    assert said.of("resumed")[0].step == newest
    assert len(said.losses) == 24 - newest
    assert all(isinstance(each, float) for each in said.losses)
    assert "step_skipped" not in said.of("step")[-1].data
