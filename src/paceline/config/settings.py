"""Pydantic models of a profile and its sections; all frozen, with unknown keys forbidden.

Units are in the field names (``_bytes``, ``_s``, ``_mbit``). Also here: which modules of a user's
code are allowed, and which environment variables that code may see.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_network
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# Environment variables that user code may see; all others are removed before its import.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|PWD|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS|FAULTHANDLER|UTF8)"
    r"|(OMP|MKL|KMP|OPENBLAS|GLOO|NCCL|TORCH|TORCHINDUCTOR|CUDA|NVIDIA|CUBLAS|ATEN|ONEDNN)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|PACELINE_(ATTEMPT|WORKER_ID)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_AUTH", re.IGNORECASE)


def module_allowed(module: str, sources: Sequence[str]) -> bool:
    """Return whether ``module`` is one of ``sources`` or a submodule of one."""
    return any(module == each or module.startswith(f"{each}.") for each in sources)


def scrub_variables(
    environment: MutableMapping[str, str], *, secrets_only: bool = False
) -> list[str]:
    """Remove the variables that user code does not need; return their names.

    With ``secrets_only``, remove only those whose name looks like a secret's. Libraries that were
    imported before keep what they have read.
    """
    removed = [
        name
        for name in environment
        if _SECRET.search(name) or not (secrets_only or _KEPT.fullmatch(name))
    ]
    for name in removed:
        del environment[name]
    return removed


MIB = 1024 * 1024


class DataSettings(Settings):
    """The data snapshot, and how its samples become batches."""

    source: str = "stdlib"  # the running Python's standard library, or a directory
    format: Literal["text", "jsonl", "parquet", "tar"] = "text"  # of the files in the directory
    text_field: str = "text"  # JSONL and Parquet: the column; tar: the member's extension
    features: tuple[str, ...] = ()  # Parquet files of precomputed features, joined by ``key_field``
    key_field: str = "key"
    # the features with one value per token of their sample; cut together with it
    token_features: tuple[str, ...] = ()
    missing_features: Literal["refuse", "skip"] = "refuse"  # how to treat a sample without features
    transform: str = ""  # module:function, sample → sample, on each read; "": none
    # processes per rank that run the transform: a hang (beyond transform_deadline_s) or crash loses
    # only that sample; 0 is read as 1
    transform_processes: int = Field(default=1, ge=0, le=256)
    transform_deadline_s: float = Field(default=20.0, gt=0)  # well below guard.step_deadline_s
    # or a tokenizer.json; beside it lies the chat template that renders conversations
    tokenizer: str = "bytes"
    max_tokens: int = Field(default=0, ge=0)  # longer conversations are left out; 0: no limit
    max_bytes: int = Field(default=16 * MIB, ge=1024)
    shard_bytes: int = Field(default=1 * MIB, ge=1024)
    held_out_share: float = Field(default=0.1, gt=0, lt=1)
    purpose: str = "language-model-training"
    project: str = "paceline-demo"
    # expectations of one's own: a YAML file, s3://…, or the YAML itself; "": only the built-in ones
    expectations: str = Field(default="", max_length=64 * 1024)
    # the most that a column's statistics may move since the last snapshot of the same source, as a
    # share; 0: only noted
    max_drift: float = Field(default=0.0, ge=0)
    seed: int = 0

    # windows: one stream of tokens cut every ``context``; packed: whole documents, best fit, masked
    # from each other; bucketed: documents of similar length, padded; carried: long documents cut,
    # each row continues where it stopped in the previous batch.
    batching: Literal["windows", "packed", "bucketed", "carried"] = "windows"
    # A global batch's rows are read in so many columns, each from its own shards: if the number of
    # ranks divides it, each rank opens only its share of the data. 0: chosen from the data.
    columns: int = Field(default=0, ge=0)
    cache_bytes: int = Field(default=10_000 * MIB, ge=1 * MIB)  # of shards on each node's disk
    prefetch_batches: int = Field(default=4, ge=1, le=1024)
    prefetch_shards: int = Field(default=4, ge=1, le=256)  # fetched at once
    max_bad_share: float = Field(default=0.5, ge=0, lt=1)  # of shards in quarantine


class MeshSettings(Settings):
    """How ranks share a model; ``dp`` 0: derived from the number of ranks."""

    dp: int = Field(default=0, ge=0)  # replicas
    shard: int = Field(default=1, ge=1)  # parts of parameters and optimiser in each replica
    tp: int = Field(default=1, ge=1)  # parts of each matrix
    pp: int = Field(default=1, ge=1)  # groups of layers, one after another
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int = Field(default=0, ge=0)  # per batch of a pipeline; 0: twice its stages
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"  # gradient compression
    powersgd_rank: int = Field(default=2, ge=1)
    sequence_parallel: bool = True  # where tp > 1


class SynchronySettings(Settings):
    """Whether replicas wait for each other at each step."""

    kind: Literal["every-step", "local-sgd", "parameter-server"] = "every-step"
    local_steps: int = Field(default=8, ge=1)  # between averages
    max_staleness: int = Field(default=4, ge=0)  # versions a pushed gradient may lag


class CheckpointSettings(Settings):
    """When checkpoints are written and how many are kept."""

    interval: Literal["steps", "seconds", "auto"] = "steps"
    every_steps: int = Field(default=25, ge=1)
    every_s: float = Field(default=30.0, gt=0)
    failures_per_day: float = Field(default=1.0, gt=0)  # of the gang; until some were observed
    keep: int = Field(default=2, ge=1)  # newest
    keep_best: int = Field(default=0, ge=0)  # besides these, by held-out loss
    max_stall_share: float = Field(default=0.035, gt=0, lt=1)


class GuardSettings(Settings):
    """Reactions to bad training steps, failed ranks and failed hosts."""

    on_bad_step: Literal["skip", "roll-back", "stop"] = "roll-back"  # NaN, or a spike of the loss
    spike_factor: float = Field(default=3.0, gt=1)  # times the recent median; 1e9: never
    spike_window: int = Field(default=50, ge=5)  # steps
    max_bad_steps: int = Field(default=3, ge=0)  # skipped or rolled back, in one job
    max_restarts: int = Field(default=3, ge=0)
    min_ranks: int = Field(default=0, ge=0)  # fewer than ``ranks``: continue with the rest; 0: all
    spares: int = Field(default=0, ge=0)  # standby ranks, started and kept warm
    failures_per_host: int = Field(default=2, ge=1)  # then the host is excluded
    start_deadline_s: float = Field(default=120.0, gt=0)
    step_deadline_s: float = Field(default=60.0, gt=0)
    checkpoint_deadline_s: float = Field(default=600.0, gt=0)
    # From a preemption notice to the ranks' end. Clouds and Kubernetes kill 30 s after the notice,
    # which is seen at most 2 s late; the rest is for finishing a step and ending processes.
    grace_s: float = Field(default=20.0, gt=0)
    preemption: str = ""  # besides SIGTERM: the URL of a metadata service
    node_wait_s: float = Field(default=600.0, ge=0)  # for nodes: another gang's, or all gone


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights; names and defaults are peft's."""

    r: int = Field(default=8, ge=1)  # rank
    lora_alpha: int = Field(default=8, ge=1)  # adapters are scaled by lora_alpha / r
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    # Names of linear layers; ["all-linear"]: all but the output layer; []: peft's of the family.
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    use_dora: bool = False

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class DpoSettings(Settings):
    """Direct preference optimisation: the data are pairs of answers, chosen and rejected."""

    beta: float = Field(default=0.1, gt=0)  # higher: the model stays closer to the base


Beta = Annotated[float, Field(ge=0, lt=1)]


class EarlyStoppingSettings(Settings):
    """When a training ends before its steps: its held-out loss no longer falls."""

    patience: int = Field(default=3, ge=1)  # evaluations in a row that are no new best
    min_delta: float = Field(default=0.0, ge=0)  # nats a token by which a new best is lower


class EmaSettings(Settings):
    """An exponential moving average of the trained weights, evaluated and exported instead."""

    decay: float = Field(default=0.999, gt=0, lt=1)  # of the average, at each step


Glob = Annotated[str, Field(min_length=1, max_length=512)]  # of parameters' names; * is any part


class GroupSettings(Settings):
    """Parameters with a learning rate or a weight decay of their own."""

    match: tuple[Glob, ...] = Field(min_length=1)  # names such as "*embed*"; the first group wins
    learning_rate_factor: float = Field(default=1.0, gt=0)  # times learning_rate
    weight_decay: float | None = Field(default=None, ge=0)  # None: as without the group
    optimizer: Literal["adamw"] | None = None  # with muon: adamw for matrices that it would take


class TrainingSettings(Settings):
    """The training job."""

    ranks: int = Field(default=2, ge=1)
    # Consecutive ranks on each node of a fleet; 0: one for each of its accelerators, else one.
    ranks_per_node: int = Field(default=0, ge=0)
    steps: int = Field(default=120, ge=0)
    batch_sequences: int = Field(default=16, ge=1)  # of the whole gang, per step
    accumulation: int = Field(default=1, ge=1)  # microbatches of a rank's batch, one after another
    learning_rate: float = Field(default=1e-3, gt=0)
    # muon: of the matrices of hidden layers, on whole replicas; AdamW for all other parameters
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW's two moments
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0)
    decay_share: float = Field(default=0.2, gt=0, le=1)  # of the steps, at the end of wsd
    final_share: float = Field(default=0.1, ge=0, le=1)  # of the learning rate, at the last step
    weight_decay: float = Field(default=0.1, ge=0)  # of matrices, by AdamW
    no_decay: tuple[Glob, ...] = ()  # names without it, besides norms and biases: "*embed*"
    groups: Annotated[tuple[GroupSettings, ...], Field(max_length=64)] = ()
    clip_norm: float = Field(default=1.0, gt=0)
    ema: EmaSettings | None = None  # None: the weights of the last step are exported
    precision: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the products
    # Of the weights that are exported; "base": the base's.
    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    activation_checkpointing: bool = False
    compile: bool = False
    # Only kernels that give the same bits each time; None: on a CPU, where they cost nothing.
    deterministic: bool | None = None
    evaluate_every_steps: int = Field(default=0, ge=0)  # 0: never
    evaluate_sequences: int = Field(default=64, ge=1)
    early_stopping: EarlyStoppingSettings | None = None  # with evaluate_every_steps
    profile_steps: tuple[int, ...] = ()  # steps of which a profiler trace is written
    threads_per_rank: int = Field(default=1, ge=1)
    seed: int = 0
    code_ref: str = ""  # "": our transformer; else module:function, or git+https://…@COMMIT#m:f
    lora: LoraSettings | None = None  # None: all weights are trained
    dpo: DpoSettings | None = None  # None: next-token prediction, or what code_ref defines
    mesh: MeshSettings = MeshSettings()
    synchrony: SynchronySettings = SynchronySettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    guard: GuardSettings = GuardSettings()

    @model_validator(mode="after")
    def _early_stopping_has_evaluations(self) -> TrainingSettings:
        if self.early_stopping is not None:
            if not self.evaluate_every_steps:
                raise ValueError("early_stopping needs evaluate_every_steps")
            if self.synchrony.kind == "parameter-server":
                raise ValueError("a parameter server has no early_stopping")
        return self

    @model_validator(mode="after")
    def _ema_has_one_set_of_weights(self) -> TrainingSettings:
        if self.ema is not None and self.synchrony.kind != "every-step":
            raise ValueError(f"ema needs synchrony every-step, not {self.synchrony.kind}")
        return self

    @model_validator(mode="after")
    def _groups_fit_the_optimizer(self) -> TrainingSettings:
        decays = any(each.weight_decay for each in self.groups)
        if self.optimizer == "sgd" and (self.no_decay or decays):
            raise ValueError("sgd has no weight decay: no_decay and groups cannot change it")
        if self.optimizer != "muon" and any(each.optimizer for each in self.groups):
            raise ValueError("groups have an optimizer of their own beside muon only")
        return self


class HostSettings(Settings):
    """A machine on which `paceline cluster` starts a worker over SSH."""

    ssh: Annotated[str, StringConstraints(pattern=r"^[^-\s]\S*$")]  # as ssh takes it: [USER@]HOST
    worker_id: str
    rack: str = ""
    zone: str = ""
    state: str = "paceline-state"  # its state directory, from its user's home
    program: str = "paceline"  # where its PATH does not have it: the path


class SlurmSettings(Settings):
    """The allocation that `paceline cluster` asks Slurm for; "" leaves a choice to Slurm."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time_limit: str = ""  # as sbatch takes it: 2-00:00:00
    # More of sbatch's options, such as "--gpus-per-node=8".
    options: tuple[Annotated[str, StringConstraints(pattern=r"^--[a-z]")], ...] = ()
    state: str = "paceline-state"  # the nodes' state directory, from the user's home there
    program: str = "paceline"  # where the PATH of the control host does not lead to it: the path


def _matching(pattern: str, wanted: str) -> Any:
    """Return a validator of strings that match all of ``pattern``; others are no ``wanted``."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(wanted)
        return value

    return AfterValidator(check)


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DnsLabel = Annotated[
    str, _matching(_LABEL, "a DNS label: at most 63 of a-z, 0-9 and -, no - at its ends")
]
DnsName = Annotated[
    str, _matching(rf"{_LABEL}(\.{_LABEL})*", "a Kubernetes name: a-z, 0-9, - and . inside")
]
Image = Annotated[
    str, _matching(r"([a-z0-9][^\s]*)?", "an image such as registry.example/paceline:0.1.0")
]
Quantity = Annotated[
    str,
    Field(coerce_numbers_to_str=True),
    _matching(
        r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?", "a Kubernetes quantity such as 64Gi or 500m"
    ),
]
LabelKey = Annotated[
    str,
    _matching(
        r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
        "a Kubernetes key such as nvidia.com/gpu",
    ),
]


class KubernetesSettings(Settings):
    """What `paceline cluster --render` fills into the manifests of deployments/kubernetes."""

    namespace: DnsLabel = "paceline"
    image: Image = ""  # of workers, scheduler, Prefect worker; required by kind = "kubernetes"
    agent_image: Image = ""  # "": image
    coordinator_image: Image = ""  # "": image
    node_selector: dict[LabelKey, str] = {"paceline.dev/training": "true"}  # nodes with a worker
    # Of each worker, such as {cpu = "16", memory = "200Gi", "nvidia.com/gpu" = 8}.
    resources: dict[LabelKey, Quantity] = {"cpu": "1", "memory": "4Gi"}
    service_account: DnsName = "default"  # of what reads from S3: a role may be bound to it
    # Secrets: Dask's TLS files, a join token for each node, and credentials for S3.
    dask_tls_secret: DnsName = "paceline-dask-tls"  # noqa: S105 (a Secret's name)
    join_secret: DnsName = "paceline-join"  # noqa: S105
    objects_secret: DnsName = "paceline-objects"  # noqa: S105
    ca_config_map: DnsName = "paceline-coordinator-ca"
    node_network: str = "10.0.0.0/8"  # of the nodes, as policies name it

    @field_validator("node_network")
    @classmethod
    def _is_network(cls, value: str) -> str:
        try:
            return str(ip_network(value))
        except ValueError as error:
            raise ValueError("a network such as 10.0.0.0/8") from error


class ClusterSettings(Settings):
    """The machines: where Dask's scheduler is; and of ``local`` number, racks, links, memory."""

    # local: `paceline up` starts the nodes below on this machine; address: workers that their own
    # operators start register with the Dask scheduler at ``scheduler``; ssh: `paceline cluster`
    # starts that scheduler and a worker on each of ``hosts``; slurm: it does so on each node of one
    # allocation of ``nodes`` whole nodes; kubernetes: Dask's operator starts the scheduler and a
    # worker on each of ``nodes`` nodes, by what `paceline cluster --render` prints.
    kind: Literal["local", "address", "ssh", "slurm", "kubernetes"] = "local"
    scheduler: Annotated[str, StringConstraints(pattern=r"^(tls://[^/]+:[0-9]+)?$")] = ""
    hosts: tuple[HostSettings, ...] = ()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    nodes: int = Field(default=4, ge=1, le=10_000)
    racks: int = Field(default=2, ge=1)
    threads_per_node: int = Field(default=2, ge=1)
    link_mbit: float = Field(default=80.0, gt=0)  # each agent's NIC, each direction
    paced: bool = False  # agents limit themselves to link_mbit; false: the NICs are the limit
    external_mbit: float | None = Field(default=None, gt=0)  # the origin's link; None: link_mbit
    oversubscription: float = Field(default=1.0, ge=1)  # of each rack's uplink
    node_memory_mb: int = Field(default=0, ge=0)  # 0: no limit


class ServiceSettings(Settings):
    """Where the servers listen; port 0: that of the last start, a usual one (7400 …), or any."""

    host: str = "127.0.0.1"
    prefect_port: int = Field(default=0, ge=0, le=65535)
    mlflow_port: int = Field(default=0, ge=0, le=65535)
    s3_port: int = Field(default=0, ge=0, le=65535)
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    scheduler_port: int = Field(default=0, ge=0, le=65535)
    ready_timeout_s: float = Field(default=120.0, gt=0)


class StorageSettings(Settings):
    """Bucket and prefixes in the object store."""

    bucket: str = "paceline"
    model_prefix: str = "models"
    data_prefix: str = "data"
    checkpoint_prefix: str = "checkpoints"


class ObjectSettings(Settings):
    """The S3 server of an installation that does not run its own.

    Credentials never stand here: every process takes them from boto3's default chain on its own
    machine (environment, shared files, web identity, instance role), and so does what is left
    empty here.
    """

    endpoint_url: str = ""  # "": what AWS's variables and files say, else Amazon's
    region: str = ""
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
    # Allowed sources of `training.code_ref`: a module (with submodules), an absolute directory
    # (with everything below), or a prefix of an https:// or file:// URL that ends in "/".
    code_sources: tuple[str, ...] = ("paceline.training.recurrent",)
    # Between workers. auto: mutual TLS if the three files below are set, else plain, which listens
    # on loopback only; mtls: always; plaintext-anywhere: plain on any network, readable by all.
    peer_tls: Literal["auto", "mtls", "plaintext-anywhere"] = "auto"
    peer_ca: str = ""  # PEM files, relative to the state directory; {worker_id} is replaced
    peer_cert: str = ""
    peer_key: str = ""
    # The coordinator's own port. off: plain, which listens on loopback only; installation: TLS with
    # a certificate of the authority below; files: TLS with rest_cert and rest_key;
    # plaintext-anywhere: tokens cross the network unencrypted.
    rest_tls: Literal["off", "installation", "files", "plaintext-anywhere"] = "off"
    rest_cert: str = ""  # PEM files, relative to the state directory
    rest_key: str = ""
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
    flow_starter: Literal["off", "prefect"] = "off"

    coordination: Literal["sqlite", "etcd"] = "sqlite"
    etcd_endpoints: tuple[str, ...] = ()  # "http://HOST:PORT" or "https://HOST:PORT"
    etcd_prefix: str = "/paceline/default"  # unique per installation
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
    """How models are distributed between workers."""

    topology: Literal["auto", "direct", "chain", "tree", "tree-of-chains", "mesh"] = "auto"
    transport: Literal["tcp", "grpc"] = "tcp"  # the same on every worker; tcp uses less CPU
    piece_bytes: int = Field(default=0, ge=0, le=16 * MIB)  # 0: from the model's size
    chunk_bytes: int = Field(default=0, ge=0)  # 0: from the model's size and the link
    max_failed: float = Field(default=0.05, ge=0, le=1)
    beat_s: float = Field(default=0.5, gt=0)
    lost_after_beats: int = Field(default=6, ge=2)
    deadline_s: float = Field(default=600.0, gt=0)  # for one whole deployment
    full_sha256: bool = False  # check SHA-256 of files and chunks before a version is visible


class ModelSettings(Settings):
    """The model that a lifecycle starts from.

    ``base``: MODEL_ID/VERSION as published, hf://…, oci://…, or a directory (``./``: beside the
    profile's file); "": a new byte-level transformer whose shape is derived from ``parameters``,
    trained for ``base_steps``.
    """

    model_id: str = "bytelm"
    base: str = ""
    parameters: int = Field(default=2_000_000, ge=10_000)
    context: int = Field(default=256, ge=16)
    base_steps: int = Field(default=60, ge=0)
    seed: int = 0


class EvaluationSettings(Settings):
    """How a candidate is evaluated."""

    held_out_bytes: int = Field(default=262_144, ge=1024)
    # From here on all nodes score a part of the documents; below, starting them takes longer.
    spread_from_bytes: int = Field(default=8_388_608, ge=1024)
    bootstrap_samples: int = Field(default=1000, ge=100)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    ngram_order: int = Field(default=5, ge=1, le=8)
    # Tasks of lm-eval's, scored beside the held-out text: a directory on the machine of the flows
    # (``./``: beside the profile's file), or what was published of one, s3://…
    tasks: str = ""
    seed: int = 0


# "directory" (each of the report's slices by directory), or one of them: "directory: src"
SliceName = Annotated[str, StringConstraints(pattern=r"^(size|directory)(: .+)?$")]


class Policy(Settings):
    """Conditions for promoting a candidate; missing evidence is a refusal."""

    max_bits_per_byte: float = Field(default=8.0, gt=0)
    must_beat: tuple[str, ...] = ("base",)  # names of evaluated models the interval must clear
    # Every simple baseline must be beaten too, except these.
    except_baselines: tuple[Literal["ngram", "gzip", "xz"], ...] = ()
    # Snapshots whose held-out split may judge, by URL, by what their URLs begin with, or by digest;
    # (): any that the candidate's submitter may use.
    judged_on: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    min_documents: int = Field(default=5, ge=5)  # with fewer, all agree by chance: 2**-5 = 3.1 %
    # Against the champion, as shares of its bits per byte: the interval's upper end, and the
    # figure of a slice (without a champion: the base's).
    max_regression: float = Field(default=0.01, ge=0, lt=1)
    max_slice_regression: dict[SliceName, Annotated[float, Field(ge=0)]] = {}
    # Share of the held-out documents of which half the text or more may lie in the training data;
    # a copy of one always refuses.
    max_overlap: float = Field(default=0.05, ge=0, le=1)
    # Of the evaluation's tasks: "TASK/METRIC" → what the lower end of its interval must reach, and
    # by how much the candidate may be worse than the champion, or the base, on any of them.
    min_tasks: dict[str, float] = {}
    max_task_regression: float = Field(default=0.0, ge=0)
    # Of the model's own tokens: how often the most likely one is right, and how far from that the
    # model's own certainty is (expected calibration error).
    min_token_accuracy: float | None = Field(default=None, ge=0, le=1)
    max_calibration_error: float | None = Field(default=None, gt=0, le=1)
    max_model_bytes: int = Field(default=2_000_000_000, gt=0)
    # Of one row of the context's length, on the node that judges: a forward pass, one more token,
    # and the whole process's peak.
    max_latency_ms: float = Field(default=1000.0, gt=0)
    max_latency_ms_per_token: float | None = Field(default=None, gt=0)
    max_memory_bytes: int | None = Field(default=None, gt=0)
    max_parameters: int | None = Field(default=None, gt=0)
    min_context: int | None = Field(default=None, gt=0)  # tokens that the model was made for
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    # Who must approve, by a token of scope approve: no one; any; one who did not submit it.
    approval: Literal["none", "anyone", "four-eyes"] = "none"
    approval_hours: float = Field(default=72.0, gt=0, le=720)  # then the promotion is off


class GateSettings(Policy):
    """The policy of every model, and of those that have one of their own."""

    models: dict[str, Policy] = {}  # by model id; what one leaves out is as in [gate]

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
        """Return the policy of ``model_id``."""
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
    password_env: str = "PACELINE_SWEEPS_PASSWORD"  # noqa: S105 (a variable's name)


Price = Annotated[float, Field(ge=0)]


class PriceSettings(Settings):
    """What machines, energy and storage cost; what is left empty is unknown, never counted as 0.

    A kind is the one that a node reports, such as "NVIDIA H100 80GB HBM3", or whole words of it
    ("H100"; of several the longest counts). "cpu" is a node without accelerators.
    """

    currency: str = Field(default="EUR", min_length=1, max_length=12)
    per_hour: dict[str, Price] = {}  # of one accelerator, by kind; its share of the node included
    spot_factor: float = Field(default=1.0, gt=0, le=1)  # of these prices, on a fleet of spot nodes
    watts: dict[str, Price] = {}  # of one accelerator with its share of the node, by kind
    per_kwh: Price | None = None  # besides the prices per hour: leave it out where they include it
    per_gb_egress: Price | None = None  # of 10**9 bytes that leave the object store
    per_gb_month: Price | None = None  # of 10**9 bytes stored there


class Profile(Settings):
    """A whole profile: one TOML file with all settings of an installation."""

    name: str = "embedded"
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
