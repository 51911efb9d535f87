"""Figures of a training job on their way to MLflow and Prefect's page, by a thread of their own.

Whoever follows the ranks must hear every node within its lease (30 s), and a server that hangs can
keep a caller for as long. So the follower only leaves figures here, and never waits: what a server
does not take waits within bounds, the oldest is lost first, and that is told.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from paceline.errors import PacelineError, TemporaryError
from paceline.registry import MetricPoint

logger = logging.getLogger(__name__)

METRICS_A_REQUEST = 200  # a request to MLflow costs more than a step
METRICS_KEPT = 20_000  # while MLflow is away; older ones are lost
SEND_EVERY_S = 5.0
CLOSE_S = 45.0  # for what waits at the end: longer than one call to MLflow may take


class Figures:
    """Takes figures at once and sends them later; use it in a ``with``, whose end sends the rest.

    ``send`` gives points to MLflow; ``show`` a fraction to a page, which must not raise.
    """

    def __init__(
        self, send: Callable[[Sequence[MetricPoint]], None], show: Callable[[float], None]
    ) -> None:
        self._send, self._show = send, show
        self._changed = threading.Condition()
        self._points: list[MetricPoint] = []
        self._fraction: float | None = None
        self._lost = 0
        self._refused = ""
        self._closing = False
        context = contextvars.copy_context()  # Prefect's, of the run whose page it is
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="figures", daemon=True
        )

    def __enter__(self) -> Figures:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        with self._changed:
            left = len(self._points) + self._lost
        if left or self._refused:
            logger.warning("figures did not reach MLflow count=%d why=%s", left, self._refused)

    def take(self, points: Sequence[MetricPoint], fraction: float) -> None:
        """Leave figures to be sent, and how far training is."""
        with self._changed:
            self._fraction = fraction
            if not self._refused:
                self._points += points
            if (over := len(self._points) - METRICS_KEPT) > 0:
                del self._points[:over]
                self._lost += over
            if len(self._points) >= METRICS_A_REQUEST:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(SEND_EVERY_S)
                closing, points, fraction = self._closing, self._points, self._fraction
                self._points, self._fraction = [], None
            if fraction is not None:
                self._show(fraction)
            if points:
                self._deliver(points)
            if closing:
                return

    def _deliver(self, points: list[MetricPoint]) -> None:
        try:
            self._send(points)
        except TemporaryError as error:  # the ranks go on, and the figures come later
            logger.warning("metrics wait for MLflow: %s", error)
            with self._changed:
                self._points = points + self._points
        except PacelineError as error:  # no ranks are stopped for it, but it is told
            logger.warning("MLflow takes no metrics: %s", error)
            with self._changed:
                self._refused = error.one_line()
                self._lost += len(points)
