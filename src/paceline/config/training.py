"""Sections of a profile about data and training: ``[data]``, ``[training]`` and below."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from paceline.config.base import MIB, Settings

Column = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^/=:]+$")]


class DataSettings(Settings):
    """The data snapshot, and how its samples become batches."""

    source: str = "stdlib"  # the running Python's standard library, or a directory
    format: Literal["text", "jsonl", "parquet", "tar"] = "text"  # of the files in the directory
    text_field: str = "text"  # JSONL and Parquet: the column; tar: the member's extension
    features: tuple[str, ...] = ()  # Parquet files of precomputed features, joined by ``key_field``
    key_field: str = "key"  # the column, in samples and features, by which they are joined
    # JSONL and Parquet: the column whose values are slices, for which an evaluation has figures and
    # a gate has limits: a sample's name is VALUE/KEY then, its slice "directory: VALUE"
    slice_field: str = ""
    # or several of them: a sample's name is COLUMN=VALUE/…/KEY, its slices "COLUMN: VALUE"
    slice_fields: tuple[Column, ...] = Field(default=(), max_length=8, exclude_if=lambda x: not x)
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
    # of text that a snapshot takes; the rest of the source is left out; None: all, and of the
    # standard library 16 MiB
    max_bytes: int | None = Field(default=None, ge=1024)
    shard_bytes: int = Field(default=1 * MIB, ge=1024)  # of one shard, before it is compressed
    # of samples that no training reads: evaluations judge on them
    held_out_share: float = Field(default=0.1, gt=0, lt=1)
    # what the data are used for; a snapshot admits the purposes on its label
    purpose: str = "language-model-training"
    project: str = "paceline-demo"  # whose data these are; snapshots may be limited to some
    # expectations of one's own: a YAML file, s3://…, or the YAML itself; "": only the built-in ones
    expectations: str = Field(default="", max_length=64 * 1024)
    # the most that a column's statistics may move since the last snapshot of the same source, as a
    # share; 0: only noted
    max_drift: float = Field(default=0.0, ge=0)
    seed: int = 0  # of the split into held-out and training samples, and of their order

    # windows: one stream of tokens cut every ``context``; packed: whole documents, best fit, masked
    # from each other; bucketed: documents of similar length, padded; carried: long documents cut,
    # each row continues where it stopped in the previous batch.
    batching: Literal["windows", "packed", "bucketed", "carried"] = "windows"
    # A global batch's rows are read in so many columns, each from its own shards: if the number of
    # ranks divides it, each rank opens only its share of the data. 0: chosen from the data.
    columns: int = Field(default=0, ge=0)
    cache_bytes: int = Field(default=10_000 * MIB, ge=1 * MIB)  # of shards on each node's disk
    prefetch_batches: int = Field(default=4, ge=1, le=1024)  # made before a step asks for them
    prefetch_shards: int = Field(default=4, ge=1, le=256)  # fetched at once
    max_bad_share: float = Field(default=0.5, ge=0, lt=1)  # of shards in quarantine

    @model_validator(mode="after")
    def _slices_have_a_column(self) -> DataSettings:
        if self.slice_field and self.slice_fields:
            raise ValueError("slice_field is one column, slice_fields are several: set one of them")
        if taken := {"size", "directory"} & set(self.slice_fields):
            raise ValueError(f"slice_fields: {min(taken)} names other slices; rename the column")
        name = "slice_field" if self.slice_field else "slice_fields"
        if getattr(self, name) and (self.features or self.format not in ("jsonl", "parquet")):
            raise ValueError(
                f"{name}: a column of JSONL or Parquet, which changes the names by which "
                f"features are joined; got format {self.format}, {len(self.features)} features"
            )
        return self


class MeshSettings(Settings):
    """How ranks share a model; ``dp`` 0: derived from the number of ranks."""

    dp: int = Field(default=0, ge=0)  # replicas
    shard: int = Field(default=1, ge=1)  # parts of parameters and optimiser in each replica
    tp: int = Field(default=1, ge=1)  # parts of each matrix
    cp: int = Field(default=1, ge=1)  # parts of each row
    pp: int = Field(default=1, ge=1)  # groups of layers, one after another
    # of a pipeline; 1f1b holds fewer microbatches in memory than gpipe
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int = Field(default=0, ge=0)  # per batch of a pipeline; 0: twice its stages
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"  # gradient compression
    # with hook = "powersgd": columns that a matrix' gradient is reduced to
    powersgd_rank: int = Field(default=2, ge=1)
    sequence_parallel: bool = True  # where tp > 1

    @property
    def ranks_per_replica(self) -> int:
        """Return how many ranks share one replica of the model."""
        return self.shard * self.cp * self.tp * self.pp


class SynchronySettings(Settings):
    """Whether replicas wait for each other at each step."""

    # every-step: all gradients are averaged at each step
    kind: Literal["every-step", "local-sgd", "parameter-server"] = "every-step"
    local_steps: int = Field(default=8, ge=1)  # between averages
    max_staleness: int = Field(default=4, ge=0)  # versions a pushed gradient may lag


class CheckpointSettings(Settings):
    """When checkpoints are written and how many are kept."""

    interval: Literal["steps", "seconds", "auto"] = Field(
        default="steps",
        description="auto: from the measured cost of a save and the rate of failures.",
    )
    every_steps: int = Field(default=25, ge=1, description='With interval = "steps".')
    every_s: float = Field(default=30.0, gt=0, description='With interval = "seconds".')
    failures_per_day: float = Field(
        default=1.0, gt=0, description="Of the gang; until some were observed."
    )
    keep: int = Field(default=2, ge=1, description="Newest ones.")
    keep_best: int = Field(default=0, ge=0, description="Besides these, by held-out loss.")
    max_stall_share: float = Field(
        default=0.035,
        gt=0,
        lt=1,
        description="Of the run's time; saves that cost more become rarer, with an alert.",
    )


class GuardSettings(Settings):
    """Reactions to bad training steps, failed ranks and failed hosts."""

    on_bad_step: Literal["skip", "roll-back", "stop"] = "roll-back"  # NaN, or a spike of the loss
    spike_factor: float = Field(default=3.0, gt=1)  # times the recent median; 1e9: never
    spike_window: int = Field(default=50, ge=5)  # steps
    max_bad_steps: int = Field(default=3, ge=0)  # skipped or rolled back, in one job
    max_restarts: int = Field(default=3, ge=0)  # of the gang, within a day; one more fails the job
    min_ranks: int = Field(default=0, ge=0)  # fewer than ``ranks``: continue with the rest; 0: all
    spares: int = Field(default=0, ge=0)  # standby ranks, started and kept warm
    failures_per_host: int = Field(default=2, ge=1)  # then the host is excluded
    # Each part of a start takes this at most, the first step too; and 1 s for 100 MB of the base
    # and of the state that a node may read.
    start_deadline_s: float = Field(default=600.0, gt=0)
    # a rank whose step takes longer hangs: the gang restarts; None: 20 times the slowest of the
    # newest steps, 60 s to half an hour
    step_deadline_s: float | None = Field(default=None, gt=0)
    # A save, export or evaluation hangs that takes longer, and 1 s for 100 MB of the base or, where
    # that is more, of the state that a node writes: the gang restarts.
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
    # share of an adapter's inputs that a step leaves out
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    # Names of linear layers; ["all-linear"]: all but the output layer; []: peft's of the family.
    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    use_dora: bool = False  # also train the length of each weight vector (DoRA)

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


EXPORT_FILE_BYTES = 5_000_000_000
MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}  # that an optimiser keeps of each weight, at least


class TrainingSettings(Settings):
    """The training job."""

    ranks: int = Field(default=2, ge=1)  # processes that train together
    # Consecutive ranks on each node of a fleet; 0: one for each of its accelerators, else one.
    ranks_per_node: int = Field(default=0, ge=0)
    steps: int = Field(default=120, ge=0)  # of the optimizer
    batch_sequences: int = Field(default=16, ge=1)  # of the whole gang, per step
    accumulation: int = Field(default=1, ge=1)  # microbatches of a rank's batch, one after another
    learning_rate: float = Field(default=1e-3, gt=0)  # the highest, after warm-up
    # muon: of the matrices of hidden layers; AdamW for all other parameters
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    optimizer_ref: str = ""  # instead of it, one of your own: a reference as code_ref's
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW's two moments
    # of the learning rate, after warm-up; wsd: constant, then decay_share of descent
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0)  # in which the learning rate rises from 0
    decay_share: float = Field(default=0.2, gt=0, le=1)  # of the steps, at the end of wsd
    final_share: float = Field(default=0.1, ge=0, le=1)  # of the learning rate, at the last step
    weight_decay: float = Field(default=0.1, ge=0)  # of matrices, by AdamW
    no_decay: tuple[Glob, ...] = ()  # names without it, besides norms and biases: "*embed*"
    # parameters with settings of their own
    groups: Annotated[tuple[GroupSettings, ...], Field(max_length=64)] = ()
    # longer gradients, all parameters' together, are scaled down to it
    clip_norm: float = Field(default=1.0, gt=0)
    ema: EmaSettings | None = None  # None: the weights of the last step are exported
    precision: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the products
    # Of the weights that are exported; "base": the base's.
    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    # Of each safetensors file of an export, at most; a larger tensor has its own file.
    export_file_bytes: int = Field(
        default=EXPORT_FILE_BYTES,
        ge=1024,
        exclude_if=lambda size: size == EXPORT_FILE_BYTES,  # runs of before keep their digests
    )
    # Also a torch.export program (model.pt2), checked against the model; refused for code_ref.
    export_program: bool = False
    activation_checkpointing: bool = False  # compute activations twice instead of storing them
    compile: bool = False  # each block by torch.compile, in the first step
    # Only kernels that give the same bits each time; None: on a CPU, where they cost nothing.
    deterministic: bool | None = None
    evaluate_every_steps: int = Field(default=0, ge=0)  # 0: never
    # held-out rows that each of these evaluations reads
    evaluate_sequences: int = Field(default=64, ge=1)
    early_stopping: EarlyStoppingSettings | None = None  # with evaluate_every_steps
    profile_steps: tuple[int, ...] = ()  # steps of which a profiler trace is written
    threads_per_rank: int = Field(default=1, ge=1)  # of torch, on CPUs
    seed: int = 0  # of the order of data, dropout and new weights
    code_ref: str = ""  # "": our transformer; else module:function, or git+https://…@COMMIT#m:f
    lora: LoraSettings | None = None  # None: all weights are trained
    dpo: DpoSettings | None = None  # None: next-token prediction, or what code_ref defines
    mesh: MeshSettings = MeshSettings()
    synchrony: SynchronySettings = SynchronySettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    guard: GuardSettings = GuardSettings()

    def state_bytes(self, parameters: int, *, own_moments: int = MOMENTS["adamw"]) -> int:
        """Return the bytes of the state that a checkpoint holds of ``parameters`` trained weights:
        themselves, their moments and their average, in float32 whatever the base's files have.

        ``own_moments``: of ``optimizer_ref``, whose state is not known before a step.
        """
        moments = own_moments if self.optimizer_ref else MOMENTS[self.optimizer]
        return parameters * self.weight_bytes * (1 + moments + (self.ema is not None))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of one weight in a rank's memory."""
        return 8 if self.precision == "float64" else 4

    @model_validator(mode="after")
    def _early_stopping_has_evaluations(self) -> TrainingSettings:
        if self.early_stopping is not None:
            if not self.evaluate_every_steps:
                raise ValueError("early_stopping needs evaluate_every_steps")
            if self.synchrony.kind == "parameter-server":
                raise ValueError("a parameter server has no early_stopping")
        return self

    @model_validator(mode="after")
    def _program_is_of_a_known_model(self) -> TrainingSettings:
        if self.export_program and self.code_ref:
            raise ValueError("export_program is not for a module of your own (code_ref)")
        return self

    @model_validator(mode="after")
    def _ema_has_one_set_of_weights(self) -> TrainingSettings:
        if self.ema is not None and self.synchrony.kind != "every-step":
            raise ValueError(f"ema needs synchrony every-step, not {self.synchrony.kind}")
        return self

    @model_validator(mode="after")
    def _one_optimizer_in_step(self) -> TrainingSettings:
        if self.optimizer_ref and self.optimizer != "adamw":
            raise ValueError(f"optimizer_ref takes the place of optimizer, here {self.optimizer}")
        if self.optimizer_ref and self.synchrony.kind != "every-step":
            raise ValueError(f"optimizer_ref needs synchrony every-step, not {self.synchrony.kind}")
        return self

    @model_validator(mode="after")
    def _groups_fit_the_optimizer(self) -> TrainingSettings:
        decays = any(each.weight_decay for each in self.groups)
        if self.optimizer == "sgd" and (self.no_decay or decays):
            raise ValueError("sgd has no weight decay: no_decay and groups cannot change it")
        if self.optimizer != "muon" and any(each.optimizer for each in self.groups):
            raise ValueError("groups have an optimizer of their own beside muon only")
        return self
