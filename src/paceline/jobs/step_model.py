"""The time of one training step and the memory of a rank, from a model's sizes and a mesh.

Arithmetic over the accelerator's rate, collectives of each axis over its links (``collectives``),
the pipeline's bubble, the optimizer over the memory's bandwidth, and what a checkpoint stalls. It
counts what ``training.parallel`` does: gradients in buckets (DDP), parameters gathered and
gradients scattered block by block (FSDP2), two sums of activations a block and pass (tensor
parallelism), heads exchanged before and after attention (context parallelism), microbatches that
are padded to equal rows. It does not know waiting for data, failures, stragglers, links shared with
others, nor kernels that are slow for small shapes. Pure; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from paceline.config import AcceleratorSettings, TrainingSettings
from paceline.errors import InvalidInput
from paceline.jobs.collectives import GB, US, RankGroup
from paceline.models import ModelShape
from paceline.training import FailureCount, SaveCosts, wanted_interval_s, wanted_steps
from paceline.training.parallel import AXES, MeshSpec, layers_of, microbatches_of

BUCKET_BYTES = 4 * 2**20  # of replicas' gradients (``data_parallel.BUCKET_MB``)
BACKWARD_SHARE = 2 / 3  # of a forward and backward pass
SYNCS = 3  # all-reduces of a few numbers a step: norm, loss and flags, rows or loss of cut logits
# Bytes that an update reads and writes of one parameter: AdamW reads weight, gradient and two
# moments and writes all but the gradient; SGD has no moments. In units of a weight.
UPDATE = {"adamw": 7, "muon": 7, "sgd": 3}


@dataclass(frozen=True)
class StepModel:
    """One training step of ``shape`` on ``spec``'s ranks; times in seconds, sizes in bytes."""

    shape: ModelShape
    spec: MeshSpec
    settings: TrainingSettings
    context: int  # tokens of a row
    accelerator: AcceleratorSettings

    def __post_init__(self) -> None:
        """Raise InvalidInput for trainings whose step is another."""
        settings = self.settings
        kinds = {"training.lora": settings.lora, "training.dpo": settings.dpo}
        odd = [name for name, each in kinds.items() if each is not None]
        if settings.synchrony.kind != "every-step":
            odd.append(f"training.synchrony.kind {settings.synchrony.kind}")
        if odd:
            raise InvalidInput(
                "the model of a step is of whole weights that all ranks update at each step",
                got=", ".join(odd),
                wanted="none of these",
            )

    @cached_property
    def groups(self) -> dict[str, RankGroup]:
        """Return the ranks along each axis, and those that share weights."""
        axes = (*AXES, "weights")
        return {axis: RankGroup.along(axis, self.spec, self.accelerator) for axis in axes}

    # What a rank has

    @property
    def passes(self) -> int:
        """Return the forward and backward passes of a rank in one step."""
        pipelined = microbatches_of(self.spec, self.settings) if self.spec.pp > 1 else 1
        return pipelined * self.settings.accumulation

    @property
    def pass_tokens(self) -> float:
        """Return the tokens of one pass; those of a pipeline are padded to whole rows."""
        rows = ceil(self.settings.batch_sequences / self.spec.data_world)
        each = rows / self.passes
        return (ceil(each) if self.spec.pp > 1 else each) * self.context / self.spec.cp

    @property
    def tokens(self) -> int:
        """Return the tokens of a step of the whole gang."""
        return self.settings.batch_sequences * self.context

    @cached_property
    def stages(self) -> list[tuple[int, bool, bool]]:
        """Return each stage's blocks, and whether it has the embedding and the output layer."""
        last = self.spec.pp - 1
        return [
            (len(layers_of(stage, self.spec.pp, self.shape.layers)), stage == 0, stage == last)
            for stage in range(self.spec.pp)
        ]

    def held(self, stage: tuple[int, bool, bool]) -> tuple[float, float]:
        """Return the weights of ``stage`` that the shards of one ``tp`` rank make up together: in
        one block, and besides the blocks."""
        _, first, last = stage
        tables = max(first + last, 1) if not self.shape.tied else 1
        ends = tables * self.shape.embedding if first or last else 0
        return self.shape.block / self.spec.tp, ends / self.spec.tp

    @cached_property
    def most_held(self) -> float:
        """Return the weights of the largest stage that one ``tp`` rank's shards make up."""
        return max(stage[0] * self.held(stage)[0] + self.held(stage)[1] for stage in self.stages)

    @property
    def item(self) -> int:
        """Return the bytes of a number in products and activations."""
        return {"float64": 8, "float32": 4}.get(self.settings.precision, 2)

    @property
    def master(self) -> int:
        """Return the bytes of a stored weight, a gradient and a moment."""
        return max(4, self.item)

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 holds the parameters (also as replicas of cut models)."""
        spec = self.spec
        return spec.weight_shards > 1 or (spec.dp > 1 and spec.tp * spec.pp > 1)

    # Seconds of a step

    @property
    def peak(self) -> float:
        """Return the accelerator's peak in FLOP/s; raises InvalidInput for a precision without."""
        table, precision = self.accelerator.tflops, self.settings.precision
        found = table.get(precision)
        if found is None and precision == "float16":
            found = table.get("bfloat16")
        if found is None:
            raise InvalidInput(
                "the accelerator's peak in this precision is not known",
                got=f"training.precision {precision}",
                wanted=f"one of {', '.join(table)}",
                do="Add it to hardware.KIND.tflops in the profile, or change the precision.",
            )
        return found * 1e12

    @property
    def rate(self) -> float:
        """Return the FLOP/s that a step's products reach."""
        return self.peak * self.accelerator.achieved

    @cached_property
    def pass_s(self) -> float:
        """Return the arithmetic of one pass through the slowest stage."""
        block = self.shape.block_flops(self.context)
        forwards = 4 if self.settings.activation_checkpointing else 3
        work = max(
            stage[0] * forwards * block + stage[2] * 3 * self.shape.output_flops
            for stage in self.stages
        )
        blocks = max(stage[0] for stage in self.stages)
        return (
            self.pass_tokens * work / self.spec.tp / self.rate
            + blocks * self.accelerator.block_us * US
        )

    @cached_property
    def pass_sums_s(self) -> float:
        """Return the sums of activations of one pass that cut matrices need; nothing hides them."""
        group, blocks = self.groups["tp"], max(stage[0] for stage in self.stages)
        recomputed = 2 if self.settings.activation_checkpointing else 0
        sums = blocks * (4 + recomputed) + 2  # and the embedding, and the output layer
        return sums * group.all_reduce(self._activations)

    @cached_property
    def pass_exchanges_s(self) -> float:
        """Return the exchanges of heads of one pass that parts of rows need; nothing hides them."""
        shape = self.shape
        heads = (shape.heads, shape.heads, shape.kv_heads, shape.kv_heads)  # with the result's
        passes = 3 if self.settings.activation_checkpointing else 2
        size = self.pass_tokens * shape.head_size / self.spec.tp * self.item
        each = sum(self.groups["cp"].all_to_all(count * size) for count in heads)
        return shape.layers * passes * each

    @property
    def _activations(self) -> float:
        return self.pass_tokens * self.shape.width * self.item

    @cached_property
    def pass_sends_s(self) -> float:
        """Return the transfers of one pass between two stages, there and back."""
        return 2 * self.groups["pp"].send(self._activations)

    @cached_property
    def exchange_s(self) -> float:
        """Return the collectives of parameters and gradients that run beside the passes."""
        if self.is_sharded:
            return max(self._sharded_s(stage) for stage in self.stages)
        size = self.most_held * (2 if self.settings.mesh.hook in ("fp16", "bf16") else self.master)
        full, rest = divmod(size, BUCKET_BYTES)
        sums = self.groups["dp"].all_reduce
        return full * sums(BUCKET_BYTES) + sums(rest)

    def _sharded_s(self, stage: tuple[int, bool, bool]) -> float:
        """Blocks are gathered before each pass and again before its backward pass, unless they stay
        whole until then: those of a pipeline, and the rest of the model."""
        group, replicas = self.groups["weights"], self.groups["dp"]
        block, rest = self.held(stage)
        gathers = 1 if self.spec.pp > 1 else self.passes + 1
        seconds = 0.0
        for units, weights, times in ((stage[0], block, gathers), (1, rest, 1)):
            gathered = times * group.all_gather(weights * self.item)
            scattered = group.all_gather(weights * self.master)
            summed = replicas.all_reduce(weights * self.master / self.spec.weight_shards)
            seconds += units * (gathered + scattered + summed)
        return seconds

    @cached_property
    def exposed_s(self) -> float:
        """Return the part of ``exchange_s`` for which products wait."""
        whole = self.spec.weight_shards > 1 and self.spec.pp == 1  # also beside forward passes
        window = self.passes * self.pass_s if whole else BACKWARD_SHARE * self.pass_s
        return self.exchange_s - min(self.accelerator.overlap * self.exchange_s, window)

    @cached_property
    def update_s(self) -> float:
        """Return the optimizer's step over this rank's part, and the step's small all-reduces."""
        held = self.most_held / self.spec.weight_shards
        size = held * self.master * UPDATE[self.settings.optimizer]
        world = RankGroup.of(self.spec.world_size, 1, self.accelerator)
        return size / (self.accelerator.memory_gb_s * GB) + SYNCS * world.all_reduce(64)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step by what they are spent on."""
        spec, slot = self.spec, self.pass_s + self.pass_sums_s + self.pass_sends_s
        ends = self.shape.embedding / (spec.tp * spec.shard) * self.master
        tied = self.groups["pp"].send(ends) if self.shape.tied else 0.0
        return {
            "products": self.passes * self.pass_s,
            "bubble": (spec.pp - 1) * slot,
            "tensor": self.passes * self.pass_sums_s,
            "context": self.passes * self.pass_exchanges_s,
            "pipeline": self.passes * self.pass_sends_s + tied,
            "data": self.exposed_s,
            "optimizer": self.update_s,
        }

    @property
    def step_s(self) -> float:
        """Return the seconds of a step without checkpoints."""
        return sum(self.seconds.values())

    @property
    def efficiency(self) -> float:
        """Return the share of the step that the whole batch's arithmetic alone would take."""
        work = self.tokens * self.shape.flops_per_token(self.context)
        return work / (self.spec.world_size * self.rate) / self.step_s

    @property
    def mfu(self) -> float:
        """Return the model's FLOPs a second over the accelerators' peak."""
        return self.efficiency * self.accelerator.achieved

    @cached_property
    def checkpoint_share(self) -> float:
        """Return the share of the time in which checkpoints stop the steps.

        Steps wait while weights and moments are copied to the host's memory; the write runs beside
        them and is not counted.
        """
        copied = self.memory["parameters"] + self.memory["optimizer"]
        stall_s = copied / (self.accelerator.copy_gb_s * GB)
        chosen = self.settings.checkpoints
        costs = SaveCosts(step_s=self.step_s, stall_s=stall_s, write_s=0.0)
        if chosen.interval == "steps":
            every_s = wanted_steps(chosen, costs) * self.step_s
        else:
            every_s = max(wanted_interval_s(chosen, costs, FailureCount()), self.step_s)
        return stall_s / (every_s + stall_s)

    # Bytes of a rank

    @cached_property
    def memory(self) -> dict[str, float]:
        """Return the bytes of the rank that needs most, by what they hold.

        What the allocator, kernels and communication libraries keep beside it is not counted.
        """
        stage = max(range(self.spec.pp), key=lambda at: sum(self._memory_of(at).values()))
        return self._memory_of(stage)

    def _memory_of(self, at: int) -> dict[str, float]:
        stage, settings = self.stages[at], self.settings
        blocks, _, is_last = stage
        block, rest = self.held(stage)
        own = (blocks * block + rest) / self.spec.weight_shards * self.master
        in_flight = self.passes if settings.mesh.schedule == "gpipe" else self.spec.pp - at
        kept = self._block_activations()
        layers = blocks * kept
        if settings.activation_checkpointing:
            layers = blocks * self.shape.width * self.item + kept
        tokens = self.pass_tokens
        logits = is_last * tokens * self.shape.vocabulary / self.spec.tp * (self.item + 4)
        return {
            "parameters": own,
            "gradients": own,
            "optimizer": own * (settings.state_bytes(1) / settings.weight_bytes - 1),
            "gathered": self._gathered(blocks, block, rest),
            "activations": min(in_flight, self.passes) * tokens * layers + logits,
        }

    def _gathered(self, blocks: int, block: float, rest: float) -> float:
        """Whole parameters in the products' precision, and gradients before they are scattered: one
        block's, or all where microbatches accumulate them."""
        if not self.is_sharded:  # autocast keeps a copy of each weight until the step ends
            return (blocks * block + rest) * self.item if self.item < self.master else 0.0
        whole = blocks * block + rest
        if self.spec.pp == 1 and self.settings.accumulation > 1:  # all stays whole until the last
            return whole * (self.item + self.master)
        if self.spec.pp > 1 or self.spec.weight_shards == 1:
            return whole * self.item + block * self.master
        return (2 * block + rest) * self.item + block * self.master  # the next one is prefetched

    def _block_activations(self) -> float:
        """Return the bytes of one token that a block keeps for its backward pass on a rank."""
        shape, settings = self.shape, self.settings
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        if settings.compile:  # elementwise operations are computed again
            whole, cut = 2 * shape.width, 2 * queries + 2 * keys + 2 * shape.feed_forward
        else:
            whole, cut = 4 * shape.width, 3 * queries + 3 * keys + 4 * shape.feed_forward
        if settings.mesh.sequence_parallel:
            whole, cut = 0, whole + cut
        return (whole + cut / self.spec.tp) * self.item
