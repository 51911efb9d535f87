"""A publish finds NaN, infinity and tied weights that differ in the bytes that it reads."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import InvalidInput
from paceline.manifest import finite, publish_model, require_sound_weights
from paceline.manifest.finite import WeightsScan, scan_of
from tests.support.rclone import RcloneS3

BUCKET = "finite"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


def scanned(path: Path, seed: int = 0) -> str:
    """What a scan finds that gets the file in blocks of random sizes, also of a byte."""
    scan, data, random_ = WeightsScan(), memoryview(path.read_bytes()), random.Random(seed)
    while data:
        size = random_.choice([1, 3, 7, 64, 5000])
        scan.update(data[:size])
        data = data[size:]
    return scan.found


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf, None])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_value_that_is_not_finite_is_found_wherever_a_block_ends(
    dtype: str, value: float | None, tmp_path: Path
) -> None:
    largest = torch.finfo(DTYPES[dtype]).max
    tensors = {name: torch.full((40, 40), largest, dtype=DTYPES[dtype]) for name in ("a", "b", "c")}
    tensors |= {"ids": torch.full((9,), -1), "empty": torch.empty(0)}  # all bits of int64 are 1
    tensors["attention.masked_bias"] = torch.tensor(-torch.inf, dtype=DTYPES[dtype])
    if value is not None:
        tensors["b"][17, 31] = value
        tensors["c"][0, 0] = value
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    for seed in range(5):
        assert scanned(path, seed) == ("" if value is None else "b")


ODD = [
    len(header).to_bytes(8, "little") + header + bytes(8)
    for header in (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}',
        b'{"a":{"dtype":"F32","data_offsets":[0,3]},"b":{"dtype":"F16","data_offsets":[3,8]}}',
    )
]


@pytest.mark.parametrize(
    "data", [b"", b"x" * 100, b"\x05" + bytes(7) + b"{}{}{" + b"\xff" * 99, *ODD]
)
def test_a_file_that_is_not_safetensors_has_nothing_to_be_found(data: bytes) -> None:
    scan = WeightsScan()
    scan.update(memoryview(data))
    assert not scan.found
    assert scan_of("config.json") is None


LLAMA, TIED = {"model_type": "llama"}, {"tie_word_embeddings": True}
CONFIGS: dict[str, tuple[object, float, bool]] = {  # config, the output's last value, if it trains
    "tied": (LLAMA | TIED, 1.5, False),
    "tied and equal": (LLAMA | TIED, 1.0, True),
    "untied": (LLAMA, 1.5, True),
    "untied by a setting": ({"model_type": "gemma", "tie_word_embeddings": False}, 1.5, True),
    "tied by its family": ({"model_type": "gemma2"}, 1.5, False),
    "not an object": ([], 1.5, True),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_publish_finds_tied_weights_that_differ(s3: RcloneS3, tmp_path: Path, name: str) -> None:
    store, (config, last, trains) = s3.store(), CONFIGS[name]
    store.ensure_bucket(BUCKET)
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = torch.ones(300, 40), torch.ones(300, 40)
    second[-1, -1] = last
    save_file({"model.embed_tokens.weight": first}, tmp_path / "model-1.safetensors")
    save_file({"a": first, "lm_head.weight": second}, tmp_path / "model-2.safetensors")
    url = f"s3://{BUCKET}/models/{name.replace(' ', '-')}/1"
    publish_model(
        tmp_path, url, model_id="m", version="1", store=store, link_mbit=100, piece_bytes=65_536
    )
    assert store.exists(f"{url}/manifest.json.tied-differ") is not trains
    words = r"differ.*lm_head\.weight is not model\.embed_tokens\.weight.*tie_word_embeddings"
    with nullcontext() if trains else pytest.raises(InvalidInput, match=words):
        require_sound_weights(url, store)


def test_a_publish_names_the_tensor_for_whoever_trains_the_version(
    s3: RcloneS3, tmp_path: Path
) -> None:
    store = s3.store()
    store.ensure_bucket(BUCKET)
    tensors = {"sound": torch.ones(5), "odd": torch.tensor([1.0, torch.nan])}

    def publish(version: str) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        url = f"s3://{BUCKET}/models/m/{version}"
        publish_model(
            tmp_path, url, model_id="m", version=version, store=store, link_mbit=100,
            piece_bytes=65_536,
        )  # fmt: skip
        return url

    bad = publish("1")
    with pytest.raises(InvalidInput, match=r"NaN or infinity in odd in model\.safetensors.*m/1"):
        require_sound_weights(bad, store)
    fact = store.get_bytes(f"{bad}/manifest.json.not-finite")
    tensors["odd"][1] = 2.0
    sound = publish("2")
    require_sound_weights(sound, store)
    assert not store.exists(f"{sound}/manifest.json.not-finite"), "no object where all is well"
    store.put_bytes(f"{sound}/manifest.json.not-finite", fact)  # of another publisher, that lost
    require_sound_weights(sound, store)
    with mock.patch.dict("sys.modules", {"numpy": None}):
        assert finite.scan_of("model.safetensors") is None
