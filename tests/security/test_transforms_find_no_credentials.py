"""A transform runs from a module that ``security.code_sources`` allows, without credentials."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from paceline.data.formats import Sample
from paceline.data.loading import open_transforms
from paceline.errors import AccessDenied

CODE = """
import os

def clean(sample):
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    return {}
"""


def test_a_transform_in_a_process_finds_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_steps.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the driver")
    name, allowed = "planted_steps:clean", ("planted_steps",)
    transforms = open_transforms(name, allowed, processes=1, deadline_s=30.0)
    assert transforms is not None
    try:
        assert transforms.start(Sample("k", None, np.arange(3))).result() is not None
    finally:
        transforms.close()
    with pytest.raises(AccessDenied):
        open_transforms("os:getcwd", allowed, processes=1, deadline_s=30.0)
