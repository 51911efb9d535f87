"""An OCI artefact as a model: ``oci://host/repository:tag`` (or ``@sha256:…``) to its raw layers.

The layers of a ModelPack artefact (CNCF's model specification): one file each, uncompressed, its
path in an annotation, its name in the registry the SHA-256 of its bytes. Archives are refused: in
them no file can be read by its range.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

import urllib3
from pydantic import BaseModel, Field

from paceline.config import RemoteAccess
from paceline.errors import InvalidInput, PermanentError
from paceline.storage.remote import RemoteFile, RemoteModel, RemoteReader
from paceline.system import basic_authorization

SCHEME = "oci://"
_URL = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(:[0-9]{1,5})?)/"
    r"(?P<name>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})|@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_MANIFESTS = "application/vnd.oci.image.manifest.v1+json"
_PATHS = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_DIGEST = r"^sha256:[0-9a-f]{64}$"


class _Layer(BaseModel):
    mediaType: str  # noqa: N815 (the specification's name)
    digest: str = Field(pattern=_DIGEST)
    size: int = Field(ge=0)
    annotations: Mapping[str, str] = {}


class _Manifest(BaseModel):
    layers: tuple[_Layer, ...]


class _Token(BaseModel):
    token: str = ""
    access_token: str = ""


def parse_oci_url(url: str) -> tuple[str, str, str]:
    """Return host, repository and reference (a tag, or ``sha256:…``); raises InvalidInput."""
    match = _URL.fullmatch(url)
    if match is None:
        wanted = "oci://host/repository:tag or oci://host/repository@sha256:…"
        raise InvalidInput("not an artefact of a registry", got=repr(url)[:300], wanted=wanted)
    digest = f"sha256:{match['digest']}" if match["digest"] else ""
    return match["host"], match["name"], digest or match["tag"] or "latest"


def oci_model(url: str, access: RemoteAccess) -> RemoteModel:
    """Return the artefact that its tag names now; its version is the digest of its manifest.

    Raises InvalidInput for one that has not only raw layers, and what ``RemoteReader`` does.
    """
    host, name, reference = parse_oci_url(url)
    reader = _RegistryReader(access, name)
    path = f"/v2/{name}/manifests/{reference}"
    raw = reader.get(path, {"Accept": _MANIFESTS})
    digest = hashlib.sha256(raw).hexdigest()
    if reference.startswith("sha256:") and reference != f"sha256:{digest}":
        raise PermanentError(
            "the registry sent another manifest", got=digest, wanted=reference, where=url
        )
    files = []
    for layer in reader.parse(_Manifest, raw, path).layers:
        title = next((layer.annotations[each] for each in _PATHS if each in layer.annotations), "")
        packed = not layer.mediaType.endswith(".raw") and "model." in layer.mediaType
        if not title or packed or layer.mediaType.endswith(("+gzip", ".gzip", "+zstd")):
            raise InvalidInput(
                "an artefact with other than raw layers",
                got=f"{layer.mediaType}, {title or 'no path'}",
                wanted=f"a file as it is, with its path in {_PATHS[0]}",
                where=url,
                do="Build it with raw layers (`modctl build --raw`).",
            )
        blob = f"{access.endpoint}/v2/{name}/blobs/{layer.digest}"
        files.append(RemoteFile(title, layer.size, blob, sha256=layer.digest.partition(":")[2]))
    return RemoteModel(f"oci://{host}/{name}@sha256:{digest}", name, digest, tuple(files), reader)


class _RegistryReader(RemoteReader):
    """Takes a token from the server that the registry names, as `docker pull` does."""

    def __init__(self, access: RemoteAccess, repository: str) -> None:
        super().__init__(access, "the registry")
        self._repository = repository

    def _log_in(self, response: urllib3.BaseHTTPResponse) -> bool:
        asked = response.headers.get("WWW-Authenticate", "")
        if asked.lower().startswith("basic "):
            basic = basic_authorization(self._access.user).get("Authorization", "")
            changed, self._credentials = basic != self._credentials, basic
            return changed
        fields = dict(re.findall(r'(\w+)="([^"]*)"', asked))
        if not asked.lower().startswith("bearer ") or "realm" not in fields:
            return False
        scope = fields.get("scope") or f"repository:{self._repository}:pull"
        query = urlencode({"service": fields.get("service", ""), "scope": scope})
        where = f"{self._allowed(fields['realm'])}?{query}"
        answer = self._pool.request(
            "GET", where, headers=basic_authorization(self._access.user), redirect=False
        )
        if answer.status != 200:
            raise self._refused(answer, where)
        made = self.parse(_Token, answer.data, urlsplit(where).path)
        token = made.token or made.access_token
        changed, self._credentials = bool(token), f"Bearer {token}"
        return changed
