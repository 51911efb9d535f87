"""`paceline train` in this process, on a node that stays warm: a training costs its ranks alone.

Importing the command, torch and transformers takes longer than the few steps of these tests. The
node's launcher imports transformers and peft before it forks a rank. That a fresh process trains,
too, is shown by ``test_cli_training.py`` and the journeys.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from paceline.cli import main as command
from paceline.training import LocalLauncher, single
from paceline.training.launcher import driver
from paceline.training.loop import rank

_warm: list[LocalLauncher] = []


main = rank.main


def preload() -> None:
    """Import what any rank of these tests needs: without CUDA, and without a thread."""
    import torch

    def asked(*_: object) -> None:
        raise AssertionError("the launcher asked CUDA: no rank forked from it could use a GPU")

    asking = ("is_available", "device_count", "init", "_lazy_init")
    with mock.patch.multiple(torch.cuda, **dict.fromkeys(asking, asked)):
        rank.preload()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread spoils forking"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def warm_node() -> Iterator[None]:
    """End the node after the last test."""
    yield
    while _warm:
        _warm.pop().__exit__(None, None, None)


def typed(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `paceline` with ``words``; with ``check``, it has to succeed."""
    if not _warm:
        _warm.append(LocalLauncher().__enter__())
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(single, "LocalLauncher", lambda: _warm[0]),
        mock.patch.object(driver, "RANK", f"{__name__}:main"),
        mock.patch.object(sys, "argv", ["paceline", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            command.run()
        except SystemExit as ended:
            code = int(ended.code or 0)
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    assert not check or code == 0, done.stderr[-3000:]
    return done
