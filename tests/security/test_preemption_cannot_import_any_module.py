"""``training.guard.preemption`` and transforms run the code that ``security.code_sources`` allows,
pinned where a code reference is, and without ambient credentials."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.config import load_profile
from paceline.data.formats import Sample
from paceline.data.loading import open_transforms
from paceline.errors import AccessDenied, InvalidInput, PacelineError
from paceline.training.loop import MetadataWatcher, open_watcher, require_allowed_watcher
from paceline.training.user_code import check_watcher, module_digest, tree_digest

RANK = "paceline.training.loop.rank:main"
CODE = """
import os, pathlib
HERE = pathlib.Path({here!r})
(HERE / "imported").touch()

class Watcher:
    def wait(self):
        (HERE / "environment").write_text(repr(dict(os.environ)))

def watcher():
    return Watcher()

def nothing():
    return 3

def clean(sample):
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    return {{}}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that notes that it was imported."""
    name = f"planted_{tmp_path.name}".replace("-", "_")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(CODE.format(here=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=os.pathsep)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the driver")
    return name


@pytest.mark.parametrize("ask", [open_watcher, check_watcher])
def test_a_module_that_is_not_allowed_is_not_imported(
    module: str, tmp_path: Path, ask: Callable[..., object]
) -> None:
    pinned = f"{module}:watcher@sha256:{module_digest(module)}"
    for named, sources, error in [
        (pinned, (), AccessDenied),
        (pinned, ("paceline", f"{module}.sub", module[:-1]), AccessDenied),
        (f"{module}:watcher", (module,), InvalidInput),  # not pinned
        (f"{module}:watcher@sha256:{'0' * 64}", (module,), PacelineError),
        (f"file://{tmp_path}/code@sha256:{'0' * 64}#{module}:watcher", ("/srv",), AccessDenied),
        ("os:getcwd", ("paceline",), InvalidInput),
        (module, (module,), InvalidInput),
        ("", (module,), InvalidInput),
    ]:
        with pytest.raises(error) as caught:
            ask(named, sources, tmp_path / "cache")
        assert not (tmp_path / "imported").exists(), named
        if error is not PacelineError:
            assert "training.guard.preemption" in str(caught.value)


def test_a_watcher_that_is_allowed_finds_no_credentials(module: str, tmp_path: Path) -> None:
    named = f"{module}:watcher@sha256:{module_digest(module)}"
    script = (
        "import sys; from pathlib import Path; from paceline.training.loop.preemption import "
        "open_watcher; open_watcher(sys.argv[1], [sys.argv[2]], Path(sys.argv[3])).wait()"
    )
    command = [sys.executable, "-c", script, named, module, str(tmp_path / "cache")]
    subprocess.run(command, check=True, timeout=60)
    said = (tmp_path / "environment").read_text()
    assert "of the driver" not in said
    assert "'PATH'" in said


def test_a_watcher_is_tried_in_a_process_that_ends_again(module: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    shutil.copytree(tmp_path / "code", there)
    (there / f"{module}.py").rename(there / f"{module}_too.py")
    named = f"file://{there}@sha256:{tree_digest(there)}#{module}_too"
    check_watcher(f"{named}:watcher", (str(tmp_path),), tmp_path / "cache")
    assert (tmp_path / "imported").exists()
    assert f"{module}_too" not in sys.modules
    with pytest.raises(InvalidInput, match="no preemption watcher") as caught:
        check_watcher(f"{named}:nothing", (str(tmp_path),), tmp_path / "cache")
    assert caught.value.got == "int"


def test_a_node_asks_its_own_profile(module: str, tmp_path: Path) -> None:
    """The launcher's watcher process runs no module that the profile there does not allow."""
    state = tmp_path / "state"
    state.mkdir()
    order = {"do": "watch", "preemption": f"{module}:watcher@sha256:{module_digest(module)}",
             "state_dir": str(state), "grace_s": 1.0}  # fmt: skip
    for sources, ended in ([], "unwatched"), ([module], "preempted"):
        profile = load_profile("ci", {"security.code_sources": str(sources)})
        runtime = {"profile": profile.model_dump(mode="json"), "state_dir": str(state)}
        empty: dict[str, str] = {}
        text = json.dumps(runtime | {"endpoints": empty, "secrets": empty})
        (state / "runtime.json").write_text(text)
        command = [sys.executable, "-m", "paceline.training.launcher.forkserver", RANK]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as launcher:
            assert launcher.stdin is not None
            assert launcher.stdout is not None
            launcher.stdin.write(json.dumps(order) + "\n")
            launcher.stdin.flush()
            said = ""
            until = time.monotonic() + 60
            while said not in ("unwatched", "preempted") and time.monotonic() < until:
                said = json.loads(launcher.stdout.readline()).get("launcher", "")
            assert said == ended
            assert (tmp_path / "imported").exists() is bool(sources)
            launcher.stdin.close()


def test_a_url_needs_no_permission_and_is_one_of_http() -> None:
    assert require_allowed_watcher("http://169.254.169.254/x", ()) is None
    assert isinstance(open_watcher("https://metadata/x", (), Path()), MetadataWatcher)
    with pytest.raises(InvalidInput, match="bad metadata URL"):
        require_allowed_watcher("ftp://x", ())


def test_a_transform_in_a_process_finds_no_credentials(module: str) -> None:
    transforms = open_transforms(f"{module}:clean", (module,), processes=1, deadline_s=30.0)
    assert transforms is not None
    try:
        assert transforms.start(Sample("k", None, np.arange(3))).result() is not None
    finally:
        transforms.close()
    with pytest.raises(AccessDenied):
        open_transforms("os:getcwd", (module,), processes=1, deadline_s=30.0)
