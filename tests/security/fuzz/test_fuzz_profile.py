"""Any file, and any override, is a profile or ``InvalidProfile``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from paceline.config import AcceleratorSettings, Profile, load_profile
from paceline.errors import InvalidProfile

SECTIONS = list(Profile.model_fields)
KEYS = [f"{name}.{key}" for name in SECTIONS if name not in ("name", "hardware")
        for key in Profile.model_fields[name].annotation.model_fields]  # fmt: skip
KEYS += [f"hardware.a.{key}" for key in AcceleratorSettings.model_fields]
TOKENS = [*"[]{}=.,\"'\\#\n 1", "[[", '"""', "\\u"]
TOKENS += ["9" * 5000, "1e999", "nan", "inf", "true", "a", "\x00", "é", "\ud800", *SECTIONS]
texts = st.text(max_size=60) | st.lists(st.sampled_from(TOKENS), max_size=40).map("".join)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "p.toml"


@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_any_file(place: Path, text: str) -> None:
    place.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InvalidProfile):
        load_profile(str(place))


@settings(max_examples=25, deadline=None)
@given(key=st.sampled_from(KEYS) | texts, value=texts)
@example(key='#"', value="")
@example(key='a."b" = 1\nc', value="")
def test_any_override(key: str, value: str) -> None:
    with contextlib.suppress(InvalidProfile):
        load_profile("embedded", {key: value})
