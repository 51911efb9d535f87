"""A worker of the parameter server: pull, compute, push, repeat; it finds the leading server.

A push without an answer is repeated with the same sequence, so a gradient whose acknowledgement was
lost with a server is not applied twice. A worker that has finished its own share requests a free
one, and ends when all are done. Raises PeerLost where no server answers for longer than ``away_s``.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import nn

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.errors import InvalidFrame, InvalidInput, PeerLost
from paceline.training.checkpoint.stateful import keeps_of, let_go
from paceline.training.loop.loop import CPU, seed_step
from paceline.training.loop.workload import Inputs, Workload
from paceline.training.parallel import parallelise
from paceline.training.parallel.mesh import Mesh, MeshSpec
from paceline.training.strategies.frames import (
    Frame,
    FrameKind,
    numbers_of,
    of_numbers,
    receive,
    send,
    whole,
)
from paceline.training.strategies.learner import flat_gradients, put
from paceline.training.strategies.protocol import BEAT_S, TURN_S, Address, BatchReport, ServerTerms

RETRY_S = 0.05
SILENCES = 2  # times ``silence_s``, before a worker looks for another server
ANSWER_S = TURN_S + 15.0  # a push may wait for another worker's turn first


@dataclass(frozen=True)
class BatchTask:
    """The batch to compute: the ``sequence``-th (from 1) of a share.

    ``position`` is where the share's data stream continues; None: at its beginning, or directly
    after the task before.
    """

    worker: int
    sequence: int
    position: dict[str, Any] | None = None


Compute = Callable[[BatchTask, npt.NDArray[Any]], tuple[npt.NDArray[Any], BatchReport]]


@dataclass
class WorkerCounts:
    """Counts of one worker."""

    pushed: int = 0
    refused: int = 0  # too stale: computed anew
    known: int = 0  # already applied; the first answer was lost
    lost: int = 0  # connections
    adopted: int = 0  # shares of other workers that it took over
    waited_s: float = 0.0
    staleness: list[int] = field(default_factory=list)


class _ShareReassigned(Exception):
    """Another worker has our share now; we were assigned another task, or none (all is done)."""


class Worker:
    """The connection of ``rank`` to the servers at ``addresses()``; its own share is ``worker``."""

    def __init__(
        self,
        worker: int,
        addresses: Callable[[], Sequence[Address]],
        terms: ServerTerms,
        count: int,
        dtype: str,
        *,
        rank: int = 0,
        away_s: float = 30.0,
        on_word: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_word`` is called for each frame from a server, at least for each heartbeat."""
        self._own, self._rank = worker, rank
        self._addresses, self._terms = addresses, terms
        self._count, self._dtype, self._away_s = count, dtype, away_s
        self._on_word = on_word
        self._connection: socket.socket | None = None
        self._task: BatchTask | None = None  # the task assigned last
        self.told = WorkerCounts()

    def run(
        self, compute: Compute, on_push: Callable[[BatchTask], None] | None = None
    ) -> WorkerCounts:
        """Push gradients until every share has ``terms.pushes`` of them; return the counts.

        ``compute(task, weights)`` returns gradient and note of the task's batch.
        """
        try:
            while (task := self._next_share()) is not None:
                with contextlib.suppress(_ShareReassigned):
                    self._work_off(task, compute, on_push)
        finally:
            self._close()
        return self.told

    def _next_share(self) -> BatchTask | None:
        if self._connection is None:
            with contextlib.suppress(_ShareReassigned):
                self._again(lambda connection: connection)
        task = self._task
        if task is not None and task.worker != self._own:
            self.told.adopted += 1
        return task

    def _work_off(
        self, task: BatchTask, compute: Compute, on_push: Callable[[BatchTask], None] | None
    ) -> None:
        while task.sequence <= self._terms.pushes:
            base, weights = self._again(self._pull)
            gradient, note = compute(task, weights)
            if self._deliver(task, base, gradient, note) == "stale":
                self.told.refused += 1
                continue
            if on_push is not None:
                on_push(task)
            task = BatchTask(task.worker, task.sequence + 1)
        self._task = self._again(self._ask_on)

    def _deliver(
        self, task: BatchTask, base: int, gradient: npt.NDArray[Any], note: BatchReport
    ) -> str:
        started = time.monotonic()

        def push(connection: socket.socket) -> Frame:
            head = {"sequence": task.sequence, "base": base, "note": note.to_head()}
            send(connection, of_numbers(FrameKind.PUSH, gradient, **head))
            return self._expect(connection, FrameKind.ANSWER, 0)

        answer = self._again(push)
        self.told.waited_s += time.monotonic() - started
        verdict = str(answer.head.get("verdict"))
        if verdict != "stale":
            self.told.pushed += 1
            self.told.known += verdict == "known"
        if verdict == "apply":
            self.told.staleness.append(whole(answer, "version") - 1 - base)
        return verdict

    def _pull(self, connection: socket.socket) -> tuple[int, npt.NDArray[Any]]:
        send(connection, Frame(FrameKind.PULL))
        frame = self._expect(connection, FrameKind.WEIGHTS, self._count * 8 + 1024)
        return whole(frame, "version"), numbers_of(frame, self._count, self._dtype)

    def _again(self, ask: Callable[[socket.socket], Any]) -> Any:
        """Return the result of ``ask``, on a new connection whenever one breaks."""
        until: float | None = None
        while True:
            try:
                return ask(self._connected())
            except PeerLost as error:
                self._close()
                now = time.monotonic()
                until = until if until is not None else now + self._away_s
                if now > until:
                    raise PeerLost(
                        "no parameter server leads",
                        got=error.what,
                        wanted=f"one within {self._away_s:.0f} s",
                        where=list(self._addresses()),
                    ) from error
                time.sleep(RETRY_S)

    def _connected(self) -> socket.socket:
        if self._connection is None:
            before = self._task
            self._connection, self._task = self._find()
            now = self._task
            if now is None or (before is not None and before.worker != now.worker):
                raise _ShareReassigned
        return self._connection

    def _find(self) -> tuple[socket.socket, BatchTask | None]:
        said: Any = "nobody answers"
        for address in self._addresses():
            try:
                connection = socket.create_connection(address, timeout=self._terms.silence_s)
            except OSError as error:
                said = error
                continue
            try:
                return connection, self._greet(connection)
            except PeerLost as error:
                said = error.what
                connection.close()
        self.told.lost += 1
        raise PeerLost("no parameter server leads", got=said)

    def _greet(self, connection: socket.socket) -> BatchTask | None:
        """Return the assigned task; None where all is done."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A live server sends heartbeats while we wait for our turn; a frozen one does not.
        connection.settimeout(max(SILENCES * self._terms.silence_s, 2 * BEAT_S))
        wanted = self._own if self._task is None else self._task.worker
        hello = {"role": "worker", "rank": self._rank, "worker": wanted, "key": self._terms.key}
        send(connection, Frame(FrameKind.HELLO, hello))
        return self._given(connection)

    def _ask_on(self, connection: socket.socket) -> BatchTask | None:
        """End this share and return a task of a free one, once there is one."""
        send(connection, Frame(FrameKind.RELEASED))
        return self._given(connection)

    def _given(self, connection: socket.socket) -> BatchTask | None:
        while (frame := receive(connection, 0)).kind is FrameKind.BEAT:
            self._on_word()
        self._on_word()
        if frame.kind is FrameKind.RELEASED:
            return None
        if frame.kind is not FrameKind.WELCOME:
            raise PeerLost("parameter server does not lead", got=frame.kind.name)
        position = frame.head.get("position")
        return BatchTask(
            whole(frame, "worker"),
            whole(frame, "applied") + 1,
            position if isinstance(position, dict) else None,
        )

    def _expect(self, connection: socket.socket, wanted: FrameKind, max_body_bytes: int) -> Frame:
        until = time.monotonic() + ANSWER_S
        while True:
            frame = receive(connection, max_body_bytes)
            self._on_word()
            if frame.kind is FrameKind.REFUSED:
                raise InvalidInput("parameter server refused", got=frame.head.get("message"))
            if frame.kind is wanted:
                return frame
            if frame.kind is not FrameKind.BEAT:
                raise InvalidFrame("parameter server said something else", got=frame.kind.name)
            if time.monotonic() > until:
                raise PeerLost("parameter server does not answer", wanted=f"in {ANSWER_S:.0f} s")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class BatchSource(Protocol):
    """The batches of a share, in order."""

    @property
    def data_wait_s(self) -> float: ...
    @property
    def quarantined(self) -> Mapping[str, str]: ...
    @property
    def position(self) -> dict[str, Any] | None: ...
    def next(self) -> Batch: ...
    def close(self) -> None: ...


@dataclass
class _Held:
    """The present batch."""

    worker: int
    sequence: int
    batch: Batch
    parts: list[Inputs]
    note: dict[str, Any]


class GradientComputer:
    """Computes the gradients that ``Worker.run`` pushes; ``open_share`` opens a share's data.

    A gradient that was too stale is computed again from the same batch, and from the state that a
    recurrent model had before it. ``model`` belongs to this rank and is overwritten with each
    task's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        settings: TrainingSettings,
        workers: int,
        open_share: Callable[[BatchTask], BatchSource],
        device: torch.device = CPU,
    ) -> None:
        self._workload, self._settings, self._workers = workload, settings, workers
        self._open_share, self._device = open_share, device
        self._parallel = parallelise(model, Mesh(MeshSpec(), 0, device.type), settings, workload)
        self._parameters = [
            each for part in self._parallel.modules for each in part.parameters()
            if each.requires_grad
        ]  # fmt: skip
        self.count = sum(each.numel() for each in self._parameters)
        self.dtype = str(self._parameters[0].dtype).removeprefix("torch.")
        self._keeps = keeps_of(self._parallel, workload)
        self.note = BatchReport()  # of the last gradient
        self._source: BatchSource | None = None
        self._held: _Held | None = None

    def __call__(
        self, task: BatchTask, weights: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], BatchReport]:
        """Return gradient and note of the task's batch under ``weights``."""
        held = self._take(task)
        put(self._parameters, weights)
        seed_step(self._settings.seed, task.sequence, task.worker, self._device)
        # A worker's gradient is a step of its own, so it is the mean over its share.
        share_tokens = max(held.batch.global_tokens / self._workers, 1.0)
        sums = self._parallel.accumulate(held.parts, 1.0 / share_tokens)
        loss = float(sums.loss) / sums.weight if sums.weight else 0.0
        if not math.isfinite(loss):  # the server will not apply it
            let_go(self._keeps)
        self.note = BatchReport(loss=loss, tokens=sums.weight, **held.note)
        return flat_gradients(self._parameters), self.note

    def close(self) -> None:
        """Close the share's data."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _take(self, task: BatchTask) -> _Held:
        held = self._held
        if held is not None and (held.worker, held.sequence) == (task.worker, task.sequence):
            return held
        follows = held is not None and (held.worker, held.sequence + 1) == (
            task.worker, task.sequence
        )  # fmt: skip
        if self._source is None or not follows:
            self.close()
            self._source = self._open_share(task)
        waited = self._source.data_wait_s
        batch = self._source.next()
        waited = self._source.data_wait_s - waited
        self._held = _Held(
            task.worker,
            task.sequence,
            batch,
            [
                self._workload.inputs(part, self._device)
                for part in batch.split(self._settings.accumulation)
            ],
            {
                "batch": batch.step,
                "waited_s": waited,
                "position": self._source.position,
                "quarantined": tuple(sorted(self._source.quarantined)),
            },
        )
        return self._held
