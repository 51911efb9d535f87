"""Models that another party hosts, by URL: a Hugging Face repository or an OCI artefact.

``hf://org/name@revision`` is read at the commit that the revision names, from any endpoint that
speaks the hub's API. The files of git's large file storage have SHA-256 as their names there; of
the others the hub has git's own digest. Both are checked when they are read.

``oci://host/repository:tag`` (or ``@sha256:…``) is a ModelPack artefact (CNCF's model
specification) with raw layers: one file each, its path in an annotation, its name in the registry
the SHA-256 of its bytes. Archives are refused: in them no file can be read by its range.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import quote, urlencode, urlsplit

import urllib3
from pydantic import BaseModel, Field

from paceline.config import Profile, RemoteAccess, hub_access, oci_access
from paceline.errors import InvalidInput, PermanentError
from paceline.schemas import Sha256
from paceline.storage.remote import RemoteFile, RemoteModel, RemoteReader
from paceline.system import basic_authorization

HUB, OCI = "hf://", "oci://"
_MAIN = "main"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMPONENT = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"  # of a name, as the specification has it: no ".."
_URL = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(:[0-9]{1,5})?)/"
    rf"(?P<name>{_COMPONENT}(/{_COMPONENT})*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})|@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_MANIFESTS = "application/vnd.oci.image.manifest.v1+json"
_PATHS = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_DIGEST = r"^sha256:[0-9a-f]{64}$"


def is_remote(url: str) -> bool:
    """Return whether ``url`` names a model that has to be imported."""
    return url.startswith((HUB, OCI))


def remote_name(url: str) -> str:
    """Return ``url`` without a revision, tag or digest; raises InvalidInput for a bad one."""
    if url.startswith(HUB):
        return HUB + _parse_hub(url)[0]
    host, repository, _ = _parse_oci(url)
    return f"{OCI}{host}/{repository}"


def remote_model(url: str, profile: Profile) -> RemoteModel:
    """Return the model at ``url``, at the revision that it names now.

    Raises InvalidInput, and what ``RemoteReader`` does: AccessDenied, SourceMissing, …
    """
    if url.startswith(HUB):
        return _hub_model(url, hub_access(profile))
    return _oci_model(url, oci_access(profile, _parse_oci(url)[0]))


def _parse_hub(url: str) -> tuple[str, str]:
    """Return the repository and the revision of ``hf://org/name@revision``; raises InvalidInput."""
    name, _, revision = url.removeprefix(HUB).partition("@")
    revision = revision or ("" if url.endswith("@") else _MAIN)
    if (
        not url.startswith(HUB)
        or not _HUB_NAME.fullmatch(name)
        or not _REVISION.fullmatch(revision)
        or ".." in revision
    ):
        raise InvalidInput(
            "not a repository of the hub", got=repr(url)[:300], wanted="hf://org/name[@revision]"
        )
    return name, revision


class _Large(BaseModel):
    sha256: Sha256


class _File(BaseModel):
    rfilename: str
    size: int = Field(ge=0)
    blobId: str = Field(pattern=f"^{_COMMIT.pattern}$")  # noqa: N815 (the hub's name)
    lfs: _Large | None = None


class _Revision(BaseModel):
    """What the hub answers about a revision; it has more fields."""

    id: str = Field(pattern=f"^{_HUB_NAME.pattern}$")
    sha: str = Field(pattern=f"^{_COMMIT.pattern}$")
    siblings: tuple[_File, ...]


def _hub_model(url: str, access: RemoteAccess) -> RemoteModel:
    """Return the repository at the commit that its revision names now."""
    name, revision = _parse_hub(url)
    reader = RemoteReader(access, "the hub")
    path = f"/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true"
    found = reader.parse(_Revision, reader.get(path), path)
    files = tuple(
        RemoteFile(
            each.rfilename,
            each.size,
            f"{access.endpoint}/{found.id}/resolve/{found.sha}/{quote(each.rfilename)}",
            sha256=each.lfs.sha256 if each.lfs else "",
            git_sha1="" if each.lfs else each.blobId,
        )
        for each in found.siblings
    )
    return RemoteModel(f"{HUB}{found.id}@{found.sha}", found.id, found.sha, files, reader)


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


def _parse_oci(url: str) -> tuple[str, str, str]:
    """Return host, repository and reference (a tag, or ``sha256:…``); raises InvalidInput."""
    match = _URL.fullmatch(url)
    if match is None:
        wanted = "oci://host/repository:tag or oci://host/repository@sha256:…"
        raise InvalidInput("not an artefact of a registry", got=repr(url)[:300], wanted=wanted)
    digest = f"sha256:{match['digest']}" if match["digest"] else ""
    return match["host"], match["name"], digest or match["tag"] or "latest"


def _oci_model(url: str, access: RemoteAccess) -> RemoteModel:
    """Return the artefact that its tag names now; its version is the digest of its manifest.

    Raises InvalidInput for one that has not only raw layers, and what ``RemoteReader`` does.
    """
    host, name, reference = _parse_oci(url)
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
