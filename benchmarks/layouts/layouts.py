"""The layouts that are compared, and what one of them learns on the ranks that joined.

All train the same tiny transformer on the same packed batches, from the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from paceline.config import MeshSettings, TrainingSettings
from paceline.data import Batch
from paceline.models import ModelConfig
from paceline.training.loop import Inputs, TransformerWorkload
from paceline.training.parallel import MeshSpec, Parallel, open_mesh, parallelise
from paceline.training.strategies import LocalSgd
from paceline.training.strategies.local_sgd import local_sgd

CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=24,
)
UNTIED = CONFIG.model_copy(update={"tie_word_embeddings": False, "num_key_value_heads": 4})
ROWS, TOKENS, RATE, CLIP = 8, 24, 3e-3, 0.5
UNCLIPPED = 1e9
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """One way to share the work."""

    name: str
    mesh: MeshSettings = field(default_factory=lambda: MeshSettings(dp=1))
    accumulation: int = 1
    recompute: bool = False
    config: ModelConfig = CONFIG
    optimizer: str = "adamw"
    local: bool = False  # local SGD with one local step
    clip: float = CLIP

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        mesh = self.mesh
        return mesh.dp * mesh.ranks_per_replica

    @property
    def single(self) -> str:
        """The name of the run in one process that it must equal."""
        return ("untied " if self.config == UNTIED else "") + (
            "single, sgd" if self.optimizer == "sgd" else "single"
        )

    def settings(self, precision: str) -> TrainingSettings:
        """The training settings of this layout."""
        return TrainingSettings(
            ranks=self.ranks,
            batch_sequences=ROWS,
            accumulation=self.accumulation,
            activation_checkpointing=self.recompute,
            precision=precision,
            mesh=self.mesh,
            synchrony={"kind": "local-sgd", "local_steps": 1} if self.local else {},
        )


def mesh(**axes: object) -> MeshSettings:
    """A mesh of one replica unless told otherwise."""
    return MeshSettings.model_validate({"dp": 1} | axes)


SINGLES = (
    Layout("single"),
    Layout("untied single", config=UNTIED),
    Layout("single, sgd", optimizer="sgd", clip=UNCLIPPED),
)
LAYOUTS = (
    Layout("dp2", mesh(dp=2)),
    Layout("shard2", mesh(shard=2)),
    Layout("tp2", mesh(tp=2)),
    Layout("pp2", mesh(pp=2)),
    Layout("dp2 x tp2", mesh(dp=2, tp=2)),
    Layout("shard2 x pp2", mesh(shard=2, pp=2)),
    Layout("dp2 x tp2 x pp2", mesh(dp=2, tp=2, pp=2)),
    Layout("dp2, sgd", mesh(dp=2), optimizer="sgd", clip=UNCLIPPED),
    # Each replica steps alone, then all average: with plain SGD, the same as averaging gradients.
    Layout("local SGD, step 1", mesh(dp=2), optimizer="sgd", clip=UNCLIPPED, local=True),
    Layout("dp3, uneven shares", mesh(dp=3)),
    Layout("dp2 x shard2", mesh(dp=2, shard=2)),
    Layout("shard2 x tp2", mesh(shard=2, tp=2)),
    Layout("tp2 x pp2", mesh(tp=2, pp=2)),
    Layout("dp2 x pp2", mesh(dp=2, pp=2)),
    Layout("shard3, uneven shares, accumulation 2", mesh(shard=3), accumulation=2),
    Layout("tp2, whole sequences", mesh(tp=2, sequence_parallel=False)),
    Layout("pp2, GPipe", mesh(pp=2, schedule="gpipe")),
    Layout("pp4, 5 microbatches of 8 rows", mesh(pp=4, microbatches=5)),
    Layout("dp2, accumulation 3", mesh(dp=2), accumulation=3),
    Layout("single, accumulation 3", accumulation=3),
    Layout("single, recomputed", recompute=True),
    Layout("shard2 x tp2, recomputed", mesh(shard=2, tp=2), recompute=True),
    Layout("cp2", mesh(cp=2)),
    Layout("dp2 x cp2, accumulation 2", mesh(dp=2, cp=2), accumulation=2),
    Layout("shard2 x cp2, recomputed", mesh(shard=2, cp=2), recompute=True),
    Layout("untied cp2 x tp2", mesh(cp=2, tp=2), config=UNTIED),
    Layout("untied tp2 x pp2", mesh(tp=2, pp=2), config=UNTIED),
)


def batch_of(step: int, share: int = 0, shares: int = 1) -> Batch:
    """One share of global batch ``step``: packed documents, some padding, learnable."""
    generator = np.random.default_rng(step)
    stream = np.cumsum(generator.integers(0, 3, (ROWS, TOKENS + 1)), axis=1) * 7 % 256
    edges = generator.integers(4, TOKENS - 4, ROWS)
    column = np.arange(TOKENS)
    documents = (column >= edges[:, None]).astype(np.int32)
    weights = np.ones((ROWS, TOKENS), np.float32)
    weights[np.arange(ROWS), edges - 1] = 0.0  # across a document's edge
    padding = column >= TOKENS - generator.integers(0, 4, ROWS)[:, None]
    weights[padding], documents[padding] = 0.0, -1
    positions = np.where(documents == 1, column - edges[:, None], column).astype(np.int32)
    rows = range(ROWS * share // shares, ROWS * (share + 1) // shares)
    part = slice(rows.start, rows.stop)
    return Batch(
        step=step,
        inputs_BT=stream[part, :-1].astype(np.uint8),
        targets_BT=stream[part, 1:].astype(np.uint8),
        weights_BT=weights[part],
        rows=rows,
        global_tokens=float(weights.sum()),
        documents_BT=documents[part],
        positions_BT=positions[part],
    )


@dataclass
class Run:
    """A layout on the ranks that joined, ready to take steps."""

    layout: Layout
    settings: TrainingSettings
    spec: MeshSpec
    workload: TransformerWorkload
    parallel: Parallel
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout, precision: str) -> Run:
        """Open the mesh and spread the model over it."""
        settings = layout.settings(precision)
        spec = MeshSpec.of(settings.mesh, layout.ranks)
        workload = TransformerWorkload(layout.config)
        spread = local_sgd if layout.local else parallelise
        parallel = spread(workload.build(), open_mesh(spec), settings, workload)
        return cls(layout, settings, spec, workload, parallel)

    def parts(self, step: int) -> list[Inputs]:
        """This rank's share of a batch, cut for accumulation."""
        batch = batch_of(step, self.parallel.data_rank, self.parallel.data_world)
        return [self.workload.inputs(each, CPU) for each in batch.split(self.layout.accumulation)]

    def gradients(self, step: int) -> float:
        """Make the gradients of ``step``, clipped, and return the mean loss over all ranks."""
        sums = self.parallel.accumulate(self.parts(step), 1.0 / batch_of(step).global_tokens)
        self.norms.append(self.parallel.clip(self.layout.clip))
        return self.mean(float(sums.loss), sums.weight)

    def mean(self, loss: float, weight: float) -> float:
        """The mean loss over all ranks."""
        both = torch.tensor([loss, weight], dtype=torch.float64)
        if self.spec.world_size > 1:
            dist.all_reduce(both)
        return float(both[0] / both[1])

    def train(self, steps: int) -> list[float]:
        """Take ``steps`` steps and return the mean loss of each."""
        parameters = [each for part in self.parallel.modules for each in part.parameters()]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95))
        if self.layout.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=0.3)
        if isinstance(self.parallel, LocalSgd):
            self.parallel.follow(optimizer, 0)
        found = []
        for step in range(steps):
            found.append(self.gradients(step))
            optimizer.step()
        return found
