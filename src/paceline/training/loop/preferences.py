"""Direct preference optimisation: the sigmoid loss of pairs of answers, and its figures.

Rafailov et al. 2023 (arXiv 2305.18290, equation 7), as TRL's DPOTrainer computes it. A pair is a
row of a batch; the model reads its two conversations as two rows, so that neither sees the other.
Does not know where the reference's log-probabilities come from.

Shapes in names: B pairs, S sides (chosen, rejected), R = B × S rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.data import REJECTED_AT, Batch
from paceline.training.loop.workload import Inputs, Workload, as_tensor, weighted_loss

WIDTH_STEP = 8  # rows are padded to a multiple of it


@dataclass
class Preferences:
    """The task: Σ over pairs of −log σ(β × (what the answers' log-probabilities gained on those of
    the reference, the chosen one's minus the rejected one's)).

    ``reference`` returns a batch's log-probabilities (R) under the base; it is set once the model
    is spread over ranks, each of which calls it equally often.
    """

    task: Workload
    beta: float
    reference: Callable[[Inputs], Tensor] | None = None
    # of ranks that each have a part of every row: the sum over these of log-probabilities
    summed: Callable[[Tensor], Tensor] = lambda scores: scores

    def build(self) -> nn.Module:
        """Return the model of the task."""
        return self.task.build()

    def inputs(self, batch: Batch, device: torch.device) -> Inputs:
        """Return the conversations as rows (chosen, rejected, chosen, …), and what the reference
        gives them. The last target receives the rewards of the answers, for ``figure_sums``."""
        assert self.reference is not None, "the model is spread over ranks first"
        found = _rows(batch, device)
        reference_R = self.reference(found)
        targets = (*found.targets, reference_R, torch.zeros_like(reference_R))
        return Inputs(found.args, targets, found.weight)

    def loss_sum(self, outputs: Any, *targets: Tensor) -> Tensor:
        """Return the loss, summed over pairs; without a reference's scores among ``targets``, the
        log-probability of each row's answer (R)."""
        targets_RT, weights_RT, present_B, *more = targets
        rows = (each.split(1) for each in (outputs, targets_RT, weights_RT))
        scores_R = self.summed(
            -torch.stack([weighted_loss(*row) for row in zip(*rows, strict=True)])
        )
        if not more:
            return scores_R
        reference_R, rewards_R = more
        gained_R = self.beta * (scores_R - reference_R)
        rewards_R.copy_(gained_R.detach())
        chosen_B, rejected_B = gained_R.view(-1, 2).unbind(1)
        return -torch.dot(F.logsigmoid(chosen_B - rejected_B), present_B.to(gained_R.dtype))

    def figure_sums(self, inputs: Inputs) -> dict[str, float]:
        """Return sums over pairs: rewards as the paper has them, and how often the chosen answer's
        is higher (TRL's ``rewards/…``)."""
        *_, present_B, _, rewards_R = inputs.targets
        chosen_B, rejected_B = rewards_R.view(-1, 2).unbind(1)
        of = {
            "reward_chosen": chosen_B,
            "reward_rejected": rejected_B,
            "reward_margin": chosen_B - rejected_B,
            "reward_accuracy": chosen_B > rejected_B,
        }
        sums = torch.stack([(each * present_B).sum() for each in of.values()]).tolist()
        return dict(zip(of, sums, strict=True))


def _rows(batch: Batch, device: torch.device) -> Inputs:
    """Return the conversations of ``batch``'s pairs as rows, and which pairs count."""
    at_B = batch.features[REJECTED_AT][:, 0].astype(np.int64)
    size = batch.weights_BT.shape[1]
    counts_BT = batch.weights_BT > 0
    present_B = counts_BT.any(axis=1)
    # padding behind the last token that counts is not worth a row's width
    last_B = np.where(present_B, size - counts_BT[:, ::-1].argmax(axis=1), at_B)
    first_BS = np.stack([np.zeros_like(at_B), at_B], axis=1)
    end_BS = np.stack([at_B, last_B], axis=1)
    width = -(-max(1, int((end_BS - first_BS).max())) // WIDTH_STEP) * WIDTH_STEP
    from_BST = first_BS[:, :, None] + np.arange(width)
    inside_BST = from_BST < end_BS[:, :, None]
    places = np.arange(len(at_B))[:, None, None], np.minimum(from_BST, size - 1)
    inputs_RT, targets_RT, weights_RT = (
        each[places].reshape(-1, width)
        for each in (batch.inputs_BT, batch.targets_BT, batch.weights_BT)
    )
    counted = torch.from_numpy(weights_RT * inside_BST.reshape(-1, width))
    present = torch.from_numpy(present_B.astype(np.float32))
    return Inputs(
        args=(as_tensor(inputs_RT, device),),
        targets=(as_tensor(targets_RT, device), counted.to(device), present.to(device)),
        weight=float(present_B.sum()),
    )
