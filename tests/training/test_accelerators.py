"""What only matters where there is a GPU, as far as it can be shown without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import InvalidInput
from paceline.training import CUBLAS_DETERMINISTIC, current_environment
from paceline.training.checkpoint import Chunk, Staging, StoredTensor, new_moment
from paceline.training.loop import rank_setup


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_of_a_node_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_setup.exclusive_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("PACELINE_NODE", "node-7")
    with pytest.raises(InvalidInput, match=r"more ranks than GPUs.*3 ranks.*at most 2.*node-7"):
        rank_setup.exclusive_device()
    assert rank_setup.device_of().index == 1, "who talks over no NCCL may share one"


def test_a_step_count_is_restored_to_the_device_of_its_update_kernel() -> None:
    weight = torch.nn.Parameter(torch.empty(2, 3, device="meta"))  # in a GPU's place
    count = StoredTensor.model_construct(dtype="F32", shape=(), chunks=())
    moment = StoredTensor.model_construct(dtype="F32", shape=(2, 3), chunks=())
    assert new_moment(count, weight, None, on_device=True).device.type == "meta"
    assert new_moment(count, weight, None, on_device=False).device.type == "cpu"
    assert new_moment(moment, weight, None, on_device=False).device.type == "meta"


def test_memory_that_cannot_be_pinned_costs_speed_and_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")  # the one that CUDA kept

    monkeypatch.setattr(torch, "zeros", fails)
    chunk = Chunk(tensor="a", dtype="F32", shape=(4,), offsets=(0,), sizes=(4,))
    staging = Staging([chunk], pin=True)
    staging.fill({"a": torch.arange(4.0)})
    assert "not pinned" in caplog.text
    assert bytes(staging.view[-16:]) == torch.arange(4.0).numpy().tobytes()


def test_cublas_workspaces_as_ranks_set_them_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CUBLAS_DETERMINISTIC[0], raising=False)
    before = current_environment(1)
    monkeypatch.setenv(*CUBLAS_DETERMINISTIC)
    assert current_environment(1) == before
    monkeypatch.setenv(CUBLAS_DETERMINISTIC[0], ":16:8")
    assert current_environment(1)["variables"][CUBLAS_DETERMINISTIC[0]] == ":16:8"


LAUNCHER = """
import os, sys
from paceline.training.loop.rank_process import leave_removed_directory
leave_removed_directory()
import torch
def asked(*_):
    raise AssertionError("the launcher asked CUDA: no rank forked from it could use a GPU")
for name in ("is_available", "device_count", "init", "_lazy_init"):
    setattr(torch.cuda, name, asked)
from paceline.training.loop.rank import preload
preload()
assert len(os.listdir("/proc/self/task")) == 1, "a thread spoils forking"
child = os.fork()
if not child:
    a = torch.rand(80, 80)
    torch.mm(a, a), torch.linalg.qr(a), a.exp().sum()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.nightly  # warm.py's node asserts it each time
def test_a_launcher_leaves_cuda_alone_and_starts_in_a_removed_directory(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "gone"  # oneMKL: "Cannot load libtorch_cpu.so", as once seen
    gone.mkdir()
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$0" -c "$1"', sys.executable, LAUNCHER],
        cwd=gone, env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
