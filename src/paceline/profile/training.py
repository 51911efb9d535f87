"""The sections about data and training: what is learned from, how, and by whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.profile.base import Settings

MIB = 1024 * 1024


class DataSettings(Settings):
    """The data snapshot, and how its samples become batches."""

    source: str = "stdlib"  # the running Python's standard library, or a directory
    format: Literal["text", "jsonl", "parquet", "tar"] = "text"  # of the files in the directory
    text_field: str = "text"  # JSONL and Parquet: the column; tar: the member's extension
    features: tuple[str, ...] = ()  # Parquet files of precomputed features, joined by ``key_field``
    key_field: str = "key"
    # of all features, those with one value for each token of their sample: cut where it is cut
    token_features: tuple[str, ...] = ()
    missing_features: Literal["refuse", "skip"] = "refuse"  # what a sample without them does
    transform: str = ""  # module:function, sample → sample, on each read; "": none
    # it runs in so many processes of each rank, at most so long for a sample, and whatever it does
    # costs that sample; 0: on a thread of the rank, where one that hangs or crashes stops the job
    transform_processes: int = Field(default=1, ge=0, le=256)
    transform_deadline_s: float = Field(default=20.0, gt=0)  # well below guard.step_deadline_s
    tokenizer: str = "bytes"  # or a tokenizer.json
    max_bytes: int = Field(default=16 * MIB, ge=1024)
    shard_bytes: int = Field(default=1 * MIB, ge=1024)
    held_out_share: float = Field(default=0.1, gt=0, lt=1)
    purpose: str = "language-model-training"
    project: str = "paceline-demo"
    seed: int = 0

    # windows: one stream of tokens cut every ``context``; packed: whole documents, best fit, masked
    # from each other; bucketed: documents of like length, padded; carried: long documents cut, each
    # row going on where it stopped a batch before.
    batching: Literal["windows", "packed", "bucketed", "carried"] = "windows"
    # Rows of a global batch are read in so many columns, each from shards of its own: ranks whose
    # number divides it open their share of the data only. 0: as suits the data.
    columns: int = Field(default=0, ge=0)
    cache_bytes: int = Field(default=10_000 * MIB, ge=1 * MIB)  # of shards on each node's disk
    prefetch_batches: int = Field(default=4, ge=1, le=1024)
    prefetch_shards: int = Field(default=4, ge=1, le=256)  # fetched at once
    max_bad_share: float = Field(default=0.5, ge=0, lt=1)  # of shards in quarantine


class MeshSettings(Settings):
    """How ranks share a model; 0 for ``dp``: whatever is left of the ranks."""

    dp: int = Field(default=0, ge=0)  # replicas
    shard: int = Field(default=1, ge=1)  # parts of parameters and optimiser in each replica
    tp: int = Field(default=1, ge=1)  # parts of each matrix
    pp: int = Field(default=1, ge=1)  # groups of layers, one after another
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    microbatches: int = Field(default=0, ge=0)  # of a pipeline; 0: twice its stages
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"  # how replicas send gradients
    powersgd_rank: int = Field(default=2, ge=1)
    sequence_parallel: bool = True  # where tp > 1


class SynchronySettings(Settings):
    """Whether replicas wait for each other at each step."""

    kind: Literal["every-step", "local-sgd", "parameter-server"] = "every-step"
    local_steps: int = Field(default=8, ge=1)  # between averages
    max_staleness: int = Field(default=4, ge=0)  # versions a pushed gradient may lag


class CheckpointSettings(Settings):
    """When state is saved and how much of it is kept."""

    interval: Literal["steps", "seconds", "auto"] = "steps"
    every_steps: int = Field(default=25, ge=1)
    every_s: float = Field(default=30.0, gt=0)
    failures_per_day: float = Field(default=1.0, gt=0)  # of the gang, until some were seen
    keep: int = Field(default=2, ge=1)  # newest
    keep_best: int = Field(default=0, ge=0)  # beside them, by held-out loss
    max_stall_share: float = Field(default=0.035, gt=0, lt=1)


class GuardSettings(Settings):
    """What happens when the numbers go wrong, and when a rank or its host does."""

    on_bad_step: Literal["skip", "roll-back", "stop"] = "roll-back"  # NaN, or a spike of the loss
    spike_factor: float = Field(default=3.0, gt=1)  # times the recent median; 1e9: never
    spike_window: int = Field(default=50, ge=5)  # steps
    max_bad_steps: int = Field(default=3, ge=0)  # skipped or rolled back, in one job
    max_restarts: int = Field(default=3, ge=0)
    min_ranks: int = Field(default=0, ge=0)  # fewer than ``ranks``: go on with what is left; 0: all
    spares: int = Field(default=0, ge=0)  # ranks started and kept warm beside the gang
    failures_per_host: int = Field(default=2, ge=1)  # then it is left out
    start_deadline_s: float = Field(default=120.0, gt=0)
    step_deadline_s: float = Field(default=60.0, gt=0)
    checkpoint_deadline_s: float = Field(default=600.0, gt=0)
    # From a preemption notice to the ranks' end. Clouds and Kubernetes kill 30 s after theirs,
    # which is seen 2 s late at worst; what is left is for a step's end and for ending processes.
    grace_s: float = Field(default=20.0, gt=0)
    # Beside SIGTERM: a metadata URL, or a reference as ``code_ref`` to what returns a watcher.
    preemption: str = ""
    node_wait_s: float = Field(default=600.0, ge=0)  # for nodes that another gang holds


class TrainingSettings(Settings):
    """The training job."""

    ranks: int = Field(default=2, ge=1)
    steps: int = Field(default=120, ge=0)
    batch_sequences: int = Field(default=16, ge=1)  # of the whole gang, a step
    accumulation: int = Field(default=1, ge=1)  # parts of a rank's batch, one after another
    learning_rate: float = Field(default=1e-3, gt=0)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0)
    decay_share: float = Field(default=0.2, gt=0, le=1)  # of the steps, at the end of wsd
    final_share: float = Field(default=0.1, ge=0, le=1)  # of the learning rate, at the last step
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    precision: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the products
    activation_checkpointing: bool = False
    compile: bool = False
    evaluate_every_steps: int = Field(default=0, ge=0)  # 0: never
    evaluate_sequences: int = Field(default=64, ge=1)
    profile_steps: tuple[int, ...] = ()  # a profiler trace of each
    threads_per_rank: int = Field(default=1, ge=1)
    seed: int = 0
    code_ref: str = ""  # "": our transformer; else module:function, or git+https://…@COMMIT#m:f
    mesh: MeshSettings = MeshSettings()
    synchrony: SynchronySettings = SynchronySettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    guard: GuardSettings = GuardSettings()
