"""Any text is an allowed source, or refused by name; what is allowed lies where it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from paceline.config import Endpoints, Profile, Runtime, Secrets
from paceline.errors import AccessDenied, InvalidInput
from paceline.relay import allowed_source
from paceline.storage import DiskStore, parse_url

TOKENS = ["s3://", "S3://", "file://", "http://", "own", "own/", "/", "//", "..", ".", "theirs"]
TOKENS += [
    "%2e%2e",
    "%2f",
    "\\",
    "@",
    "#",
    "?",
    ":",
    "\0",
    "\n",
    "\ud800",
    "é",
    "own.",
    "team",
    "-",
]
urls = st.text(max_size=40) | st.lists(st.sampled_from(TOKENS), max_size=10).map("".join)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    state = tmp_path_factory.mktemp("state")
    (state / "link").symlink_to("/etc")
    (state / "loop").symlink_to(state / "loop")
    profile = Profile.model_validate(
        {"storage": {"bucket": "own"}, "security": {"source_buckets": ["shared/team"]}}
    )
    return Runtime(profile=profile, state_dir=state, endpoints=Endpoints(), secrets=Secrets())


def check(url: str, runtime: Runtime) -> None:
    try:
        source = allowed_source(url, runtime)
    except (InvalidInput, AccessDenied) as error:
        assert error.got is not None and error.wanted is not None
        return
    if source.startswith("s3://"):
        bucket, key = parse_url(source)
        assert bucket == "own" or f"{bucket}/{key}/".startswith("shared/team/")
        assert ".." not in key.split("/")
    else:
        assert Path(source).is_relative_to(runtime.state_dir.resolve())


@settings(max_examples=75, deadline=None)
@given(url=urls)
@example(url="s3://own/../theirs")
@example(url="s3://shared/teams/x")
@example(url="s3://" + "a" * 5000)
@example(url="/" + "a/" * 1500)
def test_any_text(runtime: Runtime, url: str) -> None:
    check(url, runtime)


@settings(max_examples=50, deadline=None)
@given(rest=urls | st.sampled_from(["link/passwd", "loop/x", "../../etc", "\ud800"]))
def test_any_path_below_the_state_directory(runtime: Runtime, rest: str) -> None:
    check(f"{runtime.state_dir}/{rest}", runtime)


@settings(max_examples=50, deadline=None)
@given(url=urls)
def test_any_url_of_a_store_is_parsed_or_bad_input(url: str) -> None:
    for parse in (parse_url, DiskStore.path_of):
        try:
            parse(url)  # type: ignore[operator]
        except InvalidInput as error:
            assert error.wanted is not None
