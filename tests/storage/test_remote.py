"""A hub's repository is read at one commit, by ranges, from the hosts that are allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Profile, hub_access
from paceline.errors import AccessDenied, InvalidInput, ServiceUnavailable, SourceMissing
from paceline.storage import RemoteModel, client, remote_model, remote_name
from tests.support.hub import Hub, serving_hub

NAME = "acme/tiny"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "RETRY_BUDGET_S", 0.5)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    place = tmp_path / "hub" / NAME
    (place / "nested").mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "tiny"}')
    (place / "nested/a b.txt").write_text("words")
    (place / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    with serving_hub(tmp_path / "hub") as made:
        yield made


def of(hub: Hub, *redirect_hosts: str, revision: str = "main") -> RemoteModel:
    hosts = redirect_hosts or (hub.cdn_url.removeprefix("http://"),)
    profile = Profile.model_validate({"hub": {"endpoint": hub.url, "redirect_hosts": hosts}})
    return remote_model(f"hf://{NAME}@{revision}", profile)


def content(model: RemoteModel, path: str, step: int = 10_000) -> bytes:
    file = next(each for each in model.files if each.path == path)
    return b"".join(
        model.reader.read(file, at, min(step, file.size - at), threading.Event())
        for at in range(0, file.size, step)
    )


def test_a_revision_is_read_at_the_commit_that_it_named(hub: Hub) -> None:
    """A later push changes nothing of what was resolved; signatures that end are renewed."""
    model = of(hub)
    assert model.version == hub.commit(NAME)
    assert model.model_id == NAME
    weights = (hub.root / NAME / "model.safetensors").read_bytes()
    (hub.root / NAME / "model.safetensors").write_bytes(b"other" * 2000)
    assert content(model, "model.safetensors") == weights  # 11 ranges, 5 to a signature
    assert content(model, "nested/a b.txt") == b"words"
    assert of(hub).version != model.version
    assert of(hub, revision=model.version).files == model.files


def test_a_token_is_sent_to_the_hub_and_never_to_the_cdn(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(AccessDenied, match="who has no token"):
        of(hub)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("hf_secret\n")
    assert len(content(of(hub), "model.safetensors")) == 102_400
    assert hub.tokens_at_cdn == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")  # a variable goes before the file
    with pytest.raises(AccessDenied):
        of(hub)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert hub_access(Profile()).token == ""


def test_a_redirect_to_another_host_is_refused(hub: Hub) -> None:
    with pytest.raises(AccessDenied, match="not allowed") as refused:
        content(of(hub, "*.example.org"), "model.safetensors")
    assert "[hub] redirect_hosts" in refused.value.one_line()
    hub.redirect_to = f"{hub.cdn_url}\\@cdn.example.org/x"  # urllib reads that host, urllib3 ours
    with pytest.raises(AccessDenied, match="not allowed"):
        content(of(hub, "cdn.example.org"), "model.safetensors")
    assert hub.sent_bytes == 0
    hub.redirect_to = "file:///etc/passwd"
    with pytest.raises(AccessDenied):
        content(of(hub, "*"), "model.safetensors")


def test_a_renamed_repository_is_followed_on_the_hub_itself(hub: Hub) -> None:
    (hub.root / "acme/tiny").rename(hub.root / "acme/small")
    hub.moved["acme/tiny"] = "acme/small"
    assert of(hub).model_id == "acme/small"


def test_what_breaks_off_is_resumed_and_what_is_away_is_named(hub: Hub) -> None:
    hub.fails_after = 65_536
    with pytest.raises(ServiceUnavailable, match="the hub") as away:
        content(of(hub), "model.safetensors", step=102_400)
    assert "sig=" not in away.value.one_line()
    with pytest.raises(SourceMissing, match="does not have it"):
        of(hub, revision="no-such")


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf://a/b/c",
        "hf://../etc",
        "hf://a/b@",
        "hf://a/b@..",
        "hf://a/b@x?y",
        "hf://a b",
        "oci://",
        "oci://host",
        "oci://host/UPPER:tag",
        "oci://host/name@sha256:1",
        "oci://user@host/name:tag",
    ],
)
def test_bad_addresses_are_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(InvalidInput):
        remote_model(url, Profile())
    with pytest.raises(InvalidInput):
        remote_name(url)
