"""On what a run ran: Python, libraries, processor, threads, and the code, as one small record.

The same record and the same job give the same bits; ``differences`` says what stands between two.
Imports neither torch nor numpy: a driver asks too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import paceline
from paceline.training.identity import code_version
from paceline.wire.base import Record, digest_of
from paceline.wire.reproducing import Differs

GIT_S = 20.0
# Instructions that choose other kernels, so other roundings.
_KERNELS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "sve",
    "neon",
)
_NVIDIA = Path("/proc/driver/nvidia/gpus")
# A fixed workspace a stream: cuBLAS then adds up in the same order each time. Ranks set it where
# the job is deterministic, so it is no difference between two environments.
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Of these a difference may change bits; the others are said, not blamed.
DECISIVE = (
    "python", "torch", "numpy", "machine", "accelerator", "kernels", "sources", "threads",
    "packages",
)  # fmt: skip


class Environment(Record):
    """What besides the job decides the bits of a training."""

    python: str
    torch: str
    numpy: str
    machine: str  # architecture
    system: str
    processor: str
    cores: int
    accelerator: str = ""  # the first one's name; "": none
    kernels: tuple[str, ...]  # instruction sets of the processor that choose other kernels
    packages: str  # digest of every installed package and its version
    lock: str  # digest of requirements/runtime.lock; "": not there (an installed wheel)
    sources: str  # version and digest of what decides what is learned
    commit: str  # "": no repository
    diff: str  # digest of what differs from the commit; "": nothing, or no repository
    threads: int  # of each rank
    variables: dict[str, str] = {}  # of the environment, those that change arithmetic

    @property
    def digest(self) -> str:
        """Return the SHA-256 of this record."""
        return digest_of(self)


def current(threads: int = 1) -> Environment:
    """Return the environment of this process, for ranks of ``threads`` threads."""
    fixed = _fixed()
    variables = {name: os.environ[name] for name in _THREADS if name in os.environ}
    for name in (
        CUBLAS[0],
        "CUDA_VISIBLE_DEVICES",
        "ATEN_CPU_CAPABILITY",
        "MKL_CBWR",
        "ONEDNN_MAX_CPU_ISA",
    ):
        if name in os.environ:
            variables[name] = os.environ[name]
    if variables.get(CUBLAS[0]) == CUBLAS[1]:
        del variables[CUBLAS[0]]
    for name in _THREADS:  # a launcher sets it for each rank: ``threads`` says it
        variables.pop(name, None)
    return Environment.model_validate(
        fixed | {"threads": threads, "variables": variables, "sources": code_version()}
    )


def differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[Differs]:
    """Return what differs between two records, or any two mappings, in the order of ``then``."""
    found = []
    for name in [*then, *(each for each in now if each not in then)]:
        before, after = then.get(name), now.get(name)
        if before != after:
            found.append(
                Differs(
                    what=f"{prefix}{name}",
                    then="nothing" if before is None else str(before),
                    now="nothing" if after is None else str(after),
                    decisive=bool(prefix) or name in DECISIVE or name == "variables",
                )
            )
    return found


@functools.cache
def _fixed() -> dict[str, Any]:
    root = Path(str(paceline.__file__)).resolve().parents[2]
    lock = root / "requirements" / "runtime.lock"
    commit, diff = _commit(root)
    model, flags = _processor()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": model,
        "cores": os.cpu_count() or 1,
        "accelerator": _accelerator(),
        "kernels": [each for each in _KERNELS if each in flags],
        "packages": _packages(),
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else "",
        "commit": commit,
        "diff": diff,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _packages() -> str:
    found = {
        f"{each.metadata['Name']}=={each.version}".lower()
        for each in metadata.distributions()
        if each.metadata["Name"] and each.metadata["Name"].lower() != "paceline"
    }
    return digest_of(sorted(found))


def _processor() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return platform.processor() or "unknown", set()
    said = {
        key.strip().lower(): value.strip() for key, _, value in (x.partition(":") for x in lines)
    }
    flags = said.get("flags") or said.get("features") or ""
    return said.get("model name") or platform.processor() or "unknown", set(flags.split())


def _accelerator() -> str:
    """Return what the driver calls the first GPU; torch, which would know, takes seconds."""
    for each in sorted(_NVIDIA.glob("*/information")):
        for line in each.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return ""


def _commit(root: Path) -> tuple[str, str]:
    """Return the commit and a digest of what the sources differ from it by."""
    if not (root / ".git").exists():
        return "", ""
    try:
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        diff = _git(root, "diff", "HEAD", "--", "src", "flows", "tasks")
    except (OSError, subprocess.SubprocessError):  # no git: the digest of the sources says enough
        return "", ""
    return commit, hashlib.sha256(diff).hexdigest() if diff else ""


def _git(root: Path, *words: str) -> bytes:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, timeout=GIT_S, check=True).stdout
