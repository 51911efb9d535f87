"""A node reads what its machine has: nothing is guessed, and the disk is measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.relay.inventory import (
    DISK_FILE,
    _disk_bytes_s,
    accelerators,
    measure_disk,
    shows_like_cards,
)
from paceline.schemas import Inventory

# As nvidia-smi of driver 550 prints it: names and MiB; the matrix of two GPUs on NVLink.
GPUS = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n"
MATRIX = """\t{bold}GPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID{plain}
GPU0\t X \t{cell}\tPIX\t0-31\t0\t\tN/A
GPU1\t{cell}\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in nvidia-smi, first on PATH, that prints ``gpus`` and ``topo`` of its directory."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec cat {tmp_path}/topo\n'
                       f"exec cat {tmp_path}/gpus\n")  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "gpus").write_text(GPUS)
    write_matrix(tmp_path, "NV18")
    return tmp_path


def write_matrix(directory: Path, cell: str) -> None:
    text = MATRIX.format(cell=cell, bold="\x1b[4m", plain="\x1b[0m")
    (directory / "topo").write_text(text)


def test_gpus_are_counted_by_kind_with_what_connects_them(driver: Path) -> None:
    (found,) = accelerators(10.0)
    assert (found.kind, found.count) == ("NVIDIA H100 80GB HBM3", 2)
    assert (found.memory_bytes, found.link) == (81559 * 2**20, "nvlink")
    write_matrix(driver, "PHB")
    assert accelerators(10.0)[0].link == "pcie"


@pytest.mark.parametrize(
    ("visible", "shown"), [(None, "1,3,4"), ("0,1,2,3", "0,2"), ("3,1", None), ("4,0,3", "4,3")]
)
def test_ranks_see_only_the_gpus_of_the_kind_that_most_are_of(
    driver: Path, visible: str | None, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["A100", "H100", "A100", "H100", "H100"]
    (driver / "gpus").write_text("".join(f"NVIDIA {each}, 81559\n" for each in kinds))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env = shows_like_cards(10.0)
    machine = Inventory(
        cores=1, memory_bytes=1, shared_memory_bytes=1, accelerators=accelerators(10.0)
    )
    assert env == (
        {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    )
    if shown is not None:
        (like,) = machine.like_cards
        cards = [kinds[int(each)] for each in shown.split(",")]
        assert [f"NVIDIA {each}" for each in cards] == [like.kind] * like.count


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("", 0), ("-1", 0), ("1,0", 2), ("7", 0)])
def test_only_visible_gpus_count(
    driver: Path, visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sum(each.count for each in accelerators(10.0)) == count


def test_a_driver_that_fails_or_hangs_leaves_them_out(driver: Path) -> None:
    (driver / "nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert accelerators(10.0) == ()
    (driver / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    assert accelerators(0.2) == ()


def test_memory_that_the_driver_does_not_give_is_zero(driver: Path) -> None:
    (driver / "gpus").write_text("NVIDIA GB10, [N/A]\n")
    (found,) = accelerators(10.0)
    assert (found.memory_bytes, found.link) == (0, "")


def test_the_disk_s_speed_is_kept_and_a_start_does_not_measure(tmp_path: Path) -> None:
    assert _disk_bytes_s(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    measured = measure_disk(tmp_path)
    assert _disk_bytes_s(tmp_path) == measured > 0
    assert [each.name for each in tmp_path.iterdir()] == [DISK_FILE]


@pytest.mark.parametrize(
    "kept", ["{", "[]", "{}", '{"write_bytes_s": -1.0}', '{"write_bytes_s": NaN}']
)
def test_what_is_kept_wrong_is_not_known(tmp_path: Path, kept: str) -> None:
    (tmp_path / DISK_FILE).write_text(kept)
    assert _disk_bytes_s(tmp_path) is None


def test_a_disk_that_refuses_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "none")
