"""How long commands take before their work: imports, help, refusals, the first line of progress.

    python -m benchmarks.start_up                        # one table; what needs no installation
    python -m benchmarks.start_up --state .paceline      # also against an installation that is up
    python -m benchmarks.start_up --state .paceline --train MODEL_ID VERSION SNAPSHOT_URL
    python -m benchmarks.start_up --no-progress --repeats 1 --json

Each command runs in a process of its own, in an empty directory with an empty HOME; the figures are
the wall time and the CPU time of the process until its end, or until the first visible line where
it would go on. Such a command has a terminal for standard output and error, as a person's has, and
is interrupted then; where no line comes within DEADLINE_S it is ended, and the row says so.
Medians; the first of several --repeats is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.admission import cpu_model

REFUSAL_S, FIRST_LINE_S = 1.0, 3.0  # goals
DEADLINE_S = 120.0  # of a first line, and of the end after an interrupt
NO_LINE = "no line"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|[\x00-\x09\x0b-\x1f]")
PACELINE = (sys.executable, "-m", "paceline.cli.main")
DIGEST = "5f" * 32
SHOWN = ("--version", "--help", "training start --help")
# one of each group, and what everyone types: nothing runs here, or the input is bad
REFUSED = (
    "publish ./none s3://bucket/m/1 --model m --version 1",
    "model evaluate m --base 1 --trained none --snapshot s3://b/d",
    "data snapshot ./none",
    "training local --text ./none",
    "train --model ./none",
    "train --text texts --mlflow foo://x",
    "checkpoints list ./none",
    "jobs show none",
    "run where not-a-run",
    "deployment create m 1",
    "deployment plan --size 500 --workers 3",
    "fleet workers",
    "service agent --state ./none --worker-id node-1 --link-mbit none",
)
# work begins, without an installation
BEGUN = (
    "train --text texts --steps 1000 --ranks 1",
    "distribute texts --into nodes --model m --as-version 1",
    "demo",
)
# an installation is up, and the input is bad
REFUSED_THERE = (
    "publish ./none --model m --version 1",
    "verify none 1",
    f"evaluate none --base 1 --trained {DIGEST} --snapshot s3://b/d",
    "snapshot ./none",
    f"training start none 1 --snapshot s3://b/{DIGEST}",
    "jobs show none",
    "lifecycle --data ./none",
    "lifecycle --model none/1",
    "where run-20260101-000000-000000",
    "distribute none 1",
    "activate 00000000-0000-4000-8000-000000000000",
    "rollback none",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One command's start; ``goal_s`` 0.0: none."""

    command: str
    wall_s: float
    cpu_s: float
    goal_s: float = 0.0
    ends: str = ""  # exit code and last line, or the first line of progress


def started(words: list[str], below: Path, first_line: bool) -> tuple[float, float, int, str]:
    """Run a command; return wall and CPU seconds, exit code, and its first or last line.

    The CPU seconds of a command with a first line are those until that line.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE")}
    env |= {"HOME": str(below), "XDG_CONFIG_HOME": str(below), "COLUMNS": "100"}
    if first_line:
        return _interrupted_at_first_line(words, below, env)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        words, cwd=below, env=env, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    wall_s, lines = time.perf_counter() - began, done.stdout.splitlines()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return wall_s, cpu_s, done.returncode, (lines or [""])[-1].strip()


def _interrupted_at_first_line(
    words: list[str], below: Path, env: dict[str, str]
) -> tuple[float, float, int, str]:
    terminal, inner = pty.openpty()
    began = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=below, env=env | {"TERM": "xterm"}, stdin=subprocess.DEVNULL,
        stdout=inner, stderr=inner, start_new_session=True,
    )  # fmt: skip
    os.close(inner)
    try:
        line = _first_line(terminal, began + DEADLINE_S)
        wall_s, cpu_s = time.perf_counter() - began, _cpu_s(process.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                _drain(terminal, process, time.perf_counter() + DEADLINE_S)
    finally:
        os.close(terminal)
    return wall_s, cpu_s, process.wait(), line


def _first_line(terminal: int, until: float) -> str:
    """Return the first line with a visible character; NO_LINE where none comes in time."""
    seen = b""
    while (left := until - time.perf_counter()) > 0 and select.select([terminal], [], [], left)[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # EIO: every writer has closed it
            break
        # A bar is drawn without a line's end.
        shown = CONTROL.sub("", seen.decode(errors="replace")).strip()
        if shown:
            return shown.splitlines()[0].strip()
    return NO_LINE


def _drain(terminal: int, process: subprocess.Popen[bytes], until: float) -> None:
    """Read what the process still prints until it ends."""
    while process.poll() is None and time.perf_counter() < until:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                os.read(terminal, 65536)
            except OSError:
                time.sleep(0.1)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, as the kernel counts them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(label: str, words: list[str], goal_s: float, repeats: int, kind: str) -> Measured:
    """Return the medians of a command; ``kind`` is how it must end.

    "shows": well; "refuses": with a code, and one line that says why; "begins": it is interrupted
    after its first line, or has no line in time.
    """
    with tempfile.TemporaryDirectory() as below:
        (Path(below) / "texts").mkdir()
        (Path(below) / "texts" / "a.txt").write_text("A line of text to learn from.\n" * 4000)
        runs = [started(words, Path(below), kind == "begins") for _ in range(repeats)]
        runs = runs[1:] or runs
    code, line = runs[-1][2:]
    if kind == "refuses":
        assert code and line.startswith("paceline: ") and "defect" not in line, f"{label}: {line}"
    assert kind != "shows" or code == 0, f"{label}: {code}, {line}"
    return Measured(
        command=label,
        wall_s=round(statistics.median(each[0] for each in runs), 2),
        cpu_s=round(statistics.median(each[1] for each in runs), 2),
        goal_s=goal_s,
        ends=line[:60] if kind == "begins" else f"{code}",
    )


def table(rows: list[Measured]) -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| command | wall s | CPU s | goal s | ends with |", "|---|---|---|---|---|"]
    for each in rows:
        missed = " (missed)" if each.goal_s and each.wall_s > each.goal_s else ""
        ends = each.ends.replace("|", "/")
        goal = f"{each.goal_s:g}" if each.goal_s else ""
        lines.append(
            f"| `{each.command}` | {each.wall_s:.2f}{missed} | {each.cpu_s:.2f} | {goal} | {ends} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table (or one line of JSON), and return the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--state", type=Path, help="An installation that is up.")
    parser.add_argument("--only", default="", help="A part of the command.")
    parser.add_argument("--no-progress", action="store_true", help="Start no training and no demo.")
    parser.add_argument(
        "--train",
        nargs=3,
        metavar=("MODEL_ID", "VERSION", "SNAPSHOT_URL"),
        help="What train and distribute of the installation begin with.",
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows = []

    there = ["--state", str(asked.state.absolute())] if asked.state else []

    def row(label: str, words: list[str], goal_s: float, kind: str) -> None:
        if asked.only in label:
            rows.append(measure(label, words, goal_s, asked.repeats, kind))

    row("import paceline", [sys.executable, "-c", "import paceline"], 0.0, "shows")
    for command in SHOWN:
        row(f"paceline {command}", [*PACELINE, *command.split()], REFUSAL_S, "shows")
    for command in REFUSED:
        row(f"paceline {command}", [*PACELINE, *command.split()], REFUSAL_S, "refuses")
    for command in REFUSED_THERE if there else ():
        label = f"paceline {command} (installation)"
        row(label, [*PACELINE, *command.split(), *there], REFUSAL_S, "refuses")
    model, version, snapshot = asked.train or ("", "", "")
    begun_there = ["lifecycle", "snapshot texts", "publish texts --model started --version 1"]
    if model:
        begun_there.append(f"train {model} {version} --snapshot {snapshot} --steps 10000")
        begun_there.append(f"distribute {model} {version}")
    begun: list[tuple[str, str, list[str]]] = [(command, "", []) for command in BEGUN]
    begun += [(command, " (installation)", there) for command in begun_there if there]
    for command, place, more in () if asked.no_progress else begun:
        words = [*PACELINE, *command.split(), *more]
        row(f"paceline {command}{place}: first line", words, FIRST_LINE_S, "begins")
    result = {
        "benchmark": "start_up",
        "cpu": cpu_model(),
        "load": round(os.getloadavg()[0], 1),
        "repeats": asked.repeats,
        "rows": [asdict(each) for each in rows],
    }
    if asked.json:
        print(json.dumps(result), flush=True)
    else:
        print(f"{result['cpu']}, load {result['load']}, {asked.repeats} runs each\n\n{table(rows)}")
    return result


if __name__ == "__main__":
    main()
