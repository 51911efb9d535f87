"""docs/how-to/use-from-python.md: its programs run, against this machine and a coordinator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from tests.journeys.guide import commands
from tests.project.test_dials import ROOT

PAGE = ROOT / "docs/how-to/use-from-python.md"
PROGRAMS = commands("how-to/use-from-python.md", "python")


def ran(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_forecasts_and_simulates(tmp_path: Path) -> None:
    smaller = PROGRAMS["forecast"].replace(
        'simulate("20GB", workers=100', 'simulate("2GB", workers=12'
    )
    assert smaller != PROGRAMS["forecast"]
    topology, bound = ran(smaller, tmp_path).split()
    assert topology in ("chain", "tree")
    assert float(bound) == pytest.approx(400, rel=0.02)  # 500 GB at 10 Gbit/s


def test_a_program_brings_a_model_to_workers(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/w").write_bytes(os.urandom(3_000_000))
    workers, digest, _ = ran(PROGRAMS["distribute"], tmp_path).split()
    assert (workers, len(digest)) == ("3", 64)
    copies = sorted(tmp_path.glob("fleet/**/models/acme-7b/active/w"))
    assert len(copies) == 3
    assert {each.read_bytes() for each in copies} == {(tmp_path / "acme/w").read_bytes()}


def test_a_program_trains_and_reads_what_came_of_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        text = "".join(f"def f_{number}_{n}(x):\n    return x + {n}\n" for n in range(60))
        (tmp_path / f"texts/{number}.py").write_text(text)
    both = f'{PROGRAMS["train"]}\nif __name__ == "__main__":\n    print("\\0")\n    {{}}'
    text = "\n".join(f"    {line}" for line in PROGRAMS["evaluate"].splitlines())
    trained, _, evaluated = ran(both.replace("    {}", text), tmp_path).partition("\0\n")
    assert trained.startswith("4 file://")
    assert len(trained.splitlines()) > 1
    scores = [each.split() for each in evaluated.splitlines()]
    assert [each[0] for each in scores] == ["trained", "ngram", "gzip", "xz"]
    assert 0 < float(scores[0][1]) < 16 and 0 < float(scores[0][2]) < 1
    assert scores[1][2] == "None", "a baseline has no tokens of its own"


def test_a_program_reads_what_is_wrong(tmp_path: Path) -> None:
    said = ran(PROGRAMS["errors"], tmp_path)
    assert said == "not a size '500' a number with its unit: 500GB, 64MiB, 512B\n"


def test_the_package_offers_what_the_page_names_and_imports_nothing() -> None:
    named = set(re.findall(r"\bpaceline\.([A-Za-z]+)\(", PAGE.read_text()))
    assert named <= {*paceline.__all__}
    code = "import paceline, sys; print({'boto3', 'torch', 'pydantic', 'numpy'} & {*sys.modules})"
    assert ran(code, ROOT) == "set()\n"
