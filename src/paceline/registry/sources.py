"""Where a named model lies: ``models:/…``, ``hf://…`` and ``oci://…`` to a place and a manifest.

Reads MLflow over its REST, without its library: a coordinator has none.
"""

from __future__ import annotations

import re
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from paceline.config import Runtime, mlflow_headers, mlflow_server
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
    SourceMissing,
)
from paceline.manifest import Manifest
from paceline.registry.lineage import TAG_MANIFEST, registered_name
from paceline.relay import allowed_source, fetch_allowed_manifest
from paceline.schemas import MODEL_ID
from paceline.storage import ObjectStore, RemoteModel, is_remote, remote_model

SCHEME = "models:/"
TIMEOUT_S = 10.0
_API = "/api/2.0/mlflow"


def resolve_source(
    url: str, runtime: Runtime, store: ObjectStore | None = None
) -> tuple[str, Manifest]:
    """Return where the model that ``url`` names lies (an S3 URL or a directory), and its manifest.

    A registry's alias and a remote revision are resolved now, once. Raises as ``allowed_source``,
    ``resolve_version`` and ``fetch_manifest`` do, and SourceMissing for a remote model that was
    not imported yet.
    """
    if url.startswith(SCHEME):
        source, digest = resolve_version(
            url, runtime.endpoints.mlflow_url, runtime.secrets.mlflow_auth
        )
        manifest = fetch_allowed_manifest(source, runtime, store)
        if manifest.digest != digest:
            raise Conflict(
                "the registered version is bound to another model than its place holds",
                got=manifest.digest,
                wanted=digest,
                where=f"{url} at {source}",
                do="Publish again under a new version, and register that.",
            )
        _require_asked(url, manifest.model_id)
        return source, manifest
    if not is_remote(url):
        return url, fetch_allowed_manifest(url, runtime, store)
    remote = allowed_remote_model(url, runtime)
    source = import_place(remote, runtime)
    try:
        return source, fetch_allowed_manifest(source, runtime, store)
    except SourceMissing as error:
        raise SourceMissing(
            "this revision was not imported yet",
            got=remote.url,
            where=source,
            do=f"Run: paceline publish {remote.url}",
        ) from error


def allowed_remote_model(url: str, runtime: Runtime) -> RemoteModel:
    """Return the model of a hub or a registry at the revision that ``url`` names now.

    Raises AccessDenied where ``security.source_repositories`` does not have it, also where a hub
    answers for a renamed repository with another, and what ``remote_model`` does.
    """
    found = remote_model(allowed_source(url, runtime), runtime.profile)
    allowed_source(found.url, runtime)
    return found


def published_reference(model: str) -> tuple[str, str]:
    """Return (model_id, version) of ``MODEL_ID/VERSION``; raises InvalidInput."""
    model_id, _, version = model.rpartition("/")
    if not re.fullmatch(MODEL_ID, model_id) or not re.fullmatch(MODEL_ID, version):
        raise InvalidInput(
            "no such model",
            got=repr(model)[:200],
            wanted="MODEL_ID/VERSION as published, hf://…, oci://…, or a directory",
            where="model.base or --model",
            do="Check the path or the id; `paceline publish` publishes a directory.",
        )
    return model_id, version


def import_place(remote: RemoteModel, runtime: Runtime) -> str:
    """Return where this installation keeps a remote model."""
    return f"{runtime.models_url}/{remote.model_id}/{remote.version}"


class _Tag(BaseModel):
    key: str
    value: str = ""


class _Version(BaseModel):
    """A model version, as MLflow answers; it has more fields."""

    source: str
    tags: tuple[_Tag, ...] = ()


class _Answer(BaseModel):
    model_version: _Version


def resolve_version(uri: str, mlflow_url: str, authorization: str = "") -> tuple[str, str]:
    """Return (source_url, manifest_digest) of ``models:/name@alias`` or ``models:/name/7``
    (7 is MLflow's own number of the version).

    ``authorization`` is "user:password", or "": as the environment says. Raises InvalidInput,
    NotFound, AccessDenied and ServiceUnavailable.
    """
    name, selector = _parts(uri)
    if not mlflow_url:
        raise InvalidInput("no MLflow server is known", got=uri, wanted="endpoints.mlflow_url")
    call = "registered-models/alias" if "alias" in selector else "model-versions/get"
    fields = {"name": registered_name(name), **selector}
    path = f"{_API}/{call}?{urlencode(fields, quote_via=quote)}"
    server = mlflow_server(mlflow_url)
    answer = server.call("GET", path, headers=mlflow_headers(authorization), timeout_s=TIMEOUT_S)
    server.close()
    where = f"{uri} at {mlflow_url}"
    if answer.status in (401, 403):
        raise AccessDenied("MLflow refuses our credentials", got=answer.status, where=where)
    if answer.status in (400, 404):
        raise NotFound(
            "the registry has no such version or alias",
            got=uri,
            where=mlflow_url,
            do="Name the model by its id, and look at its page in MLflow.",
        )
    try:
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        found = _Answer.model_validate_json(answer.body).model_version
    except (ValueError, ValidationError) as error:
        got = str(error).splitlines()[0][:200]
        raise ServiceUnavailable("MLflow cannot answer now", got=got, where=where) from error
    digest = next((tag.value for tag in found.tags if tag.key == TAG_MANIFEST), "")
    if not digest:
        raise NotFound("this version is bound to no manifest", where=where)
    return found.source, digest


def _parts(uri: str) -> tuple[str, dict[str, str]]:
    """Return the model's id, and MLflow's field that selects its version; raises InvalidInput."""
    text = uri.removeprefix(SCHEME)
    name, at, alias = text.rpartition("@")
    if not at:
        name, _, number = text.rpartition("/")
    known = uri.startswith(SCHEME) and re.fullmatch(MODEL_ID, name)
    if not known or not (alias if at else number.isdecimal()):
        raise InvalidInput(
            "not a model's address",
            got=uri[:300],
            wanted="models:/name@alias or models:/name/7, the name being the model's id",
        )
    return name, {"alias": alias} if at else {"version": number}


def _require_asked(uri: str, model_id: str) -> None:
    """Raise Conflict where ``uri`` names another model than ``model_id``, whose version it is."""
    asked, _ = _parts(uri)
    if model_id != asked:
        raise Conflict(
            "the registry has a version of another model under this name",
            got=model_id,
            wanted=asked,
            where=f"{uri}, {registered_name(asked)} in MLflow",
            do="Delete it there, or move its alias to a version of this model.",
        )
