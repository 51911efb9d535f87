"""Debian's docker-registry on loopback, and an artefact pushed as a ModelPack tool does it."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import Server, answers, free_port, program

MODEL = "application/vnd.cncf.model.manifest.v1+json"
RAW = "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.cncf.model.weight.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"

_CONFIG = """
version: 0.1
log: {{level: warn}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "{address}"}}
"""
_USERS = "auth: {{htpasswd: {{realm: registry, path: {path}}}}}\n"


def write_config(directory: Path, address: str, users: str = "") -> Path:
    """Write the configuration of a registry whose data lie in ``directory``; with ``users`` (lines
    of htpasswd, bcrypt) it wants a login.
    """
    text = _CONFIG.format(root=directory / "data", address=address)
    if users:
        (directory / "users").write_text(users)
        text += _USERS.format(path=directory / "users")
    config = directory / "config.yml"
    config.write_text(text)
    return config


@contextmanager
def registry_server(directory: Path) -> Iterator[str]:
    """Start a registry; yield its host:port."""
    binary, port = program("docker-registry"), free_port()
    config = write_config(directory, f"127.0.0.1:{port}")
    server = Server(
        "docker-registry", [binary, "serve", str(config)], directory, lambda: answers(port)
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()


def _call(method: str, url: str, body: bytes = b"", kind: str = "") -> str:
    headers = {"Content-Type": kind or "application/octet-stream"}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.headers.get("Location", ""))


def push(host: str, repository: str, tag: str, files: dict[str, bytes], media: str = RAW) -> str:
    """Push ``files`` as layers; return the digest of the manifest."""

    def blob(data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = _call("POST", f"http://{host}/v2/{repository}/blobs/uploads/")
        _call("PUT", f"{where}{'&' if '?' in where else '?'}digest={digest}", data)
        return {"digest": digest, "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": MODEL,
        "config": {"mediaType": "application/vnd.cncf.model.config.v1+json", **blob(b"{}")},
        "layers": [
            {"mediaType": media, "annotations": {"org.cncf.model.filepath": path}, **blob(data)}
            for path, data in files.items()
        ],
    }
    raw = json.dumps(manifest).encode()
    _call("PUT", f"http://{host}/v2/{repository}/manifests/{tag}", raw, MANIFEST)
    return hashlib.sha256(raw).hexdigest()
