"""Pydantic models of a profile and its other sections; all frozen, with unknown keys forbidden.

Units are in the field names (``_bytes``, ``_s``, ``_mbit``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from paceline.config.base import MIB, MODEL_ID, Settings, matching
from paceline.config.cluster import ClusterSettings
from paceline.config.training import DataSettings, TrainingSettings


class ServiceSettings(Settings):
    """Where the servers listen; port 0: that of the last start, a usual one (7400 …), or any."""

    host: str = "127.0.0.1"  # the address that all of them listen on
    prefect_port: int = Field(default=0, ge=0, le=65535)  # Prefect's API and pages
    mlflow_port: int = Field(default=0, ge=0, le=65535)  # MLflow's tracking server
    s3_port: int = Field(default=0, ge=0, le=65535)  # the object store that `paceline up` starts
    # the coordinator's REST and the fleet page
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    scheduler_port: int = Field(default=0, ge=0, le=65535)  # Dask's scheduler
    # of each server; one that takes longer fails `paceline up`
    ready_timeout_s: float = Field(default=120.0, gt=0)


class StorageSettings(Settings):
    """Bucket and prefixes in the object store."""

    bucket: str = "paceline"  # one, for models, data and checkpoints
    model_prefix: str = "models"  # of published models: model_prefix/MODEL_ID/VERSION/
    data_prefix: str = "data"  # of data snapshots
    checkpoint_prefix: str = "checkpoints"  # of trainings' checkpoints and exports
    record_prefix: str = "records"  # of results, scores and tasks by digest


class ObjectSettings(Settings):
    """The S3 server of an installation that does not run its own.

    Credentials never stand here: every process takes them from boto3's default chain on its own
    machine (environment, shared files, web identity, instance role), and so does what is left
    empty here.
    """

    endpoint_url: str = ""  # "": what AWS's variables and files say, else Amazon's
    region: str = ""  # such as "eu-central-1"
    profile: str = ""  # a section of AWS's shared configuration and credentials files
    # "": path with endpoint_url, else what AWS's file says (``s3 = addressing_style = …``)
    addressing: Literal["", "auto", "path", "virtual"] = ""
    ca: str = ""  # verifies the endpoint's certificate: a PEM file; its text from then on
    # Sent with every request that takes them, for instance RequestPayer = "requester",
    # ServerSideEncryption = "aws:kms", SSEKMSKeyId = "...", BucketKeyEnabled = true.
    parameters: dict[str, str | bool] = {}
    # The variable, on each machine, with the key of SSE-C: 32 bytes in base64.
    customer_key_env: str = ""
    # Above 0: agents have no credentials, and the coordinator signs each object that they read for
    # so many seconds.
    presigned_s: int = Field(default=0, ge=0, le=604_800)

    @property
    def is_named(self) -> bool:
        """Return whether the profile names a server, so that none of our own has to run."""
        return bool(self.endpoint_url or self.region or self.profile)

    @field_validator("parameters")
    @classmethod
    def _no_keys(cls, value: dict[str, str | bool]) -> dict[str, str | bool]:
        if secret := sorted(each for each in value if "CustomerKey" in each):
            raise ValueError(f"keys do not stand in a profile: {secret[0]}; see customer_key_env")
        return value


class HubSettings(Settings):
    """The Hugging Face hub that ``hf://org/name@revision`` names.

    Its token is the user's own, as Hugging Face's tools have it: a variable or a file.
    """

    endpoint: str = ""  # "": $HF_ENDPOINT, else https://huggingface.co
    # Hosts (or host:port) that it may redirect a download to; * stands for any part.
    redirect_hosts: tuple[str, ...] = ("*.huggingface.co", "*.hf.co")


class OciSettings(Settings):
    """Registries that ``oci://host/repository:tag`` names; credentials are those of `docker login`.

    Both are hosts, or host:port; * stands for any part.
    """

    redirect_hosts: tuple[str, ...] = ()  # where blobs and tokens may come from, besides the host
    plain_http: tuple[str, ...] = ()  # registries that are reached without TLS


BucketPlace = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*/?$", max_length=1100),
]


RepositoryPlace = Annotated[
    str, StringConstraints(pattern=r"^(hf|oci)://[A-Za-z0-9][^@\s]*$", max_length=512)
]


class SecuritySettings(Settings):
    """Trusted publishers and sources, TLS of peers and of REST, and rate limits."""

    trusted_publishers: tuple[str, ...] = ()  # public keys, as `paceline keys new` prints them
    require_signature: bool = False  # refuse manifests not signed by one of them
    fips: bool = False  # publish and accept only pieces hashed with SHA-256, not BLAKE3
    source_roots: tuple[str, ...] = ()  # local directories models may come from
    # Buckets, or "bucket/prefix", that models may come from, besides storage.bucket.
    source_buckets: tuple[BucketPlace, ...] = ()
    # What flows and REST may import: "hf://org/name", "hf://org/", "oci://host/repository"…
    source_repositories: tuple[RepositoryPlace, ...] = ()
    # Allowed sources of user code (`training.code_ref`, `evaluation.metrics`): a module with
    # submodules, an absolute directory with everything below, or a prefix of an https:// or file://
    # URL that ends in "/".
    code_sources: tuple[str, ...] = ()
    # Between workers. auto: mutual TLS if the three files below are set, else plain, which listens
    # on loopback only; mtls: always; plaintext-anywhere: plain on any network, readable by all.
    peer_tls: Literal["auto", "mtls", "plaintext-anywhere"] = "auto"
    peer_ca: str = ""  # PEM files, relative to the state directory; {worker_id} is replaced
    peer_cert: str = ""  # the worker's certificate, which peer_ca signed
    peer_key: str = ""  # the certificate's private key
    # The coordinator's own port. off: plain, which listens on loopback only; installation: TLS with
    # a certificate of the authority below; files: TLS with rest_cert and rest_key;
    # plaintext-anywhere: tokens cross the network unencrypted.
    rest_tls: Literal["off", "installation", "files", "plaintext-anywhere"] = "off"
    rest_cert: str = ""  # PEM files, relative to the state directory
    rest_key: str = ""  # rest_cert's private key
    rest_ca: str = ""  # CA that signed rest_cert; "": the authority below
    rest_hosts: tuple[str, ...] = ()  # allowed Host names and addresses, besides loopback's
    authority: str = "authority"  # directory of ca.pem and ca-key.pem; created if missing
    identity_days: float = Field(default=30.0, gt=0, le=825)  # of a worker that joined
    calls_per_s: float = Field(default=500.0, gt=0)  # per token; bursts up to four times as many
    beats_per_s: float = Field(default=50.0, gt=0)  # per worker
    failures_per_minute: float = Field(default=60.0, gt=0)  # refused tokens per client address

    @property
    def piece_hash(self) -> Literal["sha256"] | None:
        """Return the hash of the pieces that are published; None: the default."""
        return "sha256" if self.fips else None


class StoreSettings(Settings):
    """Retention on a node's disk; the active version and versions being served always stay."""

    keep_versions: int = Field(default=5, ge=0)  # per model, newest first; 0: all
    free_share: float = Field(default=0.05, ge=0, lt=1)  # below it the oldest versions are deleted


class ControlSettings(Settings):
    """The coordinator's replicas and stores.

    URLs contain no passwords: ``…_env`` names the environment variable with the password.
    """

    replicas: int = Field(default=1, ge=1, le=7)  # more than one requires etcd
    lease_s: float = Field(default=3.0, ge=2.0, le=60.0)  # a silent leader is replaced after it
    # prefect: a deployment or job that REST receives gets a flow run
    flow_starter: Literal["off", "prefect"] = "off"

    coordination: Literal["sqlite", "etcd"] = "sqlite"  # where deployments and jobs are stored
    etcd_endpoints: tuple[str, ...] = ()  # "http://HOST:PORT" or "https://HOST:PORT"
    etcd_prefix: str = "/paceline/default"  # unique per installation
    etcd_ca: str = ""  # PEM files, relative to the state directory; "": the system's authorities
    etcd_cert: str = ""  # a client's certificate, where etcd asks for one
    etcd_key: str = ""  # etcd_cert's private key
    etcd_user: str = ""  # "": etcd has no users
    # the variable with etcd_user's password
    etcd_password_env: str = "PACELINE_ETCD_PASSWORD"  # noqa: S105 (a variable's name)

    # where workers' progress and heartbeats are kept
    progress: Literal["memory", "redis"] = "memory"
    redis_url: str = ""  # "redis://HOST:PORT/0", "rediss://…" with TLS, "unix://PATH"
    redis_prefix: str = "paceline:default"  # of all its keys; unique per installation
    redis_ca: str = ""  # "": the system's authorities
    redis_user: str = ""  # "": the user "default"
    # the variable with its password
    redis_password_env: str = "PACELINE_REDIS_PASSWORD"  # noqa: S105

    # where the history of events and changes is written
    audit: Literal["sqlite", "postgres"] = "sqlite"
    postgres_url: str = ""  # "postgresql://USER@HOST:PORT/DATABASE?sslmode=verify-full"
    # the variable with its password
    postgres_password_env: str = "PACELINE_POSTGRES_PASSWORD"  # noqa: S105


class RelaySettings(Settings):
    """How models are distributed between workers."""

    # auto: the one that the cost model finds fastest
    topology: Literal["auto", "direct", "chain", "tree", "tree-of-chains", "mesh"] = "auto"
    transport: Literal["tcp", "grpc"] = "tcp"  # the same on every worker; tcp uses less CPU
    piece_bytes: int = Field(default=0, ge=0, le=16 * MIB)  # 0: from the model's size
    chunk_bytes: int = Field(default=0, ge=0)  # 0: from the model's size and the link
    # share of targets that may die: more fail the deployment
    max_failed: float = Field(default=0.05, ge=0, le=1)
    # between the heartbeats of an agent; longer in large fleets
    beat_s: float = Field(default=0.5, gt=0)
    lost_after_beats: int = Field(default=6, ge=2)  # an agent silent for so many is lost
    deadline_s: float = Field(default=600.0, gt=0)  # for one whole deployment
    full_sha256: bool = False  # check SHA-256 of files and chunks before a version is visible


class ModelSettings(Settings):
    """The model that a lifecycle starts from.

    ``base``: MODEL_ID/VERSION as published, hf://…, oci://…, or a directory (``./``: beside the
    profile's file); "": a new transformer, untrained, whose shape is derived from ``parameters``.
    """

    model_id: str = "pylm"  # the name under which candidates are published and registered
    base: str = ""  # "": a new model of the shape below
    parameters: int = Field(default=2_000_000, ge=10_000)  # about so many, of a new model
    context: int = Field(default=256, ge=16)  # tokens that a new model reads at once
    seed: int = 0  # of a new model's weights


def _is_unset(value: object) -> bool:
    """Return whether to leave a setting out of a dump: digests without it are those of before."""
    return not value


class MetricSettings(Settings):
    """A metric of the user's own: a function of pinned code from a list of held-out documents, each
    with what the model makes of it (``MetricSample``), to one figure for each of them."""

    code_ref: str = Field(min_length=1, max_length=1000)  # a reference as training.code_ref
    higher_is_better: bool
    # Tokens that the model writes after each document's first half, the most likely each time; 0:
    # samples have no prompt, prediction and reference.
    max_new_tokens: int = Field(default=0, ge=0, le=4096)


MetricName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
# Paceline's own, of pairs of answers: the share of which the chosen one is the more likely.
PREFERENCE_ACCURACY = "preference_accuracy"
_PREFERENCE = MetricSettings(code_ref="paceline", higher_is_better=True)


class EvaluationSettings(Settings):
    """How a candidate is evaluated."""

    # of held-out text that is scored; documents beyond it are left out
    held_out_bytes: int = Field(default=262_144, ge=1024)
    # From here on all nodes score a part of the documents; below, starting them takes longer.
    spread_from_bytes: int = Field(default=8_388_608, ge=1024)
    # resamplings of the documents behind each interval
    bootstrap_samples: int = Field(default=1000, ge=100)
    # of each interval: 0.95 contains the figure in 95 of 100 cases
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    # of the n-gram baseline: it reads order - 1 bytes back
    ngram_order: int = Field(default=5, ge=1, le=8)
    # Slices of each kind in the report: the most frequent values of a column, or directories.
    slice_values: int = Field(default=8, ge=1, le=200, exclude_if=lambda count: count == 8)
    # Tasks of lm-eval's, scored beside the held-out text: a directory on the machine of the flows
    # (``./``: beside the profile's file), or what was published of one, s3://…
    tasks: str = ""
    # Whether their prompts are rendered by each model's own chat template.
    tasks_as_chat: bool = Field(default=False, exclude_if=_is_unset)
    # of your own, by name
    metrics: dict[MetricName, MetricSettings] = Field(default={}, exclude_if=_is_unset)
    seed: int = 0  # of the resampling
    # Tokens of the rows in which models are scored, and their serving is measured; 0: each model's
    # own context. ``min_context`` of a policy needs as many.
    context: int = Field(default=1024, ge=0, exclude_if=lambda tokens: tokens == 1024)
    # Rows of the batch whose throughput is measured; 0: up to 8, fewer where memory says so.
    serving_batch: int = Field(default=0, ge=0, le=4096, exclude_if=_is_unset)
    # Whether trainings and jobs that name no snapshot to be judged on are judged on their own one's
    # held-out split; `--no-evaluate` leaves one out. Trials of sweeps are not judged.
    after_training: bool = Field(default=False, exclude_if=_is_unset)
    # Ranks that hold and score each model together (FSDP2); 0: as the training's gang shared it,
    # or as many as hold its float32 weights, where one node does not.
    ranks: int = Field(default=0, ge=0)
    tp: int = Field(default=1, ge=1)  # parts of each matrix, of these ranks

    @field_validator("metrics")
    @classmethod
    def _named_otherwise(cls, found: dict[str, MetricSettings]) -> dict[str, MetricSettings]:
        if PREFERENCE_ACCURACY in found:
            raise ValueError(f"{PREFERENCE_ACCURACY} is computed of pairs: choose another name")
        return found

    def metrics_of(self, *, pairs: bool) -> dict[str, MetricSettings]:
        """Return the metrics that are computed, by name; ``pairs``: of pairs of answers."""
        return self.metrics | ({PREFERENCE_ACCURACY: _PREFERENCE} if pairs else {})


# "directory" (each of the report's slices by directory), or one of them: "directory: src"; so for
# "size", and for a column of data.slice_fields
SliceName = Annotated[str, StringConstraints(pattern=r"^[^:]+(: .+)?$", max_length=300)]


class Policy(Settings):
    """Conditions for promoting a candidate; missing evidence is a refusal."""

    # on the held-out text; 8 admits all that is better than chance
    max_bits_per_byte: float = Field(default=8.0, gt=0)
    must_beat: tuple[str, ...] = ("base",)  # names of evaluated models the interval must clear
    # Every simple baseline must be beaten too, except these.
    except_baselines: tuple[Literal["ngram", "gzip", "xz"], ...] = ()
    # Snapshots whose held-out split may judge, by URL, by what their URLs begin with, or by digest;
    # (): the one that judged the champion, or another that the installation built of its source
    # with the same settings; without a champion, any that the candidate's submitter may use.
    judged_on: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    min_documents: int = Field(default=5, ge=5)  # with fewer, all agree by chance: 2**-5 = 3.1 %
    # Against the champion, as shares of its bits per byte: the upper ends of the intervals of all
    # text, and of slices (without a champion: against the base).
    max_regression: float = Field(default=0.01, ge=0, lt=1)
    # by slice, as max_regression; {}: slices are not checked
    max_slice_regression: dict[SliceName, Annotated[float, Field(ge=0)]] = {}
    # Share of the held-out documents of which half the text or more may lie in the training data,
    # and of the rows of each task; a copy of a held-out document always refuses.
    max_overlap: float = Field(default=0.05, ge=0, le=1)
    # Of the evaluation's tasks: "TASK/METRIC" → what the lower end of its interval must reach, and
    # by how much the candidate may be worse than the champion, or the base, on any of them.
    min_tasks: dict[str, float] = {}
    # in each metric's unit; 0: the interval of the difference reaches 0
    max_task_regression: float = Field(default=0.0, ge=0)
    # Of the evaluation's metrics: what the lower end of the interval must reach, and the upper end
    # may reach; by how much the interval may show the candidate worse than the champion, or the
    # base.
    min_metrics: dict[MetricName, float] = Field(default={}, exclude_if=_is_unset)
    # for metrics of which lower is better; {}: no limit
    max_metrics: dict[MetricName, float] = Field(default={}, exclude_if=_is_unset)
    # in the metric's own unit; {}: no limit
    max_metric_regression: dict[MetricName, Annotated[float, Field(ge=0)]] = Field(
        default={}, exclude_if=_is_unset
    )
    # by metric, then by slice, as max_metric_regression: { tone = { "directory: legal" = 0.0 } }
    max_metric_slice_regression: dict[
        MetricName, dict[SliceName, Annotated[float, Field(ge=0)]]
    ] = Field(default={}, exclude_if=_is_unset)
    # Of the model's own tokens: how often the most likely one is right, and how far from that the
    # model's own certainty is (expected calibration error).
    # share of tokens of which the most likely one is right; None: no limit
    min_token_accuracy: float | None = Field(default=None, ge=0, le=1)
    # expected difference between certainty and accuracy; None: no limit
    max_calibration_error: float | None = Field(default=None, gt=0, le=1)
    # of all files as published, with model.pt2, tokenizer and card; None: no limit
    max_model_bytes: int | None = Field(default=None, gt=0)
    # of its largest safetensors file; None: no limit
    max_file_bytes: int | None = Field(default=None, ge=1024, exclude_if=_is_unset)
    # Of one row of the context's length, on the node that judges: a forward pass, one more token,
    # and the whole process's peak.
    # of the forward pass; None: no limit
    max_latency_ms: float | None = Field(default=None, gt=0)
    # of each token after the first; None: no limit
    max_latency_ms_per_token: float | None = Field(default=None, gt=0)
    # peak of the whole process; None: no limit
    max_memory_bytes: int | None = Field(default=None, gt=0)
    # Of a batch of such rows, evaluation.serving_batch.
    min_tokens_per_second: float | None = Field(default=None, gt=0, exclude_if=_is_unset)
    max_parameters: int | None = Field(default=None, gt=0)  # None: no limit
    # Tokens that the model was made for, and of the longest row that it was scored on.
    min_context: int | None = Field(default=None, gt=0)
    # that the exported weights may have
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    # What the export must have: "torch.export" is the program of training.export_program.
    formats: tuple[Literal["safetensors", "torch.export"], ...] = Field(
        default=("safetensors",),
        exclude_if=lambda formats: formats == ("safetensors",),  # policies keep their digest
    )
    # Who must approve, by a token of scope approve: no one; any; one who did not submit it.
    approval: Literal["none", "anyone", "four-eyes"] = "none"
    approval_hours: float = Field(default=72.0, gt=0, le=720)  # then the promotion is off


ModelName = Annotated[str, matching(MODEL_ID, "a model's id, such as pylm or acme/7b")]


class GateSettings(Policy):
    """The policy of every model, and of those that have one of their own."""

    models: dict[ModelName, Policy] = {}  # by model id; what one leaves out is as in [gate]

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(own := given.get("models"), dict):
            return given
        common = {key: value for key, value in given.items() if key != "models"}
        return given | {
            "models": {
                model_id: common | each if isinstance(each, dict) else each
                for model_id, each in own.items()
            }
        }

    def policy(self, model_id: str) -> Policy:
        common = {name: getattr(self, name) for name in Policy.model_fields}
        return self.models.get(model_id) or Policy.model_construct(**common)


class QuotaSettings(Settings):
    """What one team may use of the slots: accelerators, or a CPU host's ``ranks_per_node``."""

    slots: int = Field(ge=0)  # guaranteed: taken back from teams that borrow them
    borrow: int | None = Field(default=None, ge=0)  # at most so many more; None: no limit
    max_priority: int = Field(default=100, ge=-100, le=100)  # of the team's jobs


class QueueSettings(Settings):
    """The queue of training jobs."""

    quotas: dict[str, QuotaSettings] = {}  # by team; empty: no team is limited


class SweepSettings(Settings):
    """Where the installation keeps the studies of its sweeps."""

    # "": studies.sqlite in the state directory; else PostgreSQL, for sweeps that go on from any
    # host: "postgresql://USER@HOST:PORT/DATABASE?sslmode=verify-full", a database of its own
    storage: str = Field(default="", pattern=r"^(postgresql://([^:@/]+@)?[^@]+)?$")
    # the variable with the database's password
    password_env: str = "PACELINE_SWEEPS_PASSWORD"  # noqa: S105 (a variable's name)


Price = Annotated[float, Field(ge=0)]


class PriceSettings(Settings):
    """What machines, energy and storage cost; what is left empty is unknown, never counted as 0.

    A kind is the one that a node reports, such as "NVIDIA H100 80GB HBM3", or whole words of it
    ("H100"; of several the longest counts). "cpu" is a node without accelerators.
    """

    # of every price below; shown beside costs, never converted
    currency: str = Field(default="EUR", min_length=1, max_length=12)
    per_hour: dict[str, Price] = {}  # of one accelerator, by kind; its share of the node included
    spot_factor: float = Field(default=1.0, gt=0, le=1)  # of these prices, on spot nodes
    watts: dict[str, Price] = {}  # of one accelerator with its share of the node, by kind
    per_kwh: Price | None = None  # besides the prices per hour: leave it out where they include it
    per_gb_egress: Price | None = None  # of 10**9 bytes that leave the object store
    per_gb_month: Price | None = None  # of 10**9 bytes stored there


class LinkSettings(Settings):
    """A transfer between two accelerators takes ``latency_us`` + bytes / ``gb_s``."""

    latency_us: float = Field(ge=0)  # microseconds until the first byte arrives
    gb_s: float = Field(gt=0)  # 10**9 bytes a second that one accelerator sends and receives


class AcceleratorSettings(Settings):
    """What an estimate of a training takes an accelerator and its links for."""

    # peak of matrix products in 10**12 a second, by precision: { bfloat16 = 989 }
    tflops: dict[
        Literal["float64", "float32", "bfloat16", "float16"], Annotated[float, Field(gt=0)]
    ]
    achieved: float = Field(gt=0, le=1)  # share of it that the products of a step reach
    block_us: float = Field(default=0.0, ge=0)  # of a block's forward and backward, besides them
    memory_gb: float = Field(gt=0)  # 10**9 bytes
    memory_gb_s: float = Field(gt=0)  # that the optimizer reads and writes
    copy_gb_s: float = Field(gt=0)  # to the host's memory: a checkpoint waits for it
    per_host: int = Field(ge=1)  # accelerators of a host, between which ``inside`` is the link
    inside: LinkSettings
    between: LinkSettings  # of one accelerator to another host; those of a host send at once
    # share of what may run beside products that does: gradients and gathered parameters
    overlap: float = Field(default=0.8, ge=0, le=1)


class Profile(Settings):
    """A whole profile: one TOML file with all settings of an installation."""

    name: str = "embedded"  # in messages, and in the names of Slurm's jobs
    cluster: ClusterSettings = ClusterSettings()
    services: ServiceSettings = ServiceSettings()
    storage: StorageSettings = StorageSettings()
    objects: ObjectSettings = ObjectSettings()
    hub: HubSettings = HubSettings()
    oci: OciSettings = OciSettings()
    security: SecuritySettings = SecuritySettings()
    control: ControlSettings = ControlSettings()
    store: StoreSettings = StoreSettings()
    relay: RelaySettings = RelaySettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    jobs: QueueSettings = QueueSettings()
    sweeps: SweepSettings = SweepSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    gate: GateSettings = GateSettings()
    prices: PriceSettings = PriceSettings()
    hardware: dict[str, AcceleratorSettings] = {}  # by kind, as in prices; added to the known ones
