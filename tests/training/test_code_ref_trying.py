"""A user's own task meets its first batch before any rank does: what it does wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data import Batch
from paceline.errors import InvalidInput, PacelineError, TrainingFailed
from paceline.training import byte_gru
from paceline.training.loop import Inputs
from paceline.training.user_code import (
    Task,
    first_rows,
    parse,
    require_code,
    tree_digest,
    try_batch,
)
from tests.training.conftest import Camp

REF = parse("paceline.training.recurrent:byte_gru")
TASK = Task(parameters=10_000, context=8)


class Bytes:
    """A task that is right; tests change one of its parts."""

    def build(self) -> nn.Module:
        return nn.Embedding(256, 256)

    def inputs(self, batch: Batch, device: torch.device) -> Any:
        tokens_BT = torch.from_numpy(batch.inputs_BT.astype(np.int64)).to(device)
        return Inputs(args=(tokens_BT,), targets=(tokens_BT,), weight=float(batch.weights_BT.sum()))

    def loss_sum(self, outputs: Any, *targets: torch.Tensor) -> Any:
        (targets_BT,) = targets
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets_BT.flatten()) * 16


def batch() -> Batch:
    tokens_BT = np.arange(16, dtype=np.uint8).reshape(2, 8)
    weights_BT = np.ones((2, 8), np.float32)
    return Batch(0, tokens_BT, tokens_BT, weights_BT, range(2), 16.0)


def refused(**parts: Callable[..., Any]) -> PacelineError:
    wrong = type("Wrong", (Bytes,), parts)()
    with pytest.raises(PacelineError) as caught:
        try_batch(wrong, wrong.build(), batch(), REF)
    assert caught.value.got and "byte_gru" in str(caught.value.where)
    return caught.value


def test_a_task_that_is_right_passes(camp: Camp) -> None:
    try_batch(Bytes(), Bytes().build(), batch(), REF)
    found = first_rows(camp.job("tried"), TASK)
    assert found is not None and found.inputs_BT.shape == (2, 8)
    ours = byte_gru(TASK)
    try_batch(ours, ours.build(), found, REF)


def test_collation_that_raises_or_returns_something_else_is_refused() -> None:
    def raising(self: object, *_: object) -> Any:
        raise KeyError("stars")

    error = refused(inputs=raising)
    assert isinstance(error, TrainingFailed) and "KeyError: 'stars'" in error.one_line()
    assert "collation" in error.what
    as_dict = refused(inputs=lambda *_: {"input_ids": 1})
    assert isinstance(as_dict, InvalidInput) and "args, targets, weight" in str(as_dict.wanted)
    right = Bytes().inputs(batch(), torch.device("cpu"))
    lists = Inputs(args=list(right.args), targets=right.targets, weight=1.0)  # type: ignore[arg-type]
    assert "args" in refused(inputs=lambda *_: lists).what
    nan = Inputs(args=right.args, targets=right.targets, weight=float("nan"))
    assert "weight" in refused(inputs=lambda *_: nan).what


def test_a_loss_that_cannot_be_trained_on_is_refused() -> None:
    def shape(outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="none"
        )

    assert "no scalar" in refused(loss_sum=lambda _, out, targets: shape(out, targets)).what
    assert "no scalar" in refused(loss_sum=lambda *_: 3.0).what
    assert "differentiated" in refused(loss_sum=lambda *_: torch.tensor(1.0)).what
    alone = torch.ones((), requires_grad=True)
    assert "does not depend" in refused(loss_sum=lambda *_: alone * 2).what
    error = refused(loss_sum=lambda _, out, targets: shape(out, targets[:, :3]).sum())
    assert "loss (loss_sum) raised on the first batch" in error.one_line()


def test_a_model_that_cannot_take_the_batch_is_refused() -> None:
    error = refused(build=lambda _: nn.Linear(3, 3))
    assert "model raised on the first batch" in error.one_line()


def test_a_large_model_is_only_asked_to_collate() -> None:
    class Large(Bytes):
        def build(self) -> nn.Module:
            return nn.Embedding(256, 256, device="meta")

    try_batch(Large(), Large().build(), batch(), REF)


def test_a_job_whose_code_cannot_collate_is_refused_before_any_rank(
    camp: Camp, tmp_path: Path
) -> None:
    (tmp_path / "odd_task.py").write_text(
        "from paceline.training.recurrent import RecurrentWorkload\n"
        "class Odd(RecurrentWorkload):\n"
        "    def inputs(self, batch, device):\n"
        "        return batch.features['stars']\n"
        "def make(task):\n"
        "    return Odd(task.vocabulary, 16)\n"
    )
    text = f"file://{tmp_path}@sha256:{tree_digest(tmp_path)}#odd_task:make"
    security = camp.runtime.profile.security.model_copy(update={"code_sources": (str(tmp_path),)})
    profile = camp.runtime.profile.model_copy(update={"security": security})
    runtime = camp.runtime.model_copy(
        update={"profile": profile, "state_dir": camp.runtime.state_dir}
    )
    with pytest.raises(
        TrainingFailed, match=r"collation.*KeyError: 'stars' \(odd_task.py, line 4\)"
    ):
        require_code(camp.job("odd", code_ref=text), runtime, 256)
