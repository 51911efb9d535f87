"""How this process reaches a hub or a registry of others, and the user's own credentials for it.

Read on the side that imports a model only: no agent and no file of ours has these credentials.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline.config.base import Settings
from paceline.config.settings import Profile
from paceline.errors import InvalidInput

HUB = "https://huggingface.co"


class RemoteAccess(Settings):
    """A server, this user's credentials for it, and where else its downloads may come from."""

    endpoint: str  # http(s)://host[:port]
    token: str = ""  # sent as a bearer token, to the endpoint's own host only
    user: str = ""  # "name:password" for a registry's token server
    redirect_hosts: tuple[str, ...] = ()
    setting: str  # the name of the setting that has these hosts
    proxy: str = ""

    def __repr__(self) -> str:
        return f"RemoteAccess({self.endpoint!r})"

    __str__ = __repr__


def hub_access(profile: Profile) -> RemoteAccess:
    """Return the hub of ``profile`` with the token that Hugging Face's tools would send."""
    endpoint = (profile.hub.endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    return RemoteAccess(
        endpoint=endpoint,
        token=_hub_token(),
        redirect_hosts=profile.hub.redirect_hosts,
        setting="[hub] redirect_hosts",
        proxy=_proxy(endpoint),
    )


def oci_access(profile: Profile, host: str) -> RemoteAccess:
    """Return the registry ``host`` with what ``docker login`` stored for it."""
    scheme = "http" if host in profile.oci.plain_http else "https"
    endpoint = f"{scheme}://{host}"
    return RemoteAccess(
        endpoint=endpoint,
        user=_docker_login(host),
        redirect_hosts=profile.oci.redirect_hosts,
        setting="[oci] redirect_hosts",
        proxy=_proxy(endpoint),
    )


def _hub_token() -> str:
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in ("1", "true", "yes", "on"):
        return ""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _docker_login(host: str) -> str:
    place = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        stored = json.loads(place.read_bytes())["auths"][host]["auth"]
        return base64.b64decode(stored, validate=True).decode() if stored else ""
    except (OSError, KeyError, TypeError):
        return ""
    except ValueError as error:
        raise InvalidInput(
            "a stored login cannot be read", got=error, where=f"{place}, {host}", do="Log in again."
        ) from error


def _proxy(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if proxy_bypass(parts.netloc):
        return ""
    return getproxies().get(parts.scheme, "")
