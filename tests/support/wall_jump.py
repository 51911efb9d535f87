"""Builds the shim that moves the wall clock of processes (``wall_jump.c``)."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wall_jump.c")


def build_shim(directory: Path) -> Path:
    """Return the library to preload; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        reason = "a C compiler builds the shim that moves the clock"
        if "services" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(f"required but missing: {reason}")
        pytest.skip(reason)
    library = directory / "wall_jump.so"
    argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(argv, check=True)
    return library


def jump(seconds: int) -> bytes:
    """Return the content of the mapped file that moves the clock by ``seconds``."""
    return struct.pack("=q", seconds)


def preloaded(library: Path | str, offset: Path | str) -> dict[str, str]:
    """Return the environment of a process whose clock is moved by what ``offset`` holds."""
    return {"LD_PRELOAD": str(library), "PACELINE_TEST_WALL_JUMP": str(offset)}
