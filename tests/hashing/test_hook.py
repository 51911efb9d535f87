"""Installing compiles the extension where that can be done, and never fails where not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from paceline import hashing

ROOT = Path(hatch_build.__file__).parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / hatch_build.PACKAGE, tmp_path / hatch_build.PACKAGE)
    (tmp_path / hatch_build.MODULE).unlink(missing_ok=True)
    return tmp_path


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_the_source_compiles_without_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CFLAGS", "-Wextra -Werror -O0")
    reason = hatch_build.compile_extension(project)
    if reason.startswith("it is for"):
        pytest.skip(reason)
    assert reason == ""
    left = [path.name for path in (project / hatch_build.PACKAGE).iterdir()]
    assert [name for name in left if name.endswith(".so") or name.startswith(".")] == [
        hatch_build.MODULE.name
    ]
    if hashing.ENGINE.startswith("hashlib (this CPU"):
        return
    code = "import _lanes; h = _lanes.Sha256(); h.update(b'abc'); print(h.hexdigest()[:8])"
    where = project / hatch_build.PACKAGE
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # -S and the directory alone: nothing but the module that was just made.
    assert done.stdout.strip() == "ba7816bf", done.stderr


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler-anywhere"])
def test_without_a_compiler_there_is_a_reason_and_nothing_old_is_left(
    project: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    (project / hatch_build.MODULE).write_bytes(b"of an older source")
    monkeypatch.setenv("CC", compiler)
    assert hatch_build.compile_extension(project)
    assert not (project / hatch_build.MODULE).exists()
