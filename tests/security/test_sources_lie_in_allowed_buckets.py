"""A deployment's source lies in the installation's bucket or in ``security.source_buckets``.

Checked where it is accepted (REST, flows) and where it is opened (coordinator, agents), before
anything is asked of the object store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.api.access import SERVER_SECTIONS
from paceline.config import Endpoints, Profile, Runtime, Secrets, load_profile
from paceline.errors import AccessDenied, InvalidInput, InvalidProfile, ServiceUnavailable
from paceline.registry import allowed_remote_model
from paceline.relay import (
    DirectoryReader,
    S3Reader,
    Sources,
    allowed_source,
    fetch_allowed_manifest,
)
from paceline.storage import ObjectStore, Signed, is_within
from paceline.tasks._support.run import Run
from paceline.tasks.distribute import fetch_model_manifest
from tests.support.hub import serving_hub


def a_runtime(state_dir: Path, *places: str, bucket: str = "own") -> Runtime:
    profile = Profile.model_validate(
        {"storage": {"bucket": bucket}, "security": {"source_buckets": places}}
    )
    ends = Endpoints(s3_url="http://127.0.0.1:9")  # nothing listens: a call would be seen
    return Runtime(
        profile=profile,
        state_dir=state_dir,
        endpoints=ends,
        secrets=Secrets(s3_access_key="a", s3_secret_key="b"),
    )


class Asked(Exception):
    """The object store was asked for something."""


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_bytes(self: ObjectStore, url: str, *_: object) -> bytes:
        raise Asked(url)

    monkeypatch.setattr(ObjectStore, "get_bytes", get_bytes)


def by_rest(url: str, runtime: Runtime) -> None:
    fetch_allowed_manifest(url, runtime)


def by_flow(url: str, runtime: Runtime) -> None:
    fetch_model_manifest.fn(Run(runtime, "run-20261120-153600-9f3a1c"), url)


DOORS = [by_rest, by_flow]
REFUSED = [
    "s3://theirs/m/1",
    "s3://own2/m/1",
    "s3://own-2/m/1",
    "s3://shared/m/1",
    "s3://shared/team",
    "s3://shared/team2/m",
    "s3://shared/other/team/m",
]
ALLOWED = [
    "s3://own/m/1",
    "s3://own",
    "s3://whole/any/1",
    "s3://shared/team/m",
    "s3://shared/team/",
]
PLACES = ("whole", "shared/team/")


def unsigned(*_: str) -> Signed:
    raise AssertionError("this node signs for itself")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", [each for each in REFUSED if each != "s3://shared/team"])
def test_a_source_elsewhere_is_refused_before_a_request(
    tmp_path: Path, door: Any, url: str
) -> None:
    with pytest.raises(AccessDenied, match=r"got s3://.*s3://own.*security\.source_buckets.*Add"):
        door(url, a_runtime(tmp_path, *PLACES))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", ALLOWED)
def test_a_source_in_an_allowed_place_is_read(tmp_path: Path, door: Any, url: str) -> None:
    with pytest.raises(Asked, match=r"/manifest\.json"):
        door(url, a_runtime(tmp_path, *PLACES))


@pytest.mark.parametrize("url", [each for each in REFUSED if each != "s3://shared/team"])
def test_an_agent_opens_no_source_elsewhere_whatever_its_lanes_say(
    tmp_path: Path, url: str
) -> None:
    with pytest.raises(AccessDenied, match=r"security\.source_buckets"):
        Sources(a_runtime(tmp_path, *PLACES), unsigned).open(url)


def test_an_agent_opens_what_is_allowed(tmp_path: Path) -> None:
    sources = Sources(a_runtime(tmp_path, *PLACES), unsigned)
    assert isinstance(sources.open("s3://shared/team/m"), S3Reader)
    assert isinstance(sources.open(str(tmp_path)), DirectoryReader)
    with pytest.raises(AccessDenied, match=r"security\.source_roots"):
        sources.open("/etc")


@pytest.mark.parametrize("door", DOORS)
def test_a_flow_reads_no_directory_that_the_coordinator_would_refuse(
    tmp_path: Path, door: Any
) -> None:
    with pytest.raises(AccessDenied, match=r"security\.source_roots"):
        door("/etc", a_runtime(tmp_path))


@pytest.mark.parametrize(
    "url",
    ["", "m/1", "http://h/m", "/nul\0", "s3://", "s3://own/../theirs", "s3://own//m", "\ud800"],
)
def test_what_is_no_source_url_is_bad_input(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput):
        allowed_source(url, a_runtime(tmp_path))


def test_a_loop_of_links_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises((InvalidInput, AccessDenied)):
        Sources(a_runtime(tmp_path), unsigned).open(str(tmp_path / "loop/model"))
        allowed_source("/x\ud800", a_runtime(tmp_path))


def test_a_prefix_is_a_directory() -> None:
    assert is_within("s3://bucket/m/1", ["bucket/m"])
    assert not is_within("s3://bucket/m2/1", ["bucket/m"])
    assert not is_within("s3://bucket/m", [])


@pytest.mark.parametrize("name", ["embedded", "ci", "fleet-1000"])
def test_every_profile_allows_its_own_bucket_alone(tmp_path: Path, name: str) -> None:
    profile = load_profile(name)
    runtime = a_runtime(tmp_path).model_copy(update={"profile": profile})
    assert allowed_source(f"s3://{profile.storage.bucket}/m/1", runtime)
    with pytest.raises(AccessDenied):
        allowed_source("s3://elsewhere/m/1", runtime)


@pytest.mark.parametrize("place", ["s3://models", "", "*", "B", "models//x", "/models", "a"])
def test_a_place_that_names_no_bucket_is_an_invalid_profile(place: str) -> None:
    with pytest.raises(InvalidProfile, match="source_buckets"):
        load_profile("embedded", {"security.source_buckets": f'["{place}"]'})


def test_a_node_that_joins_learns_which_bucket_is_the_installations(tmp_path: Path) -> None:
    profile = a_runtime(tmp_path, *PLACES, bucket="renamed").profile
    given = profile.model_dump(mode="json", exclude=SERVER_SECTIONS)
    joined = a_runtime(tmp_path).model_copy(update={"profile": Profile.model_validate(given)})
    assert allowed_source("s3://renamed/m/1", joined)
    assert allowed_source("s3://whole/m/1", joined)


def test_an_answer_that_is_not_s3s_is_named(tmp_path: Path) -> None:
    from botocore.parsers import ResponseParserError

    from paceline.errors import PermanentError
    from paceline.storage import translate_s3_errors

    for error in (ResponseParserError("<html>"), ValueError("invalid literal for int()")):
        with pytest.raises(PermanentError, match="cannot be read") as caught:
            with translate_s3_errors("http://h", "s3://b/k"):
                raise error
        assert not isinstance(caught.value, ServiceUnavailable)


def test_a_repository_is_imported_only_where_the_profile_names_it(tmp_path: Path) -> None:
    """By its name, up to a slash; a revision or a tag changes nothing."""
    places = ("hf://acme/", "hf://other/one", "oci://registry:5000/team")
    profile = Profile.model_validate({"security": {"source_repositories": places}})
    runtime = a_runtime(tmp_path).model_copy(update={"profile": profile})
    for url in (
        "hf://acme/tiny",
        "hf://acme/tiny@main",
        "hf://other/one@refs/pr/1",
        "oci://registry:5000/team/llama:v1",
    ):
        assert allowed_source(url, runtime) == url
    for url in (
        "hf://acme2/tiny",
        "hf://other/one2",
        "hf://tiny",
        "oci://registry:5000/teams/llama:v1",
        "oci://registry/team/llama:v1",
    ):
        with pytest.raises(AccessDenied, match="this repository is not a source"):
            allowed_source(url, runtime)
        with pytest.raises(AccessDenied):
            allowed_source(url, a_runtime(tmp_path))  # the default: none
    for name in ("team/../other/llama", "team/./llama", "team//llama", "team/..", "team/%2e%2e/o"):
        with pytest.raises(InvalidInput, match="not an artefact"):
            allowed_source(f"oci://registry:5000/{name}:v1", runtime)
    for place in ("acme/", "hf://", "s3://acme", "hf://acme@main"):
        with pytest.raises(ValidationError):
            Profile.model_validate({"security": {"source_repositories": (place,)}})


def test_a_renamed_repository_must_be_allowed_by_its_new_name(tmp_path: Path) -> None:
    """A hub answers for the old name, whoever has the repository now."""
    place = tmp_path / "hub/acme/tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    with serving_hub(tmp_path / "hub") as hub:
        given = {
            "hub": {"endpoint": hub.url},
            "security": {"source_repositories": ("hf://acme/", "hf://old/")},
        }
        runtime = a_runtime(tmp_path).model_copy(update={"profile": Profile.model_validate(given)})
        hub.moved = {"old/tiny": "acme/tiny"}
        assert allowed_remote_model("hf://old/tiny", runtime).model_id == "acme/tiny"
        place.parent.rename(place.parent.with_name("others"))
        hub.moved = {"old/tiny": "others/tiny"}
        with pytest.raises(AccessDenied, match="hf://others/tiny"):
            allowed_remote_model("hf://old/tiny", runtime)
