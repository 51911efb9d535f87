"""Terminal display of one deployment's event stream: figures, map of workers × chunks, events.

``Board`` merges the stream's items; ``render`` draws the board for a given width and height. This
module opens no connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.client import Follower, Item, Lost
from paceline.errors import Cancelled, DeploymentFailed
from paceline.schemas import (
    ChunkRun,
    DeploymentMoment,
    DeploymentStatus,
    Dropped,
    Event,
    EventItem,
    EventName,
    LeaderView,
    Missed,
    Moment,
    Outcome,
    PartMoment,
    WorkerMoment,
    WorkerStatus,
)
from paceline.text import printable, shortened
from paceline.units import described, duration, size

SHOWN_EVENTS = 6
LINE_EVERY_S = 5.0  # without a terminal
HEAD_ROWS = 8  # terminal rows that show no workers
SHADES = "·░▒▓█"
FAILED = (WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
BAD = (
    EventName.WORKER_LOST,
    EventName.WORKER_FAILED,
    EventName.SOURCE_LOST,
    EventName.PIECE_CORRUPT,
    EventName.WORKER_SLOW,
    EventName.WORKER_QUARANTINED,
    EventName.FLOW_DELAYED,
    EventName.FLOW_ENDED,
)
COLOURS = {"complete": "green", "failed": "red", "cancelled": "yellow", "stalled": "red"}


@dataclass
class Board:
    """The merged state of one deployment, from the items received so far."""

    deployment: DeploymentMoment | None = None
    parts: dict[str, PartMoment] = field(default_factory=dict)
    workers: dict[str, WorkerMoment] = field(default_factory=dict)
    leader: LeaderView = field(default_factory=LeaderView)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=200))
    missed: int = 0
    lost: Lost | None = None
    heard_s: float = 0.0

    def take(self, item: Item) -> None:
        """Merge ``item`` into the board."""
        self.heard_s = time.monotonic()
        match item:
            case Moment():
                self.lost = None
                self._moment(item)
            case EventItem():
                self.events.append(item.event)
            case Missed():
                self.missed += item.first - item.after - 1
            case Dropped():
                self.lost = Lost(item.reason, self.heard_s)
            case Lost():
                self.lost = item

    def _moment(self, moment: Moment) -> None:
        if moment.full:
            self.parts.clear()
            self.workers.clear()
        self.leader = moment.leader
        self.workers |= {each.worker_id: each for each in moment.workers}
        for each in moment.deployments:
            self.deployment = each
            self.parts |= {part.worker_id: part for part in each.parts}


@dataclass
class View:
    """A rich renderable that draws the board at the terminal's present size."""

    board: Board

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render(self.board, options.max_width, options.size.height)


def render(board: Board, width: int, height: int) -> RenderableType:
    """Return a drawing of the board's present state."""
    shown = board.deployment
    if shown is None:
        return Text(_connection(board), style="dim")
    worth = [each for each in board.events if each.name is not EventName.WORKER_COMPLETED]
    events = worth[-SHOWN_EVENTS:]
    rows = max(4, height - HEAD_ROWS - len(events))
    lines: list[RenderableType] = [
        _title(shown, width),
        _figures(shown, width),
        _map(board, shown, width, rows),
    ]
    if board.missed:
        lines.append(Text(f"{board.missed} earlier events are no longer held", style="dim"))
    lines += [_sentence(each) for each in events]
    lines.append(Text(_connection(board), style="red" if board.lost else "dim", no_wrap=True))
    return Group(*lines)


def figures(shown: DeploymentMoment) -> str:
    """Return a deployment's figures on one line, for output without a terminal."""
    parts = [
        f"{shown.status.value} {shown.progress:.0%}",
        f"{shown.workers_complete} of {shown.workers} workers complete",
    ]
    if shown.workers_failed:
        parts.append(f"{len(shown.workers_failed)} failed")
    if not shown.status.is_final:
        if shown.rate_bytes_s:
            parts.append(f"{size(shown.rate_bytes_s)}/s")
        if shown.eta_s is not None:
            parts.append(f"{duration(shown.eta_s)} left")
    return ", ".join(parts)


def event_line(event: Event) -> str:
    """Return an event as a line of text."""
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    data = dict(event.data)
    change = f"{data.pop('from')} → {data.pop('to')}" if {"from", "to"} <= data.keys() else ""
    detail = described(data)
    words = [event.name.value, event.worker_id or "", change, f"({detail})" if detail else ""]
    return printable(" ".join([at, *(each for each in words if each)]))


def is_bad(event: Event) -> bool:
    """Return whether a person should look at this event."""
    return event.name in BAD or event.data.get("to") in ("failed", "stalled", "cancelled")


def cells(runs: Iterable[ChunkRun], chunks: int, width: int, coming: float = 0.0) -> str:
    """Return a bar of at most ``width`` cells that shows which of ``chunks`` are held.

    ``coming`` further chunks are in transfer; they are drawn after the chunks held from the start.
    """
    count = max(1, min(chunks, width))
    filled = [0.0] * count
    begin = 0.0
    for first, last in runs:
        _fill(filled, first, last + 1, chunks)
        if first <= begin:
            begin = max(begin, last + 1.0)
    if coming > 0:
        _fill(filled, begin, min(chunks, begin + coming), chunks)
    return "".join(_shade(each) for each in filled)


def _fill(filled: list[float], first: float, end: float, chunks: int) -> None:
    scale = len(filled) / chunks
    left, right = first * scale, end * scale
    for cell in range(int(left), min(len(filled), int(right) + 1)):
        share = min(right, cell + 1) - max(left, cell)
        filled[cell] = min(1.0, filled[cell] + max(0.0, share))


def _shade(share: float) -> str:
    if share >= 1 - 1e-6:
        return SHADES[-1]
    if share <= 1e-6:
        return SHADES[0]
    return SHADES[1 + min(2, int(share * 3))]


def _title(shown: DeploymentMoment, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis", end="\n")
    line.append(f"{shown.model_id} {shown.version}", style="bold")
    line.append("  ")
    line.append(shown.status.value, style=COLOURS.get(shown.status.value, "cyan"))
    if shown.activation != "none":
        line.append(f", {shown.activation}", style="green")
    line.append(f"  {shown.deployment_id}  {size(shown.total_bytes)}  {shown.topology.value}")
    if shown.epoch > 1:
        line.append(f"  plan {shown.epoch}")
    line.truncate(width)
    if shown.failure is not None:
        why = printable(f"{shown.failure.code}: {shown.failure.message}")
        line.append(f"\n{why}", style="red")
    return line


def _figures(shown: DeploymentMoment, width: int) -> Text:
    done = max(0, min(width // 4, 30))
    full = int(shown.progress * done)
    parts = [f"{shown.workers_complete} of {shown.workers} workers"]
    if shown.workers_failed:
        parts.append(f"{len(shown.workers_failed)} failed")
    if shown.status.is_final:
        if shown.seconds is not None:
            parts.append(f"took {duration(shown.seconds)} (bound {duration(shown.bound_seconds)})")
    else:
        parts.append(f"{size(shown.rate_bytes_s)}/s")
        left = "unknown" if shown.eta_s is None else f"{duration(shown.eta_s)} left"
        parts.append(f"ETA {left}" if shown.eta_s is None else left)
    if width >= 100:
        parts.append(f"{size(shown.origin_bytes)} from the source")
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("━" * full, style="green")
    line.append("━" * (done - full), style="bright_black")
    line.append(f" {shown.progress:4.0%}", style="bold")
    line.append("  " + "  ".join(parts))
    line.truncate(width)
    return line


def _map(board: Board, shown: DeploymentMoment, width: int, rows: int) -> Table:
    """Return one row per worker in natural order; where rows are short, the most urgent."""
    parts = sorted(board.parts.values(), key=lambda each: _natural(each.worker_id))
    hidden: list[PartMoment] = []
    if len(parts) > rows:
        by_need = sorted(parts, key=lambda each: (_need(each), each.bytes_held))
        seen = {each.worker_id for each in by_need[: rows - 1]}
        hidden = [each for each in parts if each.worker_id not in seen]
        parts = [each for each in parts if each.worker_id in seen]
    name_width = max([6, *(len(each.worker_id) for each in parts)])
    wide = width >= 100
    map_width = max(8, width - min(name_width, 24) - (56 if wide else 34))
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=True, header_style="dim")
    table.add_column("worker", no_wrap=True, max_width=24)
    table.add_column("chunks", no_wrap=True, width=min(map_width, max(shown.total_chunks, 6)))
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    if wide:
        table.add_column("from", no_wrap=True, max_width=18, overflow="ellipsis")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for each in parts:
        state, style = _state(each)
        total = shown.total_bytes or 1
        whole = sum(last - first + 1 for first, last in each.chunks)
        coming = each.bytes_held / total * shown.total_chunks - whole
        drawn = cells(each.chunks, shown.total_chunks, map_width, coming)
        source = "" if each.verified else _source(each.upstream_worker)
        row = [
            Text(each.worker_id, style="" if each.alive else "dim"),
            Text(drawn, style=style if style in ("red", "dim") else "green"),
            Text(f"{min(1.0, each.bytes_held / total):.0%}"),
            Text(f"{size(each.rate_bytes_s)}/s" if each.rate_bytes_s else ""),
        ]
        table.add_row(*row, *([Text(source, style="dim")] if wide else []), Text(state, style))
    if hidden:
        table.add_row(Text(f"… {len(hidden)} more", style="dim"), Text(_sum(hidden, shown), "dim"))
    return table


def _sum(parts: list[PartMoment], shown: DeploymentMoment) -> str:
    held = sum(each.bytes_held for each in parts) / (len(parts) * (shown.total_bytes or 1))
    return f"{sum(each.verified for each in parts)} complete, {held:.0%} held"


def _need(part: PartMoment) -> int:
    """Return a part's display priority: 0 for failed or lost ones, 3 for complete ones."""
    if part.verified:
        return 3
    if part.status in FAILED or not part.alive:
        return 0
    return 1 if part.standing != "line" else 2


def _state(part: PartMoment) -> tuple[str, str]:
    if part.activated:
        return "active", "green"
    if part.verified:
        return "complete", "green"
    if not part.alive:
        return "lost", "red"
    if part.status in FAILED:
        why = f": {printable(part.failure.code)}" if part.failure else ""
        return f"{part.status.value.replace('_', ' ')}{why}", "red"
    if part.standing != "line":
        return part.standing, "yellow"
    return part.status.value, "cyan" if part.bytes_held else "dim"


def _source(key: str | None) -> str:
    return "the source" if key and key.startswith("origin:") else key or ""


def _sentence(event: Event) -> Text:
    text = Text(event_line(event), style="red" if is_bad(event) else "dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _connection(board: Board) -> str:
    if board.lost is not None:
        return f"reconnecting: {board.lost.reason} (the transfer goes on)"
    if board.deployment is None:
        return "connecting…"
    leader = board.leader
    if leader.leads:
        return f"the leader, epoch {leader.epoch}, {leader.url}".rstrip(", ")
    return f"a standby, {leader.url}; the leader is {leader.leader_url or 'not known'}"


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)


# What a stream shows until its deployment has ended: on a terminal, as lines, as JSON.


def until_ended(follower: Follower, board: Board) -> Iterator[Item]:
    """Yield items up to the one in which the deployment has ended."""
    for item in follower.items():
        board.take(item)
        yield item
        ended = board.deployment is not None and board.deployment.status.is_final
        if ended and isinstance(item, Moment):
            return


def lines_of_json(follower: Follower, board: Board) -> DeploymentMoment:
    last = ""
    for item in until_ended(follower, board):
        if isinstance(item, Lost):
            continue  # the follower reconnects, or raises
        if isinstance(item, Moment) and not (item.full or item.deployments or item.workers):
            continue
        line = item.model_dump_json()
        if line != last:
            click.echo(line)
        last = line
    return shown_end(board)


def lines_of_text(follower: Follower, board: Board) -> DeploymentMoment:
    """Print each event, and changed figures at most every LINE_EVERY_S."""
    said, said_s, lost = "", -LINE_EVERY_S, False
    for item in until_ended(follower, board):
        now_s = time.monotonic()
        if isinstance(item, EventItem):
            mark = "! " if is_bad(item.event) else ""
            click.echo(f"{mark}{event_line(item.event)}")
        elif isinstance(item, Missed):
            click.echo(f"{item.first - item.after - 1} earlier events are no longer held")
        elif isinstance(item, Lost):
            if not lost:
                click.echo(f"! reconnecting: {item.reason}; the transfer goes on", err=True)
            lost = True
        elif board.deployment is not None:
            lost = False
            line = figures(board.deployment)
            if line != said and now_s - said_s >= LINE_EVERY_S:
                click.echo(line)
                said, said_s = line, now_s
    return shown_end(board)


def live(follower: Follower, board: Board, console: Console) -> DeploymentMoment:
    with Live(View(board), console=console, refresh_per_second=4, transient=True):
        for _ in until_ended(follower, board):
            pass
    # The final state stays on the screen, with as many workers as fit.
    console.print(render(board, console.width, max(console.height, 40)))
    return shown_end(board)


def shown_end(board: Board) -> DeploymentMoment:
    assert board.deployment is not None
    return board.deployment


def outcome_of(ended: DeploymentMoment) -> Outcome:
    codes = {
        DeploymentStatus.COMPLETE: 0,
        DeploymentStatus.CANCELLED: Cancelled.exit_code,
    }
    return Outcome(
        deployment_id=ended.deployment_id,
        status=ended.status,
        seconds=ended.seconds,
        workers_complete=ended.workers_complete,
        workers_failed=ended.workers_failed,
        failure=ended.failure,
        exit_code=codes.get(ended.status, DeploymentFailed.exit_code),
    )


def said_of(ended: DeploymentMoment) -> str:
    took = f" in {duration(ended.seconds)}" if ended.seconds is not None else ""
    line = (
        f"{ended.status.value}{took}: {ended.model_id} {ended.version} on "
        f"{ended.workers_complete} of {ended.workers} workers"
    )
    if ended.workers_failed:
        line += f", without {shortened(ended.workers_failed)}"
    if ended.failure is not None and ended.status is not DeploymentStatus.COMPLETE:
        line += "\n" + printable(f"{ended.failure.code}: {ended.failure.message}")
    return line
