"""An artefact of a registry is read at one digest, layer by layer, with the user's own login."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Profile
from paceline.errors import AccessDenied, InvalidInput, SourceMissing
from paceline.manifest import fetch_manifest, import_model, importing
from paceline.plan import origin_cap_bytes
from paceline.storage import RemoteModel, join_url, remote_model
from tests.support.oci import TAR, push, registry_server
from tests.support.rclone import RcloneS3
from tests.support.web import Answer, Call, Web, serving

FILES = {"config.json": b'{"layers": 2}', "weights/model.safetensors": os.urandom(300_000)}


def profile(host: str, *redirect_hosts: str) -> Profile:
    return Profile.model_validate({"oci": {"plain_http": [host], "redirect_hosts": redirect_hosts}})


def content(model: RemoteModel, path: str) -> bytes:
    file = next(each for each in model.files if each.path == path)
    half = file.size // 2
    stop = threading.Event()
    return bytes(
        model.reader.read(file, 0, half, stop)
        + model.reader.read(file, half, file.size - half, stop)
    )


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry_server(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.mark.services
def test_a_tag_is_read_at_the_digest_that_it_named(registry: str) -> None:
    digest = push(registry, "team/llama", "v1", FILES)
    model = remote_model(f"oci://{registry}/team/llama:v1", profile(registry))
    assert (model.model_id, model.version) == ("team/llama", digest)
    push(registry, "team/llama", "v1", {"config.json": b"another"})
    for path, data in FILES.items():
        assert content(model, path) == data
    again = remote_model(f"oci://{registry}/team/llama@sha256:{digest}", profile(registry))
    assert again.files == model.files


@pytest.mark.services
def test_an_artefact_becomes_a_version_like_any_other(
    registry: str, s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "SETTLE_S", 0.05)
    store = s3.store()
    store.ensure_bucket("artefacts")
    push(registry, "team/mistral", "v1", FILES)
    model = remote_model(f"oci://{registry}/team/mistral:v1", profile(registry))
    url = f"s3://artefacts/{model.model_id}/{model.version}"
    cap = origin_cap_bytes(model.total_size)
    manifest = import_model(model, url, store=store, cap_bytes=cap, link_mbit=1000)
    assert fetch_manifest(url, store) == manifest
    for path, data in FILES.items():
        assert store.get_bytes(join_url(url, path)) == data


@pytest.mark.services
def test_archives_and_missing_tags_are_refused_by_name(registry: str) -> None:
    push(registry, "team/packed", "v1", FILES, TAR)
    with pytest.raises(InvalidInput, match="other than raw layers"):
        remote_model(f"oci://{registry}/team/packed:v1", profile(registry))
    with pytest.raises(SourceMissing, match="the registry does not have it"):
        remote_model(f"oci://{registry}/team/llama:v9", profile(registry))


@pytest.fixture
def guarded() -> Iterator[tuple[Web, Web]]:
    """A registry whose token server has another port, and gives tokens for two requests each."""
    layer = FILES["config.json"]
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    manifest = json.dumps(
        {
            "layers": [
                {
                    "mediaType": "application/vnd.cncf.model.weight.config.v1.raw",
                    "digest": digest,
                    "size": len(layer),
                    "annotations": {"org.cncf.model.filepath": "config.json"},
                }
            ]
        }
    ).encode()
    tokens: dict[str, int] = {}

    def give(call: Call) -> Answer:
        user = base64.b64encode(b"me:password").decode()
        if call.headers.get("Authorization") != f"Basic {user}":
            return 401, b"{}"
        assert "scope=repository%3Ateam%2Fllama%3Apull" in call.path
        token = f"t{len(tokens)}"
        tokens[token] = 2
        return 200, json.dumps({"token": token}).encode()

    with serving(give) as realm:

        def answer(call: Call) -> Answer:
            token = call.headers.get("Authorization", "").removeprefix("Bearer ")
            tokens[token] = tokens.get(token, 0) - 1
            if tokens[token] < 0:
                said = f'Bearer realm="{realm.url}/token",service="registry"'
                return 401, b"{}", {"WWW-Authenticate": said}
            if "/manifests/" in call.path:
                return 200, manifest
            first, last = call.headers["Range"].removeprefix("bytes=").split("-")
            body = layer[int(first) : int(last) + 1]
            return 206, body, {"Content-Range": f"bytes {first}-{last}/{len(layer)}"}

        with serving(answer) as server:
            yield server, realm


def test_a_token_comes_from_the_server_that_the_registry_names(
    guarded: tuple[Web, Web], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what `docker login` stored, only where the profile allows it, and anew when it ends."""
    server, realm = guarded
    host, other = server.url.removeprefix("http://"), realm.url.removeprefix("http://")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    url = f"oci://{host}/team/llama:v1"
    with pytest.raises(AccessDenied, match="not allowed") as refused:
        remote_model(url, profile(host))
    assert "[oci] redirect_hosts" in refused.value.one_line()
    with pytest.raises(AccessDenied, match="who has no token"):
        remote_model(url, profile(host, other))
    login = base64.b64encode(b"me:password").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": login}}}))
    model = remote_model(url, profile(host, other))
    assert [content(model, "config.json") for _ in range(3)] == [FILES["config.json"]] * 3
    assert not any("Basic" in call.headers.get("Authorization", "") for call in server.calls)
