"""What a node says of its GPUs is what torch sees, also where a launcher hides some."""

from __future__ import annotations

import pytest
import torch

from paceline.relay.inventory import accelerators
from paceline.system import gpus

pytestmark = pytest.mark.gpu


def test_kind_count_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = accelerators(10.0)
    assert sum(each.count for each in found) == torch.cuda.device_count()
    assert found[0].kind == torch.cuda.get_device_name(0)
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.9 < found[0].memory_bytes / total < 1.1
    assert len(gpus() or ()) == torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert accelerators(10.0) == ()
