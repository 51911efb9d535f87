"""Held-out loss of the server's weights, on a copy, while they go on changing.

One evaluation at a time: one that is due while another runs is left out. The last one, of the
final weights, is waited for.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import nn

from paceline.errors import PacelineError, TemporaryError
from paceline.training.evaluating import Evaluator
from paceline.training.group import Group
from paceline.training.loading import Loaded
from paceline.training.loop import CPU, Progress
from paceline.training.mesh import Mesh, MeshSpec
from paceline.training.parallel import parallelise
from paceline.training.relaxed.learner import put

log = logging.getLogger(__name__)

Weights = npt.NDArray[Any]


class Beside:
    """Evaluates ``model``'s weights as they were when it began; None: it never does."""

    def __init__(self, evaluator: Evaluator | None, model: nn.Module, its: Loaded) -> None:
        self._evaluator, self._workload, self._settings = evaluator, its.workload, its.job.settings
        self._thread: threading.Thread | None = None
        self._found: dict[str, float] = {}
        self._failed: PacelineError | None = None
        if evaluator is not None:
            scratch = copy.deepcopy(model)
            self._parallel = parallelise(scratch, Mesh(MeshSpec()), self._settings, its.workload)
            self._parameters = [each for each in scratch.parameters() if each.requires_grad]

    def begin(self, step: int, weights: Callable[[], Weights]) -> None:
        """Evaluate ``weights()`` in a thread where ``step`` is one to evaluate after."""
        every = self._settings.evaluate_every_steps
        if self._evaluator is None or not every or step % every or step == self._settings.steps:
            return  # the last one is not of this thread's
        if self._thread is not None:
            return
        put(self._parameters, weights())
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)
        self._thread.start()

    def take(self, progress: Progress) -> dict[str, float]:
        """Return what an evaluation that ended found, once, and keep it in ``progress``.

        Raises what it failed with, unless the next one may do better.
        """
        if self._thread is None or self._thread.is_alive():
            return {}
        self._thread.join()
        self._thread = None
        failed, self._failed = self._failed, None
        if isinstance(failed, TemporaryError):
            log.warning("evaluation was left out: %s", failed.one_line())
            return {}
        if failed is not None:
            raise failed
        progress.held_out = self._found
        return self._found

    def last(self, weights: Weights, progress: Progress) -> None:
        """Evaluate the final weights, here; in ``progress`` when it returns."""
        if self._evaluator is None:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        put(self._parameters, weights)
        progress.held_out = self._evaluate()

    def close(self) -> None:
        """Nobody waits for an evaluation that still runs: it reads and changes nothing else."""
        self._thread = None

    def _run(self) -> None:
        try:
            self._found = self._evaluate()
        except PacelineError as error:
            self._failed = error

    def _evaluate(self) -> dict[str, float]:
        assert self._evaluator is not None
        return self._evaluator.evaluate(self._parallel, self._workload, Group(), CPU).metrics()
