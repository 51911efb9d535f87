"""`paceline watch`, `status`, `activate`, `rollback ID`, `cancel` against a real coordinator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from paceline.cli import Board, cells, cli, event_line, render
from paceline.cli.access import _line
from paceline.config import Endpoints, save_runtime
from paceline.errors import Conflict, NotFound
from paceline.schemas import (
    Changed,
    DeploymentMoment,
    DeploymentStatus,
    Event,
    EventItem,
    Failure,
    LeaderView,
    Moment,
    Outcome,
    PartMoment,
    StatusReport,
    WatchLine,
    WorkerStatus,
)
from paceline.tasks._support.deployment import _sentence
from paceline.units import duration, size
from tests.api.conftest import FakeAgent, creation, make_model, served  # noqa: F401

DEADLINE_S = 30.0


class Fleet:
    """A coordinator and agents that beat on a thread, until one is told to stop."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.state: Path = server.runtime.state_dir
        runtime = server.runtime.model_copy(
            update={"endpoints": Endpoints(coordinator_url=server.url)}
        )
        save_runtime(runtime)
        self.client = server.client()
        self.url, self.manifest = make_model(self.state)
        self.agents = [FakeAgent(server.client(), f"node-{n}", per_beat=1) for n in range(3)]
        for agent in self.agents:
            agent.register()
        self.still: set[str] = set()  # agents that beat and get no further
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def create(self, url: str | None = None, **more: object) -> str:
        call = creation(url or self.url, [each.worker_id for each in self.agents], **more)
        return self.client.create(call, f"key-{time.monotonic()}").deployment_id

    def until(self, deployment_id: str, status: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self.client.deployment(deployment_id).status.value != status:
            assert time.monotonic() < end_s, status
            time.sleep(0.05)

    def _beat(self) -> None:
        while not self._end.wait(0.1):
            for agent in self.agents:
                agent.per_beat = 0 if agent.worker_id in self.still else 1
                with contextlib.suppress(Exception):  # the server stops before its agents do
                    agent.beat(self.manifest)

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=20)


@pytest.fixture
def fleet(served: Any) -> Iterator[Fleet]:  # noqa: F811
    made = Fleet(served)
    yield made
    made.close()


def run(fleet: Fleet, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--state", str(fleet.state)], standalone_mode=False)


def lines_of(result: Result) -> list[Any]:
    return [WatchLine.model_validate_json(each).root for each in result.stdout.splitlines()]


def test_watch_tells_who_has_which_chunk_until_it_is_complete(fleet: Fleet) -> None:
    d = fleet.create()
    result = run(fleet, "watch", d, "--json")
    assert result.return_value == 0, result.output
    lines = lines_of(result)
    assert isinstance(lines[-1], Outcome)
    assert lines[-1].status is DeploymentStatus.COMPLETE
    assert lines[-1].workers_complete == 3
    assert next(each for each in lines if isinstance(each, Moment)).full
    parts: dict[str, PartMoment] = {}
    for each in lines:
        if isinstance(each, Moment):
            parts |= {p.worker_id: p for d in each.deployments for p in d.parts}
    whole = fleet.manifest.chunks
    for worker_id in ("node-0", "node-1", "node-2"):
        held = {c for first, last in parts[worker_id].chunks for c in range(first, last + 1)}
        assert held == set(range(len(whole)))
        assert parts[worker_id].verified
    names = [each.event.name.value for each in lines if each.kind == "event"]
    assert names[0] == "deployment.created"
    assert names.count("deployment.worker_completed") == 3

    switched = run(fleet, "activate", d, "--json")
    assert switched.return_value == 0, switched.output
    done = Changed.model_validate_json(switched.stdout)
    assert (done.status, done.workers) == ("switched", 3)

    report = StatusReport.model_validate_json(run(fleet, "status", "--json").stdout)
    assert report.leader_url == fleet.server.url
    assert [(each.answers, each.leads) for each in report.replicas] == [(True, True)]
    assert sum(each.alive for each in report.workers) == 3
    assert [each.activation for each in report.deployments] == ["active"]
    text = run(fleet, "status").stdout
    assert "leads" in text
    assert "3 alive of 3" in text

    nothing_before = run(fleet, "rollback", d[:8])
    assert isinstance(nothing_before.exception, Conflict)


def test_watch_ends_with_the_deployment_and_its_exit_code_tells_how(fleet: Fleet) -> None:
    fleet.still = {"node-1"}
    d = fleet.create()
    ended = run(fleet, "cancel", d, "--json")
    assert ended.return_value == 0, ended.output
    assert Changed.model_validate_json(ended.stdout).status == "cancelled"
    result = run(fleet, "watch", d, "--json")
    assert result.return_value == 130
    assert lines_of(result)[-1].status is DeploymentStatus.CANCELLED
    plain = run(fleet, "watch", d)
    assert plain.return_value == 130
    assert "cancelled" in plain.stdout
    assert isinstance(run(fleet, "watch", "dep-9").exception, NotFound)


def test_two_versions_and_back(fleet: Fleet) -> None:
    first = fleet.create()
    assert run(fleet, "watch").return_value == 0  # without an id: the newest
    assert run(fleet, "activate", first).return_value == 0
    url, fleet.manifest = make_model(fleet.state, "v2")
    second = fleet.create(url, version="v2")
    assert run(fleet, "watch", second).return_value == 0
    assert run(fleet, "activate", second).return_value == 0
    back = run(fleet, "rollback", second)
    assert back.return_value == 0, back.exception
    assert "v1" in back.stdout


def test_a_terminal_gets_a_map_and_the_command_ends_by_itself(fleet: Fleet) -> None:
    d = fleet.create()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", "watch", d, "--state", str(fleet.state)],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"},
    )  # fmt: skip
    os.close(theirs)
    seen, end_s = b"", time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end closed
                break
            if not data:
                break
            seen += data
    assert process.wait(timeout=20) == 0, seen.decode(errors="replace")
    text = seen.decode(errors="replace")
    for wanted in ("node-0", "node-2", "█", "complete", f"paceline activate {d}"):
        assert wanted in text
    os.close(ours)


def test_status_where_nothing_runs_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["status", "--json", "--state", str(tmp_path)], standalone_mode=False
    )
    assert result.return_value == 75
    assert not StatusReport.model_validate_json(result.stdout).running


# --- what is drawn --------------------------------------------------------------------------------


def moment(workers: int, chunks: int = 40, status: str = "distributing") -> Moment:
    parts = tuple(
        PartMoment(
            worker_id=f"node-{n}", status="receiving", alive=n % 50 != 7,
            chunks=((0, n % chunks),), bytes_held=(n % chunks + 1) * 100, upstream_worker=None,
            rate_bytes_s=1e6, standing="tail" if n == 3 else "line",
        )
        for n in range(workers)
    )  # fmt: skip
    shown = DeploymentMoment(
        deployment_id="dep-1", model_id="m", version="v1", status=status, topology="chain",
        epoch=2, progress=0.5, rate_bytes_s=3e6, eta_s=12.0, workers=workers, workers_complete=0,
        total_bytes=chunks * 100, total_chunks=chunks, started_at=0, parts=parts,
    )  # fmt: skip
    return Moment(
        at=0, full=True, leader=LeaderView(url="http://c:1", epoch=4), deployments=(shown,)
    )


@pytest.mark.parametrize(
    ("workers", "width", "height"), [(4, 80, 24), (1000, 80, 24), (1000, 200, 60), (3, 40, 10)]
)
def test_the_map_fits_any_terminal(workers: int, width: int, height: int) -> None:
    board = Board()
    board.take(moment(workers))
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(render(board, width, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height
    assert max(len(each) for each in lines) <= width
    assert any("node-7" in each for each in lines) == (workers > 7), "who is lost is always shown"


@pytest.mark.parametrize("shown", [event_line, _line, _sentence])
def test_an_event_is_shown_with_rounded_figures_and_cut_digests(
    shown: Callable[[Event], str],
) -> None:
    data = {
        "seconds": 12.345678901234, "reused_bytes": 1_500_000_000, "share": 0.123456789,
        "manifest_digest": "0123456789abcdef" * 4, "piece": 7, "code": "",
    }  # fmt: skip
    event = Event(
        seq=1, name="relay.piece_corrupt", at=0, worker_id="node-1", deployment_id="d-1", data=data
    )
    line = shown(event)
    for whole in ("12 s", "1.5 GB", "0.1235", "0123456789ab", "7"):
        assert re.search(rf"[ =(]{whole}(?=[ ,)]|$)", line), (whole, line)
    assert "code" not in line


def test_what_a_worker_says_does_not_steer_the_terminal() -> None:
    words = "no room\x1b]0;owned\x07\n12:00:00 deployment.complete [bold]\u202e"
    failure = {"code": "x\x1b[2J", "message": words}
    event = Event(seq=1, name="deployment.worker_failed", at=0, worker_id="node-1", data=failure)
    assert event_line(event).isprintable()
    board = Board()
    shown = moment(3, status="failed")
    parts = tuple(
        each.model_copy(update={"status": WorkerStatus.FAILED, "failure": Failure(**failure)})
        for each in shown.deployments[0].parts
    )
    broken = shown.deployments[0].model_copy(update={"failure": Failure(**failure), "parts": parts})
    board.take(shown.model_copy(update={"deployments": (broken,)}))
    board.take(EventItem(event=event))
    console = Console(width=120, height=40, file=io.StringIO())
    console.print(render(board, 120, 40))
    lines = console.file.getvalue().splitlines()
    assert all(line.isprintable() for line in lines), lines
    assert sum(line.startswith("12:00:00") for line in lines) == 0


def test_cells_show_what_is_held_and_what_is_coming() -> None:
    assert cells([(0, 9)], 10, 10) == "█" * 10
    assert cells([], 10, 10) == "·" * 10
    assert cells([(0, 4)], 10, 10) == "█████·····"
    assert cells([(0, 499)], 1000, 10) == "█████·····"
    assert cells([(0, 0)], 4, 4, coming=0.5) == "█▒··"
    assert cells([(3, 3)], 4, 8) == "···█"
    assert cells([(0, 0)], 1, 20) == "█"


def test_figures_read_well() -> None:
    assert [size(each) for each in (0, 999, 1000, 12_345_678, 5e11)] == [
        "0 B", "999 B", "1.0 kB", "12 MB", "500 GB",
    ]  # fmt: skip
    assert [duration(each) for each in (1.234, 12.3, 99.4, 400, 7300)] == [
        "1.2 s", "12 s", "99 s", "6:40 min", "2:01 h",
    ]  # fmt: skip


def test_every_line_of_watch_is_of_the_schema_in_the_docs() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs/schemas/watch.json").read_text())
    assert set(schema["discriminator"]["mapping"]) == {
        "moment", "event", "missed", "dropped", "outcome",
    }  # fmt: skip


def test_a_deployment_is_named_by_its_beginning_and_listed(fleet: Fleet) -> None:
    d = fleet.create()
    fleet.until(d, "complete")
    listed = run(fleet, "deployment", "list", "--json")
    (found,) = json.loads(listed.output)["deployments"]
    assert found["deployment_id"] == d
    switched = run(fleet, "deployment", "activate", d[:6], "--json")
    assert json.loads(switched.output)["deployment_id"] == d
    unknown = run(fleet, "cancel", "zz")
    assert isinstance(unknown.exception, NotFound)
