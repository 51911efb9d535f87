"""The command line: fast help, one line an error, honest exit codes, JSON where asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import start_up
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from tests.support.command import paceline
from tests.support.rclone import RcloneS3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from paceline.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'prefect', 'dask', 'distributed', 'torch', 'mlflow', 'boto3', 'pandas',"
        " 'fastapi', 'pydantic', 'rich', 'numpy'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "lifecycle" in done.stdout


def test_a_mistyped_command_names_the_right_one() -> None:
    words = [sys.executable, "-m", "paceline.cli.main", "dmeo"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Did you mean 'demo'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "needles"),
    [
        (("demo", "--set", "cluster.link_mbits=6"), 2, ("cluster.link_mbits", "'link_mbit'")),
        (("demo", "--set", "nonsense"), 2, ("KEY=VALUE",)),
        (("demo", "--profile", "embeded"), 2, ("embedded",)),
        (("demo", "--data", "/does/not/exist"), 1, ("/does/not/exist", "directory")),
        (("lifecycle",), 75, ("nothing runs here", "paceline up")),
        (("distribute", "m", "1"), 75, ("paceline up",)),
        (("status",), 75, ()),
        (("snapshot", "--max-bytes", "300000"), 2, ("300000", "--max-bytes", "64MiB")),
        (("snapshot", "--shard-bytes", "9B"), 2, ("'9B'", "--shard-bytes", "1KiB")),
        (("promote", "m", "--report", "run-2026"), 75, ("nothing runs here",)),
        (
            ("evaluate", "m", "--base", "1", "--trained", "tj-4f", "--snapshot", "s3://b/d"),
            75,
            ("nothing runs here",),
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_bad_input_is_one_line_and_an_exit_code(
    tmp_path: Path, words: tuple[str, ...], code: int, needles: tuple[str, ...]
) -> None:
    done = paceline(*words, "--state", str(tmp_path / "state"))
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    assert len(lines) == (1 if needles else 0)
    for needle in needles:
        assert needle in lines[0]
    assert "Traceback" not in done.stderr


def test_the_benchmark_of_start_up_runs_and_speaks_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_up.main(["--no-progress", "--repeats", "1", "--only", "jobs show", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ends"] == "75"
    assert row["cpu_s"] > 0


@pytest.mark.parametrize(
    ("prints", "first"),
    [
        ("print('\\033[1m', end='', flush=True); sys.stderr.write('  works\\n\\nmore')", "works"),
        ("time.sleep(0)", start_up.NO_LINE),
    ],
)
def test_the_benchmark_waits_for_a_line_on_either_output_and_never_hangs(
    prints: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "DEADLINE_S", 3.0)
    default = "signal.signal(signal.SIGINT, signal.SIG_DFL)"  # in the background it is ignored
    code = f"import signal, sys, time; {default}; {prints}; time.sleep(600)"
    _, _, ended, line = start_up.started([sys.executable, "-c", code], tmp_path, True)
    assert (line, ended) == (first, -signal.SIGINT)


def test_json_carries_the_error_too(tmp_path: Path) -> None:
    done = paceline("lifecycle", "--json", "--state", str(tmp_path))
    answer = json.loads(done.stdout)
    assert answer["status"] == "failed"
    assert answer["error"]["code"] == "NotReady"
    assert answer["error"]["do"]
    assert done.returncode == 75


def test_down_where_nothing_runs_says_so(tmp_path: Path) -> None:
    done = paceline("down", "--json", "--state", str(tmp_path))
    assert done.returncode == 0
    assert json.loads(done.stdout)["was_running"] is False
    lacking = tmp_path / "lacking"
    done = paceline("down", "--state", str(lacking))
    assert done.stdout.replace("\n", "") == f"nothing was running: there is no {lacking}"


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (("simulate", "--size", "1GB"), ("Missing option", "paceline simulate --help")),
        (("plan", "--size", "1GB"), ("no fleet to plan for", "--workers N --link SPEED")),
        (("plan", "--size", "1GB", "--workers", "many"), ("many", "paceline plan --help")),
        (("simulate", "--seed", "-1"), ("-1", "paceline simulate --help")),
        (("publsh",), ("Did you mean 'publish'?", "paceline --help")),
        (("plan", "--speed", "9"), ("--speed", "paceline plan --help")),
    ],
    ids=" ".join,
)
def test_a_misused_command_is_one_line_and_json_too(
    words: tuple[str, ...], needles: tuple[str, ...]
) -> None:
    done = paceline(*words, "--json")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "InvalidInput"
    for needle in needles:
        assert needle in line
        assert needle in error["message"]


RUN = """
import contextlib, io, json, sys
from paceline.cli import run
found = []
for words in json.loads(sys.argv[1]):
    sys.argv, out, err = ["paceline", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run()
        except SystemExit as ended:
            code = ended.code
    found.append((code, out.getvalue(), err.getvalue()))
heavy = {"prefect", "mlflow", "torch", "pandas"} & {*sys.modules}
print(json.dumps([found, sorted(heavy)]))
"""


@pytest.fixture(scope="module")
def installation(s3: RcloneS3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation's directory whose S3 server runs; it has no Prefect that answers."""
    state = tmp_path_factory.mktemp("installation")
    (s3.root / "refusing").mkdir(exist_ok=True)
    profile = Profile.model_validate({"storage": {"bucket": "refusing"}})
    endpoints = Endpoints(
        prefect_api_url="http://127.0.0.1:9/api",
        prefect_ui_url="http://127.0.0.1:9",
        mlflow_url="http://127.0.0.1:9",
        s3_url=s3.endpoint_url,
        coordinator_url="http://127.0.0.1:9",
        scheduler_address="tls://127.0.0.1:9",
    )
    secrets = Secrets(
        s3_access_key=s3.access_key, s3_secret_key=s3.secret_key, coordinator_token="t"
    )
    save_runtime(Runtime(profile=profile, state_dir=state, endpoints=endpoints, secrets=secrets))
    return state


ABSENT = [
    (("lifecycle", "--data", "/no/texts"), 1, ("/no/texts", "Check the path")),
    (("lifecycle", "--model", "nonsense"), 2, ("'nonsense'", "MODEL_ID/VERSION")),
    (("lifecycle", "--model", "org/name/1"), 1, ("org/name/1", "publish it first")),
    (("lifecycle", "--run-id", "one"), 2, ("'one'", "run-20261120")),
    (("distribute", "m", "7"), 1, ("models/m/7", "publish it first")),
    (("verify", "m", "7"), 1, ("models/m/7",)),
    (("publish", "/no/model", "--model", "m", "--version", "1"), 1, ("/no/model",)),
    (("snapshot", "/no/texts"), 1, ("/no/texts",)),
    (("training", "start", "m", "7", "--snapshot", "s3://refusing/data/x"), 1, ("models/m/7",)),
    (
        ("evaluate", "m", "--base", "7", "--trained", "0" * 64, "--snapshot", "s3://x/y"),
        1,
        ("models/m/7",),
    ),
]


def test_inputs_that_are_not_there_are_refused_before_prefect_is_imported(
    installation: Path,
) -> None:
    """One interpreter for all: what one command imported would show."""
    lines = json.dumps([(*words, "--state", str(installation)) for words, _, _ in ABSENT])
    done = subprocess.run(
        [sys.executable, "-c", RUN, lines], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    for (words, code, needles), (ended, out, err) in zip(ABSENT, found, strict=True):
        assert (ended, out) == (code, ""), (words, err)
        (line,) = err.splitlines()
        assert all(each in line for each in needles), line
