"""Memory that a process frees stays its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROUNDS, BLOCKS, BLOCK, PAGE = 8, 4, 8 * 1024 * 1024, 4096
PROGRAM = f"""
import resource, sys
from paceline.training.loop.rank_process import retain_freed_memory

if sys.argv[1] == "kept":
    assert retain_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    blocks = [bytearray({BLOCK}) for _ in range({BLOCKS})]  # as a step its activations
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Return how many pages the kernel had to find while a process took memory and freed it."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_a_step_frees_the_next_one_gets_without_the_kernel() -> None:
    once = BLOCKS * BLOCK / PAGE
    assert faults("as it is") >= ROUNDS * once / 2, "by itself, most pages are new each time"
    assert faults("kept") <= 1.5 * once
