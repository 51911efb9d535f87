"""A worker of the parameter server: pull, compute, push, repeat; it finds the leading server.

After a lost connection it asks the leader how many of its gradients are applied, and goes on with
the next: a gradient whose answer was lost is not applied twice, and one that was not applied is
computed again from the same batch under the newest weights.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.config import TrainingSettings
from paceline.data import PlannedStream
from paceline.errors import InvalidFrame, InvalidInput, PeerLost
from paceline.training.checkpoint import stateful_of
from paceline.training.loop import Inputs, Workload, seed_step
from paceline.training.parallel import Mesh, MeshSpec, parallelise
from paceline.training.strategies.frames import (
    Frame,
    FrameKind,
    array_frame,
    array_of,
    find_leader,
    integer_of,
    receive,
    send,
)
from paceline.training.strategies.learner import copy_into, flat_gradients
from paceline.training.strategies.port import Address, Array, BatchReport, Compute, Task, Terms

RETRY_S = 0.05
SILENCES = 2  # times ``silence_s``, before a worker looks for another server


class Worker:
    """The connection of worker ``worker`` to the server that leads at one of ``addresses()``."""

    def __init__(
        self,
        worker: int,
        addresses: Callable[[], Sequence[Address]],
        terms: Terms,
        compute: GradientComputer,
        *,
        away_s: float = 30.0,
        on_frame: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_frame`` is called for each frame from a server, at least for each heartbeat."""
        self._worker, self._addresses, self._terms = worker, addresses, terms
        self._count, self._dtype, self._away_s = compute.count, compute.dtype, away_s
        self._on_frame = on_frame
        self.computed = 0  # gradients, including those computed again after a lost connection
        self.staleness: list[int] = []  # of each applied gradient

    def run(self, compute: Compute, on_push: Callable[[Task], None] = lambda _: None) -> None:
        """Push ``terms.pushes`` gradients; ``on_push`` is called after each that was applied.

        Raises PeerLost where no server leads for longer than ``away_s``, InvalidInput where the
        server refuses a gradient.
        """
        lost_at: float | None = None
        while True:
            before = len(self.staleness)
            try:
                return self._push_all(compute, on_push)
            except PeerLost as error:
                now = time.monotonic()
                if lost_at is None or len(self.staleness) > before:
                    lost_at = now
                if now > lost_at + self._away_s:
                    raise PeerLost(
                        "no parameter server leads",
                        got=error.what,
                        wanted=f"one within {self._away_s:.0f} s",
                        where=list(self._addresses()),
                    ) from error
                time.sleep(RETRY_S)

    def _push_all(self, compute: Compute, on_push: Callable[[Task], None]) -> None:
        # A live server sends heartbeats while we wait for it; a frozen one does not.
        silence_s = max(SILENCES * self._terms.silence_s, 1.0)
        hello = {"role": "worker", "worker": self._worker, "key": self._terms.key}
        connection, welcome = find_leader(self._addresses(), hello, FrameKind.WELCOME, silence_s)
        with connection:
            self._on_frame()
            done, position = integer_of(welcome, "applied"), welcome.head.get("position")
            for sequence in range(done + 1, self._terms.pushes + 1):
                task = Task(self._worker, sequence, position if sequence == done + 1 else None)
                send(connection, Frame(FrameKind.PULL))
                frame = self._expect(connection, FrameKind.WEIGHTS, self._count * 8 + 1024)
                base = integer_of(frame, "version")
                gradient, report = compute(task, array_of(frame, self._count, self._dtype))
                self.computed += 1
                head = {"sequence": sequence, "base": base, "report": report.model_dump()}
                send(connection, array_frame(FrameKind.PUSH, gradient, **head))
                answer = self._expect(connection, FrameKind.ANSWER)
                self.staleness.append(integer_of(answer, "version") - 1 - base)
                on_push(task)

    def _expect(self, connection: socket.socket, wanted: FrameKind, max_bytes: int = 0) -> Frame:
        """Return the next frame that is no heartbeat; each must arrive within the deadline."""
        while (frame := receive(connection, max_bytes)).kind is FrameKind.BEAT:
            self._on_frame()
        self._on_frame()
        if frame.kind is FrameKind.REFUSED:
            raise InvalidInput("parameter server refused", got=frame.head.get("message"))
        if frame.kind is not wanted:
            raise InvalidFrame("unexpected frame from a parameter server", got=frame.kind.name)
        return frame


class GradientComputer:
    """The ``Compute`` of a workload; ``open_share`` opens the data of a share at a task.

    A gradient that is computed again starts from the same batch, and from the state that a
    recurrent model had before it. ``model`` belongs to this rank and is overwritten with each
    task's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        settings: TrainingSettings,
        workers: int,
        open_share: Callable[[Task], PlannedStream],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._workload, self._settings, self._workers = workload, settings, workers
        self._open_share, self._device = open_share, device
        self._parallel = parallelise(model, Mesh(MeshSpec(), 0, device.type), settings, workload)
        modules = self._parallel.modules
        self._parameters = [p for each in modules for p in each.parameters() if p.requires_grad]
        self.count = sum(each.numel() for each in self._parameters)
        self.dtype = str(self._parameters[0].dtype).removeprefix("torch.")
        self._keeps = stateful_of(self._parallel, workload)
        self.report = BatchReport()  # of the last gradient
        self._source: PlannedStream | None = None
        self._sequence = 0  # of the present batch
        self._parts: list[Inputs] = []
        self._share_tokens = 1.0
        self._fields: dict[str, Any] = {}  # of its report

    def __call__(self, task: Task, weights: Array) -> tuple[Array, BatchReport]:
        """Return gradient and report of the task's batch under ``weights``."""
        if self._source is None or task.sequence != self._sequence:
            self._read(task)
        copy_into(self._parameters, weights)
        seed_step(self._settings.seed, task.sequence, task.worker, self._device)
        # A worker's gradient is a step of its own, so it is the mean over its share.
        sums = self._parallel.accumulate(self._parts, 1.0 / self._share_tokens)
        loss = float(sums.loss) / sums.weight if sums.weight else 0.0
        if not math.isfinite(loss):  # the server will not apply it
            for each in self._keeps:
                each.roll_back()
        self.report = BatchReport(loss=loss, tokens=sums.weight, **self._fields)
        return flat_gradients(self._parameters), self.report

    def close(self) -> None:
        """Close the share's data."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _read(self, task: Task) -> None:
        if self._source is None or task.sequence != self._sequence + 1:
            self.close()
            self._source = self._open_share(task)
        waited = self._source.data_wait_s
        batch = self._source.next()
        self._sequence = task.sequence
        self._share_tokens = max(batch.global_tokens / self._workers, 1.0)
        parts = batch.split(self._settings.accumulation)
        self._parts = [self._workload.inputs(part, self._device) for part in parts]
        self._fields = {
            "batch": batch.step,
            "waited_s": self._source.data_wait_s - waited,
            "position": self._source.position,
            "quarantined": tuple(sorted(self._source.quarantined)),
        }
