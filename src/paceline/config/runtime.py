"""Runtime of an installation: the addresses of its servers and the secrets generated for it.

Stored as ``runtime.json`` (mode 0600) in the state directory and read by every component. Reads
the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from paceline.config.base import Settings
from paceline.config.settings import ObjectSettings, Profile
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    InvalidProfile,
    NotReady,
    short_repr,
)
from paceline.system import without_proxy_to_loopback, write_private

RUNTIME_FILE = "runtime.json"
DEFAULT_S3 = "default"  # no endpoint is named: AWS's variables and files, else Amazon


class Endpoints(Settings):
    """Addresses of a running installation's servers."""

    coordinator_url: str = ""  # of the first (or only) replica
    coordinator_urls: tuple[str, ...] = ()  # of every replica, where there are several
    coordinator_ca: str = ""  # what verifies their certificates: a PEM file, or PEM itself
    s3_url: str = ""  # "": none (this machine's disk); DEFAULT_S3: what boto3 finds
    prefect_api_url: str = ""
    prefect_ui_url: str = ""
    mlflow_url: str = ""
    scheduler_address: str = ""  # tls://host:port of the Dask scheduler


class Secrets(Settings):
    """Secrets of one installation; never printed, never in a flow's parameters."""

    s3_access_key: str = ""
    s3_secret_key: str = ""
    coordinator_token: str = ""  # allows every call; "" on nodes that joined
    worker_token: str = ""  # of a node that joined
    peer_token: str = ""  # of a node that joined
    prefect_auth: str = ""  # "user:password"
    mlflow_auth: str = ""  # "user:password", "" where MLflow runs without authentication
    tls_ca: str = ""  # paths of PEM files for Dask's TLS
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def agents_token(self) -> str:
        """Return the agent's token for the coordinator; it allows a worker's calls only."""
        return self.worker_token or derived_token(self.coordinator_token, "agents")

    @property
    def records_key(self) -> str:
        """Return the key that authenticates recorded results; "" on nodes that joined."""
        return derived_token(self.coordinator_token, "records")

    @property
    def peers_token(self) -> str:
        """Return the token between agents; the coordinator does not accept it."""
        return self.peer_token or derived_token(self.coordinator_token, "peers")

    def __repr__(self) -> str:
        return "Secrets(…)"

    __str__ = __repr__


def derived_token(token: str, purpose: str) -> str:
    """Return a secret for ``purpose``, derived one-way from ``token`` (HMAC-SHA256, hex)."""
    if not token:
        return ""
    return hmac.new(token.encode(), f"paceline {purpose}".encode(), hashlib.sha256).hexdigest()


class ObjectAccess(ObjectSettings):
    """An S3 server, and its credentials where the installation made them (it runs the server)."""

    access_key: str = ""  # "": boto3's default chain
    secret_key: str = ""

    def __repr__(self) -> str:
        return f"ObjectAccess({self.endpoint_url!r})"

    __str__ = __repr__


class Runtime(Settings):
    """A profile, its state directory, its servers' addresses and its secrets."""

    profile: Profile
    state_dir: Path
    endpoints: Endpoints
    secrets: Secrets
    is_login: bool = Field(default=False, exclude=True)  # of a login: there is no state directory

    @property
    def runs_flows_here(self) -> bool:
        """Return whether commands run their flows in this process: it needs Prefect's server."""
        return not self.is_login and bool(self.endpoints.prefect_api_url)

    @property
    def models_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which models are published."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.model_prefix}"

    @property
    def data_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which data snapshots are stored."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.data_prefix}"

    @property
    def checkpoints_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which training checkpoints are stored."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.checkpoint_prefix}"

    @property
    def records_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which results are stored by digest."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.record_prefix}"

    @property
    def object_access(self) -> ObjectAccess:
        """Return how this process reaches the object store."""
        named = self.endpoints.s3_url
        if self.secrets.s3_access_key:  # the server that this installation runs
            return ObjectAccess(
                endpoint_url=named,
                access_key=self.secrets.s3_access_key,
                secret_key=self.secrets.s3_secret_key,
            )
        access = object_access(self.profile)
        if named in ("", DEFAULT_S3):
            return access
        return access.model_copy(update={"endpoint_url": named})

    @property
    def coordinator_ca(self) -> str | bytes:
        """Return what verifies the coordinator's certificate: a PEM file, or PEM; "": the system's
        CAs.
        """
        named = self.endpoints.coordinator_ca
        if named.startswith("-----BEGIN "):
            return named.encode()
        return str(self.state_dir / named) if named else ""

    def node_dir(self, worker_id: str) -> Path:
        """Return the directory of node ``worker_id`` on its own disk."""
        return self.state_dir / "nodes" / worker_id

    def prefect_environment(self) -> dict[str, str]:
        """Return the variables that point a Prefect client at this installation's server; a
        password or key of a server elsewhere is the caller's own variable."""
        own = self.secrets.prefect_auth
        return {
            "PREFECT_API_URL": self.endpoints.prefect_api_url,
            **({"PREFECT_API_AUTH_STRING": own} if own else {}),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **without_proxy_to_loopback(),
        }


def object_access(profile: Profile) -> ObjectAccess:
    """Return the S3 server that ``profile`` names; its credentials come from boto3's chain."""
    return ObjectAccess(**profile.objects.model_dump())


def aws_variables() -> tuple[str | None, ...]:
    """Return AWS's variables with credentials, as they are now: a program may set them late."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
    return tuple(os.environ.get(each) for each in names)


def named_secret(variable: str, needed_by: str | None = None) -> str:
    """Return the secret in the environment ``variable``, or in the file that ``variable``_FILE
    names (without the line's end); "" if neither is set.

    Raises AccessDenied if none is there and ``needed_by`` (a setting's name) is given, or if the
    file cannot be read; InvalidInput if both are set.
    """
    value = os.environ.get(variable, "") if variable else ""
    named = f"{variable}_FILE"
    if variable and (path := os.environ.get(named, "")):
        if value:
            raise InvalidInput(
                "a secret is given twice",
                got=f"${variable} and ${named}",
                wanted="one of them",
                do="Unset the other for this process.",
            )
        try:
            value = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise AccessDenied(
                "the file of a secret cannot be read",
                got=f"{path}: {why}",
                wanted="a file that this process may read",
                where=f"${named}",
                do="Mount it, or set the variable to where it is.",
            ) from error
    if not value and needed_by is not None:
        raise AccessDenied(
            "a secret is missing",
            got=f"${variable} is not set, and ${named} names no file with it",
            wanted=f"the secret that {needed_by} needs",
            do="Set one of them for this process.",
        )
    return value


def default_state_dir() -> Path:
    """Return ``$PACELINE_STATE``, or ``.paceline`` in the working directory."""
    return Path(os.environ.get("PACELINE_STATE") or ".paceline").absolute()


@dataclass(frozen=True, kw_only=True)
class ThisNode:
    """The node that this process runs on, as its Dask worker was started."""

    worker_id: str
    state_dir: Path
    labels: Mapping[str, str]  # host, rack, zone
    own_agent: bool = False  # its worker starts the agent; else a flow does, or an operator

    @property
    def directory(self) -> Path:
        """Return the node's directory, as ``Runtime.node_dir``."""
        return self.state_dir / "nodes" / self.worker_id

    def environment(self) -> dict[str, str]:
        """Return the variables from which ``this_node`` reads it."""
        return {
            "PACELINE_STATE": str(self.state_dir),
            "PACELINE_WORKER_ID": self.worker_id,
            "PACELINE_LABELS": json.dumps(dict(self.labels)),
            "PACELINE_OWN_AGENT": "1" if self.own_agent else "",
        }


def this_node() -> ThisNode:
    """Return this process's node; raises NotReady outside of a worker."""
    if not (worker_id := os.environ.get("PACELINE_WORKER_ID", "")):
        raise NotReady("no worker runs here", got="$PACELINE_WORKER_ID is not set")
    return ThisNode(
        worker_id=worker_id,
        state_dir=default_state_dir(),
        labels=json.loads(os.environ.get("PACELINE_LABELS", "{}")),
        own_agent=bool(os.environ.get("PACELINE_OWN_AGENT")),
    )


def save_runtime(runtime: Runtime) -> Path:
    """Write ``runtime`` into its state directory (mode 0600) and return the path.

    Raises Conflict if the directory belongs to another installation, whose token would be lost.
    """
    path = runtime.state_dir / RUNTIME_FILE
    require_unused(runtime.state_dir, runtime.secrets.coordinator_token)
    write_private(path, runtime.model_dump_json(indent=2).encode())
    return path


def require_unused(state_dir: Path, token: str = "") -> None:
    """Raise Conflict if ``state_dir`` belongs to an installation with another token."""
    try:
        found = json.loads((state_dir / RUNTIME_FILE).read_bytes())["secrets"]["coordinator_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no installation, or no readable token
    if found and found != token:
        raise Conflict(
            "this directory is another installation's",
            got=f"{RUNTIME_FILE} with the token of its first admin",
            wanted="a new directory",
            where=state_dir,
            do="Name another with --state.",
        )


def load_runtime(state_dir: Path | str | None = None) -> Runtime:
    """Return the runtime of the installation in ``state_dir``.

    Raises NotReady if no installation was started there, or its file cannot be read, and
    InvalidProfile for a value that this release refuses.
    """
    directory = Path(state_dir) if state_dir else default_state_dir()
    path = directory / RUNTIME_FILE
    try:
        stored = json.loads(path.read_bytes())
        stored["profile"]["model"].pop("base_steps", None)  # a setting of earlier releases
        found = Runtime.model_validate(stored)
        # Not the directory in the file: replicas run on copies, on other machines and paths.
        return found.model_copy(update={"state_dir": directory.absolute()})
    except FileNotFoundError as error:
        raise NotReady(
            "nothing runs here",
            got="no runtime.json",
            wanted="a started installation",
            where=directory,
            do="Name its directory with --state. `paceline up` starts one on this machine, "
            "`paceline init` prepares a fleet's, `paceline login` uses one elsewhere.",
        ) from error
    except ValidationError as error:
        raise _refused(error, path) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotReady(
            "runtime file cannot be read",
            got=str(error).splitlines()[0],
            where=path,
            do="Run `paceline down` and `paceline up` again.",
        ) from error


def _refused(error: ValidationError, path: Path) -> InvalidProfile:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    # a value elsewhere, around a key that is missing, or of an unknown key may have secrets
    shown = first["loc"][0] == "profile" and first["type"] not in ("missing", "extra_forbidden")
    shown &= not key.startswith("profile.objects.parameters")  # such as a customer's own key
    return InvalidProfile(
        "this release refuses a value that the installation was set up with",
        got=f"{key} = {short_repr(first['input'])}" if shown else key,
        wanted=first["msg"].removeprefix("Value error, "),
        where=path,
        do="Correct it in that file. Of `paceline up`: run `paceline down`, and `up` again.",
    )
