"""Progress of stages on standard error: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from paceline.manifest import ProgressFormatter
from paceline.tasks._support.run import StageUpdate

if TYPE_CHECKING:
    from paceline.manifest import PublishProgress

LINE_EVERY_S = 5.0
RATE_OVER_S = 10.0
WIDE = 100  # columns; a narrower terminal has a shorter bar


def whole() -> Column:
    """Return a column that is never cut."""
    return Column(no_wrap=True, min_width=1)


class StageBars:
    """Shows StageUpdates; call it as a listener inside a ``with``.

    With ``patient`` and without a terminal, a stage's first line comes after LINE_EVERY_S and a
    shorter stage prints nothing, because the command's result covers it.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patient = patient
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.fields[mark]} {task.description:<16}", table_column=whole()),
            BarColumn(bar_width=24 if self._console.width >= WIDE else 12, table_column=whole()),
            TextColumn("{task.percentage:>3.0f}%", table_column=whole()),
            TimeElapsedColumn(table_column=whole()),
            # the one column that gives way: a long message ends in an ellipsis
            TextColumn(
                "{task.fields[message]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            expand=True,
            console=self._console,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._line_at: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, update: StageUpdate) -> None:
        """Show ``update``."""
        if self._live:
            self._bar(update)
        else:
            self._line(update)

    def say(self, line: str) -> None:
        """Show one line above the bars."""
        if self._live:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{line}\n")

    def _bar(self, update: StageUpdate) -> None:
        if update.stage not in self._tasks:
            self._tasks[update.stage] = self._progress.add_task(
                update.stage, total=1.0, mark=" ", message=""
            )
        mark = ("=" if update.reused else "✓") if update.done else "…"
        message = f"{update.message} (already done)" if update.reused else update.message
        task_id = self._tasks[update.stage]
        self._progress.update(task_id, completed=update.fraction, mark=mark, message=message)
        if update.done:
            self._progress.stop_task(task_id)

    def _line(self, update: StageUpdate) -> None:
        now = time.monotonic()
        if self._patient and update.stage not in self._line_at:
            began = self._began.setdefault(update.stage, now)
            if update.done or now - began < LINE_EVERY_S:
                return
        # at 0 it is what the stage waits for, which changes rarely
        stands = update.fraction == 0.0 and update.message != self._said.get(update.stage)
        soon = now - self._line_at.get(update.stage, -1e9) < LINE_EVERY_S
        if soon and not (update.done or stands):
            return
        self._line_at[update.stage], self._said[update.stage] = now, update.message
        state = "already done" if update.reused else "done" if update.done else "…"
        if not update.done:
            state = f"{update.fraction:4.0%}"
        sys.stderr.write(f"{update.stage:<16} {state:>12}  {update.message}\n")
        sys.stderr.flush()


class PublishBars(StageBars):
    """Progress of ``publish_model``; pass ``show`` to it."""

    def __init__(self) -> None:
        super().__init__(patient=True)
        self._pace = ProgressFormatter()

    def show(self, moved: PublishProgress) -> None:
        """Show the progress."""
        said = self._pace.said(moved, time.monotonic())
        self(StageUpdate(stage=moved.stage, fraction=moved.share, message=said, done=moved.is_over))


class RelayBars(StageBars):
    """Progress of ``distribute``, in pieces on all workers; pass ``show`` to it."""

    def __init__(self) -> None:
        super().__init__(patient=True)
        self._past: deque[tuple[float, int]] = deque()  # (time, pieces held), last RATE_OVER_S

    def show(self, held: int, wanted: int) -> None:
        """Show the progress and the remaining time."""
        now_s = time.monotonic()
        self._past.append((now_s, held))
        while len(self._past) > 2 and now_s - self._past[0][0] > RATE_OVER_S:
            self._past.popleft()
        (then_s, then), left = self._past[0], wanted - held
        rate = (held - then) / (now_s - then_s) if now_s > then_s else 0.0
        eta = f", {left / rate:.0f} s left" if left > 0 and rate > 0 else ""
        said = f"{held:,} of {wanted:,} pieces on all workers{eta}"
        share, done = held / wanted if wanted else 0.0, 0 < wanted <= held
        self(StageUpdate(stage="relay", fraction=share, message=said, done=done))
