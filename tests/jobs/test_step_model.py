"""The model of a step: closed forms by hand, what can never be, and figures that were measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings as few, strategies as st

from paceline.config import (
    AcceleratorSettings,
    CheckpointSettings,
    LinkSettings,
    LoraSettings,
    MeshSettings,
    TrainingSettings,
)
from paceline.errors import InvalidInput
from paceline.jobs import RankGroup, StepModel, accelerator_of
from paceline.models import ModelConfig, ModelShape, count_parameters, new_model
from paceline.training.parallel import MeshSpec

NEAR, FAR = LinkSettings(latency_us=1, gb_s=100), LinkSettings(latency_us=10, gb_s=10)
PLAIN = AcceleratorSettings(
    tflops={"float32": 100, "bfloat16": 200}, achieved=0.5, memory_gb=80, memory_gb_s=1000,
    copy_gb_s=50, per_host=8, inside=NEAR, between=FAR, overlap=0.0,
)  # fmt: skip
SHAPE = ModelShape(
    width=1024, layers=8, heads=16, kv_heads=4, head_size=64, feed_forward=4096, vocabulary=32_000,
    context=2048,
)  # fmt: skip
BLOCK = 1024 * (1024 + 2 * 256 + 1024) + 3 * 1024 * 4096
EMBEDDING = 32_000 * 1024


def step(accelerator: AcceleratorSettings = PLAIN, shape: ModelShape = SHAPE, rows: int = 4,
         mesh: dict[str, Any] | None = None, **changes: Any) -> StepModel:  # fmt: skip
    """A step with ``rows`` rows of 1,024 tokens for each rank."""
    axes = MeshSettings.model_validate({"dp": 1} | (mesh or {}))
    ranks = axes.dp * axes.shard * axes.cp * axes.tp * axes.pp
    given: dict[str, Any] = {"ranks": ranks, "batch_sequences": rows * ranks, "mesh": axes}
    settings = TrainingSettings.model_validate(given | changes)
    return StepModel(shape, MeshSpec.of(axes, ranks), settings, 1024, accelerator)


def test_collectives_in_a_host_are_rings_and_small_sums_are_trees() -> None:
    four = RankGroup(4, 1, NEAR, FAR)
    assert four.all_gather(4e8) == pytest.approx(3 * (1e-6 + 1e8 / 100e9))
    assert four.all_reduce(4e8) == pytest.approx(6 * (1e-6 + 1e8 / 100e9))
    assert RankGroup(8, 1, NEAR, FAR).all_reduce(8) == pytest.approx(2 * 3e-6, rel=1e-3)
    assert four.send(1e9) == pytest.approx(1e-6 + 0.01)
    one = RankGroup(1, 1, NEAR, FAR)
    assert one.all_gather(1e9) == one.all_reduce(1e9) == one.send(1e9) == 0


def test_between_hosts_each_rank_sends_its_part_over_its_own_link() -> None:
    group = RankGroup(2, 4, NEAR, FAR)
    between = 3 * (10e-6 + 4e8 / 2 / 4 / 10e9)
    inside = 1e-6 + 4e8 / 2 / 100e9
    assert group.all_gather(4e8) == pytest.approx(between + inside)
    assert group.send(1e9) == pytest.approx(10e-6 + 0.1)


@pytest.mark.parametrize(
    ("axis", "inside", "hosts"), [("tp", 4, 1), ("shard", 2, 1), ("dp", 1, 8), ("pp", 1, 2)]
)
def test_the_innermost_axes_share_a_host(axis: str, inside: int, hosts: int) -> None:
    group = RankGroup.along(axis, MeshSpec(dp=8, shard=2, tp=4, pp=2), PLAIN)
    assert (group.inside, group.hosts) == (inside, hosts)


def test_one_rank_computes_six_operations_a_weight_and_attention() -> None:
    alone = step()
    tokens = 4 * 1024
    per_token = 6 * (8 * BLOCK + EMBEDDING) + 8 * 12 * 1024 * 1024
    assert per_token == SHAPE.flops_per_token(1024)
    assert alone.seconds["products"] == pytest.approx(tokens * per_token / 50e12)
    assert alone.seconds["optimizer"] == pytest.approx(28 * (8 * BLOCK + EMBEDDING) / 1e12)
    rest = {name: each for name, each in alone.seconds.items() if each}
    assert set(rest) == {"products", "optimizer"}
    assert alone.efficiency == pytest.approx(alone.seconds["products"] / alone.step_s)
    assert alone.mfu == pytest.approx(alone.efficiency / 2)
    half = step(precision="bfloat16")
    assert half.seconds["products"] == pytest.approx(alone.seconds["products"] / 2)


def test_recomputed_blocks_run_forward_twice() -> None:
    more = step(activation_checkpointing=True).seconds["products"] - step().seconds["products"]
    assert more == pytest.approx(4096 * 8 * SHAPE.block_flops(1024) / 50e12)


def test_replicas_sum_gradients_in_buckets_beside_the_backward_pass() -> None:
    two = step(mesh={"dp": 2})
    size, bucket = (8 * BLOCK + EMBEDDING) * 4, 4 * 2**20
    buckets = -(-size // bucket)
    ring = 2 * (buckets * 1e-6 + size / 2 / 100e9)
    assert two.seconds["data"] == pytest.approx(ring)
    assert step(mesh={"dp": 2, "hook": "bf16"}).seconds["data"] == pytest.approx(ring / 2, rel=1e-2)
    hidden = step(PLAIN.model_copy(update={"overlap": 0.75}), mesh={"dp": 2})
    assert hidden.seconds["data"] == pytest.approx(ring / 4)
    slow = PLAIN.model_copy(update={"overlap": 1.0, "inside": FAR})
    bound = step(slow, mesh={"dp": 2}, rows=1)
    backward = bound.seconds["products"] * 2 / 3
    assert bound.seconds["data"] == pytest.approx(bound.exchange_s - backward), "no more to hide in"


def test_shards_gather_blocks_twice_and_scatter_once() -> None:
    four = step(mesh={"shard": 4}, precision="bfloat16")

    def ring(size: float) -> float:
        return 3 * (1e-6 + size / 4 / 100e9)

    blocks = 8 * (2 * ring(BLOCK * 2) + ring(BLOCK * 4))
    rest = ring(EMBEDDING * 2) + ring(EMBEDDING * 4)
    assert four.seconds["data"] == pytest.approx(blocks + rest)
    thrice = step(mesh={"shard": 4}, precision="bfloat16", accumulation=3)
    assert thrice.seconds["data"] == pytest.approx(blocks + rest + 8 * 2 * ring(BLOCK * 2))


def test_replicas_of_shards_sum_only_their_part_between_hosts() -> None:
    hybrid, one = step(mesh={"dp": 4, "shard": 8}), step(mesh={"shard": 8})

    def part(size: float) -> float:
        return 2 * 3 * (10e-6 + size / 8 / 4 / 10e9)

    more = hybrid.seconds["data"] - one.seconds["data"]
    assert more == pytest.approx(8 * part(BLOCK * 4) + part(EMBEDDING * 4))
    assert hybrid.exchange_s < step(mesh={"shard": 32}).exchange_s, "the links between are slow"


def test_cut_matrices_sum_activations_twice_a_block_and_pass() -> None:
    two = step(mesh={"tp": 2}, precision="bfloat16")
    size = 2 * 4 * 1024 * 1024 * 2  # both ranks' rows, 1,024 wide, two bytes
    assert two.seconds["tensor"] == pytest.approx((8 * 4 + 2) * 2 * (1e-6 + size / 2 / 100e9))
    assert two.seconds["products"] == pytest.approx(step(precision="bfloat16").seconds["products"])


def test_parts_of_rows_exchange_heads_and_share_weights() -> None:
    whole, cut = step(mesh={"shard": 4}, rows=4), step(mesh={"cp": 4}, rows=4)
    assert (cut.pass_tokens, cut.tokens) == (whole.pass_tokens, whole.tokens), (
        "rows are 4 x as many"
    )
    assert cut.pass_s == pytest.approx(whole.pass_s)
    assert {**cut.seconds, "context": 0.0} == pytest.approx(whole.seconds)
    assert cut.memory == pytest.approx(whole.memory)
    sent = 4 * 1024 * 64 * 4  # bytes of one head of a rank's tokens
    heads = 2 * 16 + 2 * 4  # queries and results, keys and values
    exchanged = 4 * 3 * 1e-6 + heads * sent * 3 / 4 / 100e9
    assert cut.seconds["context"] == pytest.approx(2 * 8 * exchanged)
    assert step(mesh={"cp": 4}, rows=1).memory["activations"] < cut.memory["activations"] / 3.9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_idles_for_its_share(schedule: str) -> None:
    fast = PLAIN.model_copy(update={"inside": LinkSettings(latency_us=0, gb_s=1e9)})
    four = step(fast, rows=4, mesh={"pp": 4, "microbatches": 16, "schedule": schedule})
    slots = four.seconds["products"] + four.seconds["bubble"]
    assert four.seconds["bubble"] / slots == pytest.approx(3 / (16 + 3), rel=1e-4)
    last = 2 * 3 * SHAPE.block_flops(1024) + 3 * SHAPE.output_flops
    assert four.pass_s == pytest.approx(1024 * last / 50e12), "of the stage with the output layer"
    padded = step(fast, rows=4, mesh={"pp": 4, "microbatches": 12, "schedule": schedule})
    assert padded.pass_tokens == 2 * 1024, "16 rows in 12 microbatches: two in each"


def test_memory_by_hand() -> None:
    parameters = 8 * BLOCK + EMBEDDING
    alone, sharded = step().memory, step(mesh={"shard": 8}).memory
    assert alone["parameters"] + alone["gradients"] + alone["optimizer"] == 16 * parameters
    assert sharded["optimizer"] == parameters
    assert sharded["gathered"] == 4 * (2 * BLOCK + EMBEDDING) + 4 * BLOCK
    assert step(optimizer="sgd").memory["optimizer"] == 0
    logits = 4 * 1024 * 32_000 * 8
    token = 4 * (4 * 1024 + 3 * 1024 + 3 * 256 + 4 * 4096)
    assert alone["activations"] == 4 * 1024 * 8 * token + logits
    again = step(activation_checkpointing=True).memory["activations"]
    assert again == 4 * 1024 * (8 * 1024 * 4 + token) + logits
    cut = step(mesh={"tp": 2}).memory
    assert cut["activations"] == alone["activations"], "twice the rows, half of each"
    whole = step(mesh={"tp": 2, "sequence_parallel": False}).memory
    assert whole["activations"] > cut["activations"]
    piped = {
        schedule: step(mesh={"pp": 4, "microbatches": 16, "schedule": schedule}).memory
        for schedule in ("gpipe", "1f1b")
    }
    assert piped["1f1b"]["activations"] < piped["gpipe"]["activations"]


def test_activations_are_those_that_torch_keeps() -> None:
    config = ModelConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = new_model(config, 0)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blocks = model(torch.zeros(8, 32, dtype=torch.int64))
    assert blocks.requires_grad
    rows = TrainingSettings(ranks=1, batch_sequences=8)
    predicted = StepModel(ModelShape.of(config), MeshSpec(), rows, 32, PLAIN)
    logits = 8 * 32 * 256 * 8
    assert predicted.memory["activations"] - logits == pytest.approx(sum(kept.values()), rel=0.15)


def test_checkpoints_stall_for_the_copy_of_weights_and_moments() -> None:
    every = CheckpointSettings(interval="seconds", every_s=30)
    found = step(checkpoints=every)
    stall = 12 * (8 * BLOCK + EMBEDDING) / 50e9
    assert found.checkpoint_share == pytest.approx(stall / (30 + stall))
    steps = step(checkpoints=CheckpointSettings(every_steps=1000))
    assert steps.checkpoint_share == pytest.approx(stall / (1000 * steps.step_s + stall))


# docs/measurements/gpu.md, one H100, the loop of trainings, compiled, bf16
MEASURED = ModelConfig(
    vocab_size=50_304, hidden_size=2048, intermediate_size=5632, num_hidden_layers=9,
    num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=2048,
)  # fmt: skip


def test_the_known_accelerator_gives_what_was_measured_on_it() -> None:
    h100 = accelerator_of("NVIDIA H100 80GB HBM3", {})
    given = TrainingSettings(ranks=1, batch_sequences=8, precision="bfloat16", compile=True)
    found = StepModel(ModelShape.of(MEASURED), MeshSpec(), given, 2048, h100)
    assert found.tokens / found.step_s == pytest.approx(134_953, rel=0.01), "fitted to it"
    assert found.mfu * 989 == pytest.approx(0.675 * 769, rel=0.01)
    assert sum(found.memory.values()) == pytest.approx(22.5e9, rel=0.05)
    # Not fitted: a forward pass of 1,024 tokens through a model of 7.0 B took 30.8 ms.
    assert 2 * 7.0e9 * 1024 / found.rate == pytest.approx(0.0308, rel=0.2)


MESHES = st.fixed_dictionaries({
    "shard": st.sampled_from([1, 2, 8]), "tp": st.sampled_from([1, 2, 4]),
    "pp": st.sampled_from([1, 2, 4]), "schedule": st.sampled_from(["gpipe", "1f1b"]),
})  # fmt: skip
# The links between hosts are the slower ones.
ACCELERATORS = st.builds(
    lambda latency_us, gb_s, slower, overlap, block_us: PLAIN.model_copy(
        update={
            "inside": LinkSettings(latency_us=latency_us, gb_s=gb_s),
            "between": LinkSettings(latency_us=latency_us * slower, gb_s=gb_s / slower),
            "overlap": overlap,
            "block_us": block_us,
        }
    ),
    st.floats(0, 100), st.floats(1, 1000), st.floats(1, 50), st.floats(0, 1), st.floats(0, 1000),
)  # fmt: skip
CHANGES = st.fixed_dictionaries({
    "accumulation": st.integers(1, 3), "activation_checkpointing": st.booleans(),
    "precision": st.sampled_from(["float32", "bfloat16"]),
    "optimizer": st.sampled_from(["adamw", "sgd"]),
})  # fmt: skip


@few(max_examples=100, deadline=None)
@given(ACCELERATORS, MESHES, CHANGES, st.integers(1, 6), st.integers(0, 6))
def test_more_replicas_never_raise_the_share_of_products(
    accelerator: AcceleratorSettings, mesh: dict[str, Any], changes: dict[str, Any], rows: int,
    power: int,
) -> None:  # fmt: skip
    less, more = (
        step(accelerator, rows=rows, mesh=mesh | {"dp": dp}, **changes)
        for dp in (2**power, 2 ** (power + 1))
    )
    assert 0 < more.efficiency <= 1 and less.efficiency <= 1
    assert all(each >= 0 for each in more.seconds.values())
    assert more.efficiency <= less.efficiency * (1 + 1e-9)


@few(max_examples=100, deadline=None)
@given(MESHES, CHANGES, st.integers(1, 6))
def test_more_shards_need_less_memory_each(
    mesh: dict[str, Any], changes: dict[str, Any], rows: int
) -> None:
    less, more = (
        step(rows=rows, mesh=mesh | {"shard": shard}, **changes).memory for shard in (4, 8)
    )
    assert sum(more.values()) < sum(less.values())
    assert more["parameters"] == less["parameters"] / 2


def test_trainings_whose_step_is_another_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"got training.lora, wanted none"):
        step(lora=LoraSettings())
    with pytest.raises(InvalidInput, match=r"synchrony.kind local-sgd"):
        step(synchrony={"kind": "local-sgd"})


def test_our_parameters_are_counted_exactly() -> None:
    assert count_parameters(MEASURED) == ModelShape.of(MEASURED).parameters == 565_483_520
