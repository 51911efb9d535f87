"""`paceline distribute SOURCE --into DIRECTORY`: real processes, killed and run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.manifest import build_manifest, verify_directory, write_manifest
from paceline.plan import origin_cap_bytes
from paceline.schemas import Distribution
from tests.support.command import Ended, paceline

PACELINE = [sys.executable, "-m", "paceline.cli.main", "distribute"]


def model_of(directory: Path, size: int) -> Path:
    directory.mkdir()
    (directory / "weights.bin").write_bytes(os.urandom(size))
    (directory / "config.json").write_text("{}")
    return directory


def run(*words: str | Path, cwd: Path) -> Ended:
    return paceline("distribute", *words, PACELINE_STATE=str(cwd / "state"))


def test_one_command_brings_a_directory_to_workers(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", 400_000)
    done = run(model, "--into", tmp_path / "nodes", "--workers", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = Distribution.model_validate_json(done.stdout)
    assert answer.workers_complete == 3
    assert answer.origin_ratio == 1.0
    assert answer.activated
    told = run(model, "--into", tmp_path / "nodes", "--workers", "3", cwd=tmp_path)
    assert "3 of 3 workers" in told.stdout
    first = min(each.path for each in answer.receipts)
    assert told.stdout.endswith(
        f"made:     {first} and 2 more\nnext:     paceline generate {first} PROMPT\n"
    )
    assert "already there 1,200,006" in told.stdout
    (model / "config.json").write_text("[]")
    named = ("--model", "other", "--as-version", "7")
    other = run(model, "--into", tmp_path / "nodes", *named, "--json", cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    assert (tmp_path / "nodes/worker-0/store/models/other/7/config.json").read_text() == "[]"


@pytest.mark.parametrize(
    ("words", "code", "needles"),
    [
        (("{model}", "--workers", "0"), 2, ("--workers", "x>=1")),
        (("{model}", "--to", "worker-9"), 2, ("unknown worker", "worker-9")),
        (("/no/such/model",), 1, ("source does not exist", "/no/such/model")),
        (("{model}", "--digest", "0" * 64), 1, ("another model", "0" * 64)),
        (("{model}", "--link", "fast"), 2, ("--link", "10Gbps")),
        (("{model}", "1"), 2, ("one source at a time",)),
        (("{model}", "--topology", "ring"), 2, ("--topology", "ring")),
        (("{model}", "--as-version", "active"), 2, ("called so", "active")),
        (("{changed}",), 1, ("every one of 4 workers", "not what the manifest describes")),
    ],
    ids=lambda each: " ".join(each[1:]) if isinstance(each, tuple) and each else None,
)
def test_bad_input_is_one_line_an_exit_code_and_nothing_left(
    tmp_path: Path, words: tuple[str, ...], code: int, needles: tuple[str, ...]
) -> None:
    model = model_of(tmp_path / "model", 10_000)
    changed = model_of(tmp_path / "changed", 10_000)
    write_manifest(changed, build_manifest(changed, model_id="m", version="1", link_mbit=100))
    (changed / "config.json").write_text("longer than before")
    given = [word.format(model=model, changed=changed) for word in words]
    done = run(*given, "--into", tmp_path / "nodes", "--json", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("relay ")]
    assert [line[:10] for line in said] == ["paceline: "]  # beside how far it is, every 5 s
    error = json.loads(done.stdout)["error"]
    for needle in needles:
        assert needle in error["message"]
    assert not (tmp_path / "nodes").exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_everything_killed_midway_goes_on_from_the_disks(
    tmp_path: Path, end: signal.Signals
) -> None:
    model = model_of(tmp_path / "model", 6_000_000)
    manifest = build_manifest(model, model_id="m", version="1", link_mbit=100)
    write_manifest(model, manifest)
    nodes = tmp_path / "nodes"
    words = [*PACELINE, str(model), "--into", str(nodes), "--workers", "3", "--link", "16Mbit"]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    marks = [nodes / f"worker-{n}/store/staging/{manifest.digest}/marks" for n in range(3)]
    until = time.monotonic() + 60
    while not all(path.exists() and path.stat().st_size > 0 for path in marks):
        assert running.poll() is None, "it ended before anything was durable everywhere"
        assert time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(end)
    assert running.wait(30) == (-end if end == signal.SIGKILL else 143)
    for final in nodes.glob("worker-*/store/models/m/1"):
        verify_directory(final, manifest)  # all or nothing
    again = run(model, "--into", nodes, "--workers", "3", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    answer = Distribution.model_validate_json(again.stdout)
    assert answer.workers_complete == 3
    origin = answer.origin_bytes - answer.origin_before_bytes
    assert origin + answer.received_bytes < 3 * manifest.total_size, "durable: not again"
    assert 0 < origin < manifest.total_size
    assert answer.origin_before_bytes > 0, "what was read before the end counts"
    assert answer.origin_bytes <= origin_cap_bytes(manifest.total_size)
    for receipt in answer.receipts:
        verify_directory(Path(receipt.path), manifest)
    assert not list(nodes.glob("worker-*/store/staging/*"))
