"""The sections of a profile, and the profile itself: sizes, stores, cluster, security, prices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from paceline.profile.base import Settings
from paceline.profile.training import DataSettings, TrainingSettings

MIB = 1024 * 1024


class ClusterSettings(Settings):
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


class ServiceSettings(Settings):
    """Where the servers listen; port 0 means any free one."""

    host: str = "127.0.0.1"
    prefect_port: int = Field(default=0, ge=0, le=65535)
    mlflow_port: int = Field(default=0, ge=0, le=65535)
    s3_port: int = Field(default=0, ge=0, le=65535)
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    scheduler_port: int = Field(default=0, ge=0, le=65535)
    ready_timeout_s: float = Field(default=120.0, gt=0)


class StorageSettings(Settings):
    """Buckets of the object store."""

    bucket: str = "paceline"
    model_prefix: str = "models"
    data_prefix: str = "data"
    checkpoint_prefix: str = "checkpoints"


class ObjectSettings(Settings):
    """The S3 server where no installation of ours runs one; credentials by reference only."""

    endpoint_url: str = ""  # "": $AWS_ENDPOINT_URL, else Amazon's of the region
    region: str = "us-east-1"
    access_key_env: str = "AWS_ACCESS_KEY_ID"  # the variable that holds it
    secret_key_env: str = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 (a variable's name)


BucketPlace = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*/?$", max_length=1100),
]


class SecuritySettings(Settings):
    """Whom this installation believes, and what it lets in."""

    trusted_publishers: tuple[str, ...] = ()  # public keys, as `paceline keys new` prints them
    require_signature: bool = False  # refuse manifests that none of them signed
    source_roots: tuple[str, ...] = ()  # local directories models may come from
    # Buckets, or prefixes as "bucket/prefix", that models may come from, beside storage.bucket.
    source_buckets: tuple[BucketPlace, ...] = ()
    # Where `training.code_ref` may come from: a module (its submodules too), an absolute directory
    # (whatever is below), or the beginning of an https:// or file:// URL that ends in "/".
    code_sources: tuple[str, ...] = ("paceline.training.recurrent",)
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


class StoreSettings(Settings):
    """What a node's disk keeps; the active version, and what is served, always stays."""

    keep_versions: int = Field(default=5, ge=0)  # of each model, newest first; 0: all
    free_share: float = Field(default=0.05, ge=0, lt=1)  # below it the oldest versions go


class ControlSettings(Settings):
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


class RelaySettings(Settings):
    """How models travel."""

    topology: Literal["auto", "direct", "chain", "tree", "tree-of-chains", "mesh"] = "auto"
    transport: Literal["tcp", "grpc"] = "tcp"  # the same on every worker; tcp costs less CPU
    piece_bytes: int = Field(default=0, ge=0, le=16 * MIB)  # 0: from the model's size
    chunk_bytes: int = Field(default=0, ge=0)  # 0: from the model's size and the link
    max_failed: float = Field(default=0.05, ge=0, le=1)
    beat_s: float = Field(default=0.5, gt=0)
    lost_after_beats: int = Field(default=6, ge=2)
    deadline_s: float = Field(default=600.0, gt=0)  # one whole deployment


class ModelSettings(Settings):
    """The demo's byte-level transformer; ``parameters`` is the dial that derives its shape."""

    model_id: str = "bytelm"
    parameters: int = Field(default=2_000_000, ge=10_000)
    context: int = Field(default=256, ge=16)
    base_steps: int = Field(default=60, ge=0)  # the recorded budget at which the base model stops
    seed: int = 0


class EvaluationSettings(Settings):
    """How a candidate is judged."""

    held_out_bytes: int = Field(default=262_144, ge=1024)
    bootstrap_samples: int = Field(default=1000, ge=100)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    ngram_order: int = Field(default=5, ge=1, le=8)
    seed: int = 0


class GateSettings(Settings):
    """What a candidate must show to be promoted; missing evidence is a refusal."""

    max_bits_per_byte: float = Field(default=8.0, gt=0)
    must_beat: tuple[str, ...] = ("base",)  # names of evaluated models the interval must clear
    # Beside those every simple baseline must be beaten, but for these: the policy's exceptions.
    except_baselines: tuple[Literal["ngram", "gzip", "xz"], ...] = ()
    max_model_bytes: int = Field(default=2_000_000_000, gt=0)
    max_latency_ms: float = Field(default=1000.0, gt=0)  # one forward pass of one context
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


class Profile(Settings):
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
