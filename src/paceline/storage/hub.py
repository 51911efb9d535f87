"""A Hugging Face repository as a model: ``hf://org/name@revision`` to a commit and its files.

Any endpoint that speaks the hub's API. The files of git's large file storage have SHA-256 as their
names there; of the others the hub has git's own digest. Both are checked when they are read.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from pydantic import BaseModel, Field

from paceline.config import RemoteAccess
from paceline.errors import InvalidInput
from paceline.schemas import Sha256
from paceline.storage.remote import RemoteFile, RemoteModel, RemoteReader

SCHEME = "hf://"
MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[\w./-]{1,200}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


def parse_hub_url(url: str) -> tuple[str, str]:
    """Return the repository and the revision of ``hf://org/name@revision``; raises InvalidInput."""
    name, _, revision = url.removeprefix(SCHEME).partition("@")
    revision = revision or ("" if url.endswith("@") else MAIN)
    if (
        not url.startswith(SCHEME)
        or not _NAME.fullmatch(name)
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
    blobId: str = Field(pattern=f"^{COMMIT.pattern}$")  # noqa: N815 (the hub's name)
    lfs: _Large | None = None


class _Revision(BaseModel):
    """What the hub answers about a revision; it has more fields."""

    id: str = Field(pattern=f"^{_NAME.pattern}$")
    sha: str = Field(pattern=f"^{COMMIT.pattern}$")
    siblings: tuple[_File, ...]


def hub_model(url: str, access: RemoteAccess) -> RemoteModel:
    """Return the repository at the commit that its revision names now.

    Raises InvalidInput, and what ``RemoteReader`` does: AccessDenied, SourceMissing, …
    """
    name, revision = parse_hub_url(url)
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
    return RemoteModel(f"{SCHEME}{found.id}@{found.sha}", found.id, found.sha, files, reader)
