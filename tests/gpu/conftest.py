"""Tests that need an NVIDIA GPU: `make gpu`; without one each is skipped, and no other run collects
them."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip those that need a GPU where there is no driver; pytest passes the items of all files."""
    if shutil.which("nvidia-smi") is None:
        for each in items:
            if each.get_closest_marker("gpu") is None:
                continue
            each.add_marker(pytest.mark.skip("no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def device() -> object:
    """Require that torch sees the GPU."""
    import torch

    assert torch.cuda.is_available(), "nvidia-smi is here, and torch sees no GPU"
    return torch.device("cuda")
