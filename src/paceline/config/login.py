"""Logins of this user: to an installation, and to a hub or a registry of others.

Of an installation: the URLs of its coordinator, the authority that it trusts, and a token.

`paceline login` keeps it in the user's configuration directory (mode 0600), for machines that have
no state directory. ``client.json``, which `paceline init` writes, is the same record without a
token, to hand out. ``find_installation`` is the one place that decides which of both a command
uses. Reads XDG_CONFIG_HOME and PACELINE_STATE from the environment.

The credentials for a hub or a registry are those that its own tools stored. They are read on the
side that imports a model only: no agent and no file of ours has them.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from paceline.config.base import Settings
from paceline.config.runtime import (
    RUNTIME_FILE,
    Endpoints,
    Runtime,
    Secrets,
    default_state_dir,
    load_runtime,
)
from paceline.config.settings import Profile
from paceline.errors import AccessDenied, InvalidInput, NotReady
from paceline.system import ensure_own_directory, write_private

VERSION = 1
LOGIN_FILE = "login.json"
CLIENT_FILE = "client.json"  # in the state directory that `init` makes
MAX_BYTES = 256 * 1024


class Login(Settings):
    """How this machine reaches an installation; ``token`` is empty in a ``client.json``."""

    version: int = VERSION
    coordinators: tuple[str, ...] = Field(min_length=1)  # the URLs of its replicas
    ca: str = ""  # PEM certificate that theirs are checked against; "": the system's authorities
    token: str = ""

    def __repr__(self) -> str:
        return f"Login({', '.join(self.coordinators)})"

    __str__ = __repr__

    def runtime(self) -> Runtime:
        """Return what the commands of a client need, with a profile that is not the installation's:
        ``Client.runtime`` asks it for its own.
        """
        return Runtime(
            profile=Profile(),
            state_dir=config_directory(),
            endpoints=Endpoints(
                coordinator_url=self.coordinators[0],
                coordinator_urls=self.coordinators,
                coordinator_ca=self.ca,
            ),
            secrets=Secrets(coordinator_token=self.token),
            is_login=True,
        )


def config_directory() -> Path:
    """Return ``$XDG_CONFIG_HOME/paceline``, by default ``~/.config/paceline``.

    Raises NotReady for a user without a home directory.
    """
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".config") / "paceline"
    except RuntimeError as error:  # a user without an entry, in a container
        raise NotReady(
            "there is no place for a login",
            got="no home directory",
            wanted="$XDG_CONFIG_HOME or $HOME",
            do="Set one of them, or name an installation's directory with --state.",
        ) from error


def read_login(path: Path) -> Login:
    """Return the login in ``path``; raises InvalidInput, FileNotFoundError where there is none."""
    try:
        with path.open("rb") as file:
            raw: Any = json.loads(file.read(MAX_BYTES))
        version = raw.get("version") if isinstance(raw, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise InvalidInput(
                "this file was written by a newer version of Paceline",
                got=f"version {version}",
                wanted=f"version {VERSION}",
                where=path,
                do="Install that version here, or write the file again with `paceline login`.",
            )
        return Login.model_validate_json(json.dumps(raw))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise InvalidInput(
            "this file cannot be read as a login",
            got=str(first).splitlines()[0],
            wanted=f"what `paceline login` or `paceline init` wrote (version {VERSION})",
            where=path,
            do="Log in again: `paceline login URL`.",
        ) from error


def load_login() -> Login | None:
    """Return this user's login, None where there is none; raises InvalidInput."""
    try:
        return read_login(config_directory() / LOGIN_FILE)
    except FileNotFoundError:
        return None


def save_login(login: Login) -> Path:
    ensure_own_directory(config_directory())
    path = config_directory() / LOGIN_FILE
    write_private(path, login.model_dump_json(indent=2).encode())
    return path


def delete_login() -> bool:
    try:
        (config_directory() / LOGIN_FILE).unlink()
    except FileNotFoundError:
        return False
    return True


def find_installation(state: Path | None = None) -> Runtime:
    """Return the installation that a command is about.

    It is the one in ``state`` or $PACELINE_STATE where either is given, else the one in ./.paceline
    where there is one, else the one of this user's login. Raises NotReady where there is none.
    """
    directory = Path(state).absolute() if state else default_state_dir()
    named = state is not None or bool(os.environ.get("PACELINE_STATE"))
    if not named and not (directory / RUNTIME_FILE).exists():
        if (login := load_login()) is not None:
            return login.runtime()
        raise NotReady(
            "nothing runs here, and there is no login",
            got="no runtime.json",
            wanted="a started installation, or a login to one elsewhere",
            where=directory,
            do="Run `paceline up` (or name a directory with --state), or `paceline login URL`.",
        )
    return load_runtime(directory)


def require_here(runtime: Runtime, what: str) -> Runtime:
    """Return ``runtime`` of a state directory; raises AccessDenied for that of a login."""
    if not runtime.is_login:
        return runtime
    raise AccessDenied(
        f"{what} needs the installation's state directory",
        got=f"a login to {runtime.endpoints.coordinator_url}",
        wanted="--state DIR",
        do="Run it on a machine that has the directory, such as the coordinator's.",
    )


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
    from urllib.request import getproxies, proxy_bypass  # slow to import

    parts = urlsplit(endpoint)
    if proxy_bypass(parts.netloc):
        return ""
    return getproxies().get(parts.scheme, "")
