"""Commands never see the login of the person who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_login(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty configuration directory, which commands use."""
    directory = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory))
    return directory
