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
from paceline.training.checkpoint.layout import Chunk
from paceline.training.checkpoint.records import StoredTensor
from paceline.training.checkpoint.resume import _room_for
from paceline.training.checkpoint.staging import Staging
from paceline.training.loop import rank_setup as outfit
from paceline.training.reproducibility import CUBLAS, current


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_of_a_node_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert outfit.own_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("PACELINE_NODE", "node-7")
    with pytest.raises(InvalidInput, match=r"more ranks than GPUs.*3 ranks.*at most 2.*node-7"):
        outfit.own_device()
    assert outfit.device_of().index == 1, "who talks over no NCCL may share one"


def test_a_step_count_is_restored_to_where_the_kernel_that_updates_reads_it() -> None:
    weight = torch.nn.Parameter(torch.empty(2, 3, device="meta"))  # in a GPU's place
    count = StoredTensor.model_construct(dtype="F32", shape=(), chunks=())
    moment = StoredTensor.model_construct(dtype="F32", shape=(2, 3), chunks=())
    assert _room_for(count, weight, None, on_device=True).device.type == "meta"
    assert _room_for(count, weight, None).device.type == "cpu"
    assert _room_for(moment, weight, None).device.type == "meta"


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
    monkeypatch.delenv(CUBLAS[0], raising=False)
    before = current(1)
    monkeypatch.setenv(*CUBLAS)
    assert current(1) == before
    monkeypatch.setenv(CUBLAS[0], ":16:8")
    assert current(1).variables[CUBLAS[0]] == ":16:8"


LAUNCHER = """
import os, sys
from paceline.training.loop.rank_process import stand_somewhere
stand_somewhere()
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


def test_a_launcher_asks_cuda_nothing_and_starts_where_its_directory_is_gone(
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
