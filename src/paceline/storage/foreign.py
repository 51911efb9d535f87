"""Opens a model that another party hosts by its URL: a hub's repository, a registry's artefact."""

from __future__ import annotations

from paceline.config import Profile, hub_access, oci_access
from paceline.storage import hub, oci
from paceline.storage.remote import RemoteModel

SCHEMES = (hub.SCHEME, oci.SCHEME)


def is_remote(url: str) -> bool:
    """Return whether ``url`` names a model that has to be imported."""
    return url.startswith(SCHEMES)


def remote_name(url: str) -> str:
    """Return ``url`` without a revision, tag or digest; raises InvalidInput for a bad one."""
    if url.startswith(hub.SCHEME):
        return hub.SCHEME + hub.parse_hub_url(url)[0]
    host, repository, _ = oci.parse_oci_url(url)
    return f"{oci.SCHEME}{host}/{repository}"


def remote_model(url: str, profile: Profile) -> RemoteModel:
    """Return the model at ``url``, at the revision that it names now; raises as the two do."""
    if url.startswith(hub.SCHEME):
        return hub.hub_model(url, hub_access(profile))
    host, _, _ = oci.parse_oci_url(url)
    return oci.oci_model(url, oci_access(profile, host))
