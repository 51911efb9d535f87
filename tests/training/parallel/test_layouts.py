"""Meshes and layouts that cannot work are refused before any rank starts: no torch needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.config import DataSettings, MeshSettings, TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import ModelConfig, config_for
from paceline.training.parallel import (
    AXES,
    Mesh,
    MeshSpec,
    cuts_of,
    layers_of,
    open_mesh,
    require_layout,
    require_ranks,
    require_rows,
)

CONFIG = ModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def changed(**changes: int) -> ModelConfig:
    return CONFIG.model_copy(update=changes)


def settings(ranks: int = 4, **changes: object) -> TrainingSettings:
    return TrainingSettings.model_validate({"ranks": ranks, "batch_sequences": 16} | changes)


def check(ranks: int, mesh: dict, config: ModelConfig | None = CONFIG, data=None, **changes):
    asked = settings(ranks, mesh=mesh, **changes)
    require_layout(MeshSpec.of(asked.mesh, ranks), asked, config, data)


def test_what_is_left_of_the_ranks_becomes_replicas() -> None:
    assert MeshSpec.of(MeshSettings(shard=2, tp=2), 8) == MeshSpec(dp=2, shard=2, tp=2)
    assert MeshSpec.of(MeshSettings(), 1) == MeshSpec()
    assert str(MeshSpec(dp=2, pp=3)) == "pp3xdp2"


@pytest.mark.parametrize(
    ("mesh", "ranks", "numbers"),
    [
        ({"shard": 2, "tp": 2}, 6, ("6 ranks", "shard 2 x tp 2 x pp 1", "multiple of 4")),
        ({"pp": 4}, 2, ("2 ranks", "multiple of 4")),
        ({"dp": 3, "tp": 2}, 8, ("8 ranks", "dp 3", "6 ranks")),
    ],
)
def test_a_mesh_that_does_not_divide_the_ranks_is_refused_with_numbers(
    mesh: dict, ranks: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput) as raised:
        MeshSpec.of(MeshSettings(**mesh), ranks)
    assert all(number in raised.value.one_line() for number in numbers)


def test_every_rank_has_its_own_place_and_tensor_parts_are_neighbours() -> None:
    spec = MeshSpec(dp=2, shard=3, tp=2, pp=2)
    places = [spec.place(rank) for rank in range(spec.world_size)]
    assert len({tuple(place[axis] for axis in AXES) for place in places}) == 24
    assert [place["tp"] for place in places[:4]] == [0, 1, 0, 1]
    assert [place["pp"] for place in places] == [0] * 12 + [1] * 12
    shares: dict[int, set[tuple[int, int]]] = {}
    for rank, place in enumerate(places):
        mesh = Mesh(spec, rank)
        assert mesh.data_world == 6
        shares.setdefault(mesh.data_rank, set()).add((place["dp"], place["shard"]))
    assert sorted(shares) == list(range(6)), "ranks of one share read the same rows"
    assert all(len(each) == 1 for each in shares.values())


def test_a_mesh_larger_than_the_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match="got 1 ranks, wanted 2 ranks"):
        open_mesh(MeshSpec(dp=2))


@pytest.mark.parametrize(
    ("ranks", "mesh", "config", "words"),
    [
        (4, {"tp": 4}, CONFIG, "key-value heads 2, tp 4"),
        (3, {"tp": 3}, CONFIG, "query heads 4, tp 3"),
        (2, {"tp": 2}, changed(max_position_embeddings=33), "context 33, tp 2"),
        (2, {"tp": 2}, changed(vocab_size=301), "vocabulary 301, tp 2"),
        (5, {"pp": 5}, CONFIG, "4 layers, pp 5"),
        (4, {"pp": 4, "microbatches": 3}, CONFIG, "3 microbatches, pp 4"),
        (2, {"shard": 2, "hook": "powersgd"}, CONFIG, "hook powersgd, mesh shard2"),
        (2, {"tp": 2, "hook": "bf16"}, CONFIG, "hook bf16, mesh tp2"),
        (32, {"dp": 32}, CONFIG, "16 sequences, dp 32"),
        (2, {"cp": 2}, changed(max_position_embeddings=33), "context 33, cp 2"),
        (4, {"cp": 4}, CONFIG, "key-value heads 2, cp 4, wanted a cp that divides 2, at most 2"),
        (
            4,
            {"cp": 2, "tp": 2},
            CONFIG,
            "key-value heads 2, cp 2, tp 2, wanted a cp that divides 1",
        ),
        (4, {"cp": 2, "pp": 2}, CONFIG, "cp 2, pp 2"),
        (2, {"cp": 2, "hook": "bf16"}, CONFIG, "hook bf16, mesh cp2"),
    ],
)
def test_layouts_that_cannot_work_are_refused_with_the_numbers(
    ranks: int, mesh: dict, config: ModelConfig | None, words: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        check(ranks, mesh, config)
    assert words in raised.value.one_line()
    assert raised.value.do


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_a_model_of_the_users_own_is_not_cut(mesh: dict) -> None:
    with pytest.raises(InvalidInput, match="model mine:model"):
        check(2, mesh, None, code_ref="mine:model")
    check(2, mesh, None)  # ours, but nobody has read its config yet
    check(2, {"shard": 2}, None, code_ref="mine:model")


def test_adapters_of_our_own_transformer_are_not_cut() -> None:
    check(2, {"tp": 2}, None, lora={"r": 2})  # of transformers, perhaps
    with pytest.raises(InvalidInput, match="tp 1 but for models of transformers"):
        check(2, {"tp": 2}, CONFIG, lora={"r": 2})


def test_a_new_model_is_given_a_shape_that_its_mesh_can_cut() -> None:
    mesh = MeshSettings(tp=2, pp=3)
    assert cuts_of(mesh) == {"parts": 2, "stages": 3}
    check(6, mesh.model_dump(), config_for(500_000, 64, **cuts_of(mesh)))
    rows = MeshSettings(tp=2, cp=4)
    check(8, rows.model_dump(), config_for(500_000, 64, **cuts_of(rows)))


def test_length_buckets_must_divide_where_sequences_are_cut() -> None:
    wide = changed(hidden_size=256, num_attention_heads=16, num_key_value_heads=16)
    check(16, {"tp": 16}, wide)
    with pytest.raises(InvalidInput, match="length buckets 8, tp 16"):
        check(16, {"tp": 16}, wide, DataSettings(batching="bucketed"))
    check(16, {"tp": 16, "sequence_parallel": False}, wide, DataSettings(batching="bucketed"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"synchrony": {"kind": "local-sgd"}}, "cp 2, local-sgd"),
        ({"lora": {"lora_dropout": 0.1}}, "cp 2, lora_dropout"),
    ],
)
def test_what_is_not_trained_by_parts_of_rows_is_refused(changes: dict, words: str) -> None:
    check(2, {"cp": 2}, dpo={}, lora={"r": 2})
    with pytest.raises(InvalidInput, match=words):
        check(2, {"cp": 2}, **changes)
    with pytest.raises(InvalidInput, match="cp 2, hook none"):
        require_ranks(settings(4, mesh={"cp": 2}, synchrony={"kind": "parameter-server"}), 4)


def test_rows_of_pairs_and_of_length_buckets_must_divide() -> None:
    spec = MeshSpec(cp=3)
    require_rows(spec, settings(3), 24)
    with pytest.raises(InvalidInput, match="length buckets 8, cp 3"):
        require_rows(spec, settings(3), 24, DataSettings(batching="bucketed"))
    with pytest.raises(InvalidInput, match="widths of pairs 8, cp 3"):
        require_rows(spec, settings(3, dpo={}), 24)


def test_ranks_of_one_row_are_neighbours_that_read_the_same_rows() -> None:
    meshes = [Mesh(MeshSpec(dp=2, cp=2, tp=2), rank) for rank in range(8)]
    assert [each.data_rank for each in meshes] == [0] * 4 + [1] * 4
    assert [each.spec.place(each.rank)["cp"] for each in meshes] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ({"dp": 4}, ("dp",)),
        ({"shard": 2}, ("shard",)),
        ({"dp": 2, "shard": 2}, ("dp", "shard")),
        ({"dp": 2, "tp": 2}, ("dp", "shard", "tp")),
        ({"dp": 2, "pp": 2}, ("pp", "dp", "shard")),
        ({"pp": 2, "tp": 2}, ("pp", "tp")),
        ({"cp": 2}, ("shard",)),
        ({"dp": 2, "cp": 2}, ("dp", "shard")),
    ],
)
def test_only_axes_with_several_ranks_get_groups(mesh: dict, axes: tuple[str, ...]) -> None:
    assert MeshSpec(**mesh).axes == axes


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 4, "hook": "powersgd"},
        {"dp": 2, "tp": 2},
        {"shard": 2, "pp": 2},
        {"pp": 4, "schedule": "gpipe", "microbatches": 2},
        {"pp": 2, "dp": 2},
        {"shard": 2, "cp": 2},
    ],
)
def test_layouts_that_work_pass(mesh: dict) -> None:
    check(4, mesh)


def test_stages_share_the_layers_without_gap_and_the_ends_get_fewer() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            found = [layers_of(stage, stages, layers) for stage in range(stages)]
            assert [each for part in found for each in part] == list(range(layers))
            sizes = [len(each) for each in found]
            assert max(sizes) - min(sizes) <= 1
            if stages > 2 and layers % stages and layers % stages <= stages - 2:
                assert sizes[0] == sizes[-1] == min(sizes)


def test_a_driver_can_check_a_layout_without_importing_torch() -> None:
    code = (
        "import sys; from paceline.training.parallel import require_layout; "
        "from paceline.training.parallel.mesh import MeshSpec; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_is_refused_before_its_ranks_start(tmp_path) -> None:
    from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
    from paceline.models import CONFIG_FILE
    from paceline.schemas import TrainJob
    from paceline.training.launcher import require_mesh

    runtime = Runtime(
        profile=Profile(), state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets()
    )
    save_runtime(runtime)
    directory = runtime.node_dir("node-0") / "store" / "models" / "tiny" / "v1"
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(CONFIG.model_dump_json())

    def job(ranks: int, mesh: dict) -> TrainJob:
        return TrainJob(
            job_id="job",
            run_id="run-20260101-000000-abcdef",
            state_dir=str(tmp_path),
            model_id="tiny",
            version="v1",
            manifest_digest="0" * 64,
            snapshot_url="s3://b/s",
            snapshot_digest="0" * 64,
            purpose="tests",
            checkpoint_url="s3://b/c",
            settings=settings(ranks, mesh=mesh),
        )

    with pytest.raises(InvalidInput, match="3 ranks"):
        require_mesh(job(3, {"shard": 2}), "node-0")
    with pytest.raises(InvalidInput, match="key-value heads 2, tp 4"):
        require_mesh(job(4, {"tp": 4}), "node-0")
    require_mesh(job(4, {"tp": 2, "pp": 2}), "node-0")
    require_mesh(job(4, {"tp": 4}), "node-elsewhere")  # its disk is not here: the ranks will say

    of_transformers = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 3}
    of_transformers["num_hidden_layers"] = 1
    (directory / CONFIG_FILE).write_text(json.dumps(of_transformers))
    require_mesh(job(3, {"tp": 3}), "node-0")
    with pytest.raises(InvalidInput, match="key-value heads 3, tp 2"):
        require_mesh(job(2, {"tp": 2}), "node-0")
    with pytest.raises(InvalidInput, match="more stages than layers"):
        require_mesh(job(2, {"pp": 2}), "node-0")
    with pytest.raises(InvalidInput, match="key-value heads 3, cp 2"):
        require_mesh(job(2, {"cp": 2}), "node-0")
    with pytest.raises(InvalidInput, match="context 256, cp 3"):
        require_mesh(job(3, {"cp": 3}), "node-0")
