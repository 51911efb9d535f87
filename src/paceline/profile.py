"""Profiles: one TOML file into frozen settings. The only reader of the environment.

``load_profile`` reads ``profiles/NAME.toml`` (or a path); unknown keys fail and name the nearest
valid one. ``Runtime`` is what a running installation adds: where its servers listen and the secrets
that were generated for it, kept in the state directory (mode 0600) and read by every component.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import AccessDenied, InvalidProfile, NotReady

MIB = 1024 * 1024


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterSettings(_Settings):
    """The machines: how many, where they stand, how fast their links are."""

    kind: Literal["local"] = "local"
    nodes: int = Field(default=4, ge=1, le=10_000)
    racks: int = Field(default=2, ge=1)
    threads_per_node: int = Field(default=2, ge=1)
    link_mbit: float = Field(default=80.0, gt=0)  # each agent's NIC, each direction
    paced: bool = False  # agents hold themselves to it; where they are hosts, their NICs do
    external_mbit: float | None = Field(default=None, gt=0)  # the origin's link; None: as a node's
    oversubscription: float = Field(default=1.0, ge=1)  # of each rack's uplink
    node_memory_mb: int = Field(default=0, ge=0)  # 0: no limit


class ServiceSettings(_Settings):
    """Where the servers listen; port 0 means any free one."""

    host: str = "127.0.0.1"
    prefect_port: int = Field(default=0, ge=0, le=65535)
    mlflow_port: int = Field(default=0, ge=0, le=65535)
    s3_port: int = Field(default=0, ge=0, le=65535)
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    scheduler_port: int = Field(default=0, ge=0, le=65535)
    ready_timeout_s: float = Field(default=120.0, gt=0)


class StorageSettings(_Settings):
    """Buckets of the object store."""

    bucket: str = "paceline"
    model_prefix: str = "models"
    data_prefix: str = "data"
    checkpoint_prefix: str = "checkpoints"


class ObjectSettings(_Settings):
    """The S3 server where no installation of ours runs one; credentials by reference only."""

    endpoint_url: str = ""  # "": $AWS_ENDPOINT_URL, else Amazon's of the region
    region: str = "us-east-1"
    access_key_env: str = "AWS_ACCESS_KEY_ID"  # the variable that holds it
    secret_key_env: str = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 (a variable's name)


class SecuritySettings(_Settings):
    """Whom this installation believes, and what it lets in."""

    trusted_publishers: tuple[str, ...] = ()  # public keys, as `paceline keys new` prints them
    require_signature: bool = False  # refuse manifests that none of them signed
    source_roots: tuple[str, ...] = ()  # local directories models may come from
    # Between workers. auto: mutual TLS where its three files are named, else plain, which listens
    # on loopback only; mtls: always; plaintext-anywhere: whoever is on the network reads along.
    peer_tls: Literal["auto", "mtls", "plaintext-anywhere"] = "auto"
    peer_ca: str = ""  # PEM files, relative to the state directory; {worker_id} is replaced
    peer_cert: str = ""
    peer_key: str = ""
    # The coordinator's own port. off: plain, which listens on loopback only; installation: TLS with
    # a certificate of the authority below; files: TLS with rest_cert and rest_key;
    # plaintext-anywhere: tokens cross the network in the clear.
    rest_tls: Literal["off", "installation", "files", "plaintext-anywhere"] = "off"
    rest_cert: str = ""  # PEM files, relative to the state directory
    rest_key: str = ""
    rest_ca: str = ""  # what callers check rest_cert against; "": the authority's
    rest_hosts: tuple[str, ...] = ()  # names and addresses it is called by, beside loopback's
    authority: str = "authority"  # directory of ca.pem and ca-key.pem, made where it is missing
    identity_days: float = Field(default=30.0, gt=0, le=825)  # of a worker that joined
    calls_per_s: float = Field(default=500.0, gt=0)  # of one token; in a burst four times as many
    beats_per_s: float = Field(default=50.0, gt=0)  # of one worker
    failures_per_minute: float = Field(default=60.0, gt=0)  # of one address, refused tokens only


class StoreSettings(_Settings):
    """What a node's disk keeps; the active version, and what is served, always stays."""

    keep_versions: int = Field(default=5, ge=0)  # of each model, newest first; 0: all
    free_share: float = Field(default=0.05, ge=0, lt=1)  # below it the oldest versions go


class ControlSettings(_Settings):
    """Where the coordinator keeps what it knows, and how many of it there are.

    No URL carries a password: ``…_env`` names the variable that holds it.
    """

    replicas: int = Field(default=1, ge=1, le=7)  # more than one need etcd
    lease_s: float = Field(default=3.0, ge=2.0, le=60.0)  # a silent leader is replaced after it
    flow_starter: Literal["off", "prefect"] = "off"

    coordination: Literal["sqlite", "etcd"] = "sqlite"
    etcd_endpoints: tuple[str, ...] = ()  # "http://HOST:PORT" or "https://HOST:PORT"
    etcd_prefix: str = "/paceline/default"  # one for each installation
    etcd_ca: str = ""  # PEM files, relative to the state directory; "": the system's authorities
    etcd_cert: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password_env: str = "PACELINE_ETCD_PASSWORD"  # noqa: S105 (a variable's name)

    progress: Literal["memory", "redis"] = "memory"
    redis_url: str = ""  # "redis://HOST:PORT/0", "rediss://…" with TLS, "unix://PATH"
    redis_prefix: str = "paceline:default"
    redis_ca: str = ""  # "": the system's authorities
    redis_user: str = ""
    redis_password_env: str = "PACELINE_REDIS_PASSWORD"  # noqa: S105

    audit: Literal["sqlite", "postgres"] = "sqlite"
    postgres_url: str = ""  # "postgresql://USER@HOST:PORT/DATABASE?sslmode=verify-full"
    postgres_password_env: str = "PACELINE_POSTGRES_PASSWORD"  # noqa: S105


class RelaySettings(_Settings):
    """How models travel."""

    topology: Literal["auto", "direct", "chain", "tree", "tree-of-chains", "mesh"] = "auto"
    transport: Literal["tcp", "grpc"] = "tcp"  # the same on every worker; tcp costs less CPU
    piece_bytes: int = Field(default=0, ge=0, le=16 * MIB)  # 0: from the model's size
    chunk_bytes: int = Field(default=0, ge=0)  # 0: from the model's size and the link
    max_failed: float = Field(default=0.05, ge=0, le=1)
    beat_s: float = Field(default=0.5, gt=0)
    lost_after_beats: int = Field(default=6, ge=2)
    deadline_s: float = Field(default=600.0, gt=0)  # one whole deployment


class ModelSettings(_Settings):
    """The demo's byte-level transformer; ``parameters`` is the dial that derives its shape."""

    model_id: str = "bytelm"
    parameters: int = Field(default=2_000_000, ge=10_000)
    context: int = Field(default=256, ge=16)
    base_steps: int = Field(default=60, ge=0)  # the recorded budget at which the base model stops
    seed: int = 0


class DataSettings(_Settings):
    """The data snapshot."""

    source: str = "stdlib"  # the running Python's standard library, or a directory of text files
    max_bytes: int = Field(default=16 * MIB, ge=1024)
    shard_bytes: int = Field(default=1 * MIB, ge=1024)
    held_out_share: float = Field(default=0.1, gt=0, lt=1)
    purpose: str = "language-model-training"
    project: str = "paceline-demo"
    seed: int = 0


class TrainingSettings(_Settings):
    """The fine-tuning job."""

    ranks: int = Field(default=2, ge=1)
    steps: int = Field(default=120, ge=0)
    batch_sequences: int = Field(default=16, ge=1)  # of the whole gang
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    checkpoint_every_steps: int = Field(default=25, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    max_restarts: int = Field(default=3, ge=0)
    start_deadline_s: float = Field(default=120.0, gt=0)
    step_deadline_s: float = Field(default=60.0, gt=0)
    threads_per_rank: int = Field(default=1, ge=1)
    seed: int = 0


class EvaluationSettings(_Settings):
    """How a candidate is judged."""

    held_out_bytes: int = Field(default=262_144, ge=1024)
    bootstrap_samples: int = Field(default=1000, ge=100)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    ngram_order: int = Field(default=5, ge=1, le=8)
    seed: int = 0


class GateSettings(_Settings):
    """What a candidate must show to be promoted; missing evidence is a refusal."""

    max_bits_per_byte: float = Field(default=8.0, gt=0)
    must_beat: tuple[str, ...] = ("base",)  # names of evaluated models the interval must clear
    max_model_bytes: int = Field(default=2_000_000_000, gt=0)
    max_latency_ms: float = Field(default=1000.0, gt=0)  # one forward pass of one context
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


class Profile(_Settings):
    """One file decides sizes, stores, cluster, security and prices."""

    name: str = "embedded"
    cluster: ClusterSettings = ClusterSettings()
    services: ServiceSettings = ServiceSettings()
    storage: StorageSettings = StorageSettings()
    objects: ObjectSettings = ObjectSettings()
    security: SecuritySettings = SecuritySettings()
    control: ControlSettings = ControlSettings()
    store: StoreSettings = StoreSettings()
    relay: RelaySettings = RelaySettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    gate: GateSettings = GateSettings()


class Endpoints(_Settings):
    """Where a running installation listens."""

    coordinator_url: str = ""  # of the first (or only) replica
    coordinator_urls: tuple[str, ...] = ()  # of every replica, where there are several
    coordinator_ca: str = ""  # PEM file that their certificates are checked against
    s3_url: str = ""
    prefect_api_url: str = ""
    prefect_ui_url: str = ""
    mlflow_url: str = ""
    scheduler_address: str = ""  # tls://host:port of the Dask scheduler


class Secrets(_Settings):
    """Generated for one installation; never printed whole, never in a flow's parameters."""

    s3_access_key: str = ""
    s3_secret_key: str = ""
    coordinator_token: str = ""  # opens everything; "" on nodes that joined
    worker_token: str = ""  # of a node that joined
    peer_token: str = ""  # of a node that joined
    prefect_auth: str = ""  # "user:password"
    mlflow_auth: str = ""  # "user:password", "" where MLflow runs without authentication
    tls_ca: str = ""  # paths of PEM files for Dask's TLS
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def for_agents(self) -> str:
        """Return what this node's agent shows the coordinator: it opens a worker's calls only."""
        return self.worker_token or derived_token(self.coordinator_token, "agents")

    @property
    def for_peers(self) -> str:
        """Return what agents greet each other with; it opens nothing at the coordinator."""
        return self.peer_token or derived_token(self.coordinator_token, "peers")

    def __repr__(self) -> str:
        return "Secrets(…)"

    __str__ = __repr__


def derived_token(token: str, purpose: str) -> str:
    """Return a secret for ``purpose`` out of ``token``, which cannot be computed back from it."""
    if not token:
        return ""
    return hmac.new(token.encode(), f"paceline {purpose}".encode(), hashlib.sha256).hexdigest()


class Runtime(_Settings):
    """A profile, its state directory, and the servers that run for it."""

    profile: Profile
    state_dir: Path
    endpoints: Endpoints
    secrets: Secrets

    @property
    def models_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which models are published."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.model_prefix}"

    @property
    def data_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which data snapshots live."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.data_prefix}"

    @property
    def checkpoints_url(self) -> str:
        """Return ``s3://bucket/prefix`` under which training checkpoints live."""
        storage = self.profile.storage
        return f"s3://{storage.bucket}/{storage.checkpoint_prefix}"

    @property
    def coordinator_ca(self) -> str:
        """Return the file to check the coordinator's certificate against; "": the system's CAs."""
        named = self.endpoints.coordinator_ca
        return str(self.state_dir / named) if named else ""

    def node_dir(self, worker_id: str) -> Path:
        """Return the directory that belongs to node ``worker_id`` on its own disk."""
        return self.state_dir / "nodes" / worker_id

    def prefect_environment(self) -> dict[str, str]:
        """Return the variables that point a Prefect client at this installation's server."""
        return {
            "PREFECT_API_URL": self.endpoints.prefect_api_url,
            "PREFECT_API_AUTH_STRING": self.secrets.prefect_auth,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }


class ObjectAccess(_Settings):
    """An S3 server and the credentials for it, read from a profile and the environment."""

    endpoint_url: str
    access_key: str
    secret_key: str
    region: str

    def __repr__(self) -> str:
        return f"ObjectAccess({self.endpoint_url!r})"

    __str__ = __repr__


def object_access(profile: Profile) -> ObjectAccess:
    """Return the S3 server that ``profile`` names, with the credentials it refers to.

    Raises AccessDenied naming the variables where there are none.
    """
    named = profile.objects
    endpoint = (
        named.endpoint_url
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or f"https://s3.{named.region}.amazonaws.com"
    )
    access_key = os.environ.get(named.access_key_env, "")
    secret_key = os.environ.get(named.secret_key_env, "")
    if not access_key or not secret_key:
        missing = named.secret_key_env if access_key else named.access_key_env
        raise AccessDenied(
            "no S3 credentials",
            got=f"${missing} is not set",
            wanted=f"${named.access_key_env} and ${named.secret_key_env}",
            where=endpoint,
            do="Set both, or name a running installation with --state.",
        )
    return ObjectAccess(
        endpoint_url=endpoint, access_key=access_key, secret_key=secret_key, region=named.region
    )


def named_secret(variable: str, needed_by: str | None = None) -> str:
    """Return the secret in the environment's ``variable``, "" where it is not set.

    Raises AccessDenied naming the variable where the setting ``needed_by`` cannot do without.
    """
    value = os.environ.get(variable, "") if variable else ""
    if not value and needed_by is not None:
        raise AccessDenied(
            "a password is missing",
            got=f"${variable} is not set",
            wanted=f"the password that {needed_by} needs",
            do="Set the variable for this process.",
        )
    return value


RUNTIME_FILE = "runtime.json"


def profile_directories() -> list[Path]:
    """Return where profiles are looked up: ``$PACELINE_PROFILES``, the source tree, the wheel."""
    here = Path(__file__).resolve().parent
    places = [here.parents[1] / "profiles", here / "_profiles"]
    if extra := os.environ.get("PACELINE_PROFILES"):
        places.insert(0, Path(extra))
    return [place for place in places if place.is_dir()]


def load_profile(name_or_path: str, overrides: Mapping[str, str] | None = None) -> Profile:
    """Return the profile named ``name_or_path`` with dotted ``overrides`` such as
    ``{"cluster.link_mbit": "6"}`` applied (values are TOML literals, else strings).

    Raises InvalidProfile naming the file, the key, and the nearest valid key.
    """
    path = _find(name_or_path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidProfile(
            "profile cannot be read",
            got=error,
            wanted="a TOML file",
            where=path,
            do="Fix the file.",
        ) from error
    for key, value in (overrides or {}).items():
        _set(raw, key, value)
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, path) from error


def default_state_dir() -> Path:
    """Return ``$PACELINE_STATE``, or ``.paceline`` in the working directory."""
    return Path(os.environ.get("PACELINE_STATE") or ".paceline").absolute()


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` so that only the owner can read it, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_runtime(runtime: Runtime) -> Path:
    """Write ``runtime`` into its state directory (mode 0600) and return the path."""
    path = runtime.state_dir / RUNTIME_FILE
    write_private(path, runtime.model_dump_json(indent=2).encode())
    return path


def load_runtime(state_dir: Path | str | None = None) -> Runtime:
    """Return the runtime of the installation in ``state_dir``.

    Raises NotReady where nothing was started there.
    """
    directory = Path(state_dir) if state_dir else default_state_dir()
    path = directory / RUNTIME_FILE
    try:
        return Runtime.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotReady(
            "nothing runs here",
            got="no runtime.json",
            wanted="a started installation",
            where=directory,
            do="Run `paceline up` (or name another directory with --state).",
        ) from error
    except (ValidationError, json.JSONDecodeError) as error:
        raise NotReady(
            "runtime file cannot be read",
            got=str(error).splitlines()[0],
            where=path,
            do="Run `paceline down` and `paceline up` again.",
        ) from error


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
        if path.is_file():
            return path
    known = {file.stem: file for place in profile_directories() for file in place.glob("*.toml")}
    if name_or_path in known:
        return known[name_or_path]
    raise InvalidProfile(
        "no such profile",
        got=name_or_path,
        wanted=f"one of {', '.join(sorted(known)) or '(none found)'} or a path",
        do=_nearest(name_or_path, list(known)),
    )


def _set(raw: dict[str, Any], dotted: str, value: str) -> None:
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *parents, last = dotted.split(".")
    table = raw
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise InvalidProfile("override goes through a value", got=dotted, wanted="section.key")
    table[last] = parsed


def _explain(error: ValidationError, path: Path) -> InvalidProfile:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    if first["type"] == "extra_forbidden":
        valid = _keys_at(location[:-1])
        return InvalidProfile(
            "unknown key in profile",
            got=dotted,
            wanted=f"one of {', '.join(sorted(valid))}",
            where=path,
            do=_nearest(location[-1], valid),
        )
    return InvalidProfile(
        "bad value in profile",
        got=f"{dotted} = {first['input']!r}",
        wanted=first["msg"],
        where=path,
    )


def _keys_at(location: list[str]) -> list[str]:
    model: type[BaseModel] = Profile
    for part in location:
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)


def _nearest(word: str, known: list[str]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else None
