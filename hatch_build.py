"""Compiles ``paceline.hashing._lanes`` where there is a C compiler; without one nothing fails.

hatchling runs it for wheels and editable installs. ``CC`` and ``CFLAGS`` are respected. The
extension uses Python's stable ABI, so that one wheel serves every CPython from 3.11 on.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src/paceline/hashing")
SOURCE, MODULE = PACKAGE / "_lanes.c", PACKAGE / "_lanes.abi3.so"
COMPILE_S = 120.0


class ExtensionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the extension beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; called before the files of the build are gathered."""
        del version
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        reason = compile_extension(root)
        if reason:
            self.app.display_warning(f"without the C extension, hashlib does its work: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{_platform_tag()}"
        build_data["artifacts"].append(MODULE.as_posix())

    def clean(self, versions: list[str]) -> None:
        """Remove what was compiled."""
        del versions
        (Path(self.root) / MODULE).unlink(missing_ok=True)


def compile_extension(root: Path) -> str:
    """Return why there is no extension below ``root`` now, or nothing.

    A process that has the old one open keeps it: the new one takes its name when it is whole.
    """
    target = root / MODULE
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        reason = _compile(root / SOURCE, fresh)
        if reason:
            target.unlink(missing_ok=True)  # one of an older source is worse than none
        else:
            fresh.replace(target)
        return reason
    finally:
        fresh.unlink(missing_ok=True)


def _compile(source: Path, target: Path) -> str:
    if platform.machine() not in ("x86_64", "AMD64") or not sys.platform.startswith("linux"):
        return f"it is for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if sys.implementation.name != "cpython":
        return f"it is for CPython, this is {sys.implementation.name}"
    command = [
        *shlex.split(os.environ.get("CC") or "cc"),
        *("-O2", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden"),
        *shlex.split(os.environ.get("CFLAGS", "")),
        f"-I{sysconfig.get_paths()['include']}",
        str(source),
        *("-o", str(target)),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C compiler cannot be run: {error}"
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return f"the C compiler ended with {done.returncode}: {said[0] if said else 'no word'}"
    return ""


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
