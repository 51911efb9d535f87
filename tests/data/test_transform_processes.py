"""Transforms in processes of their own: the same data in the same order, and bad ones named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import DataSettings
from paceline.data import (
    BYTE_VOCABULARY,
    Batch,
    Column,
    ShardCache,
    Snapshot,
    build_snapshot,
    open_stream,
)
from paceline.data.formats import ColumnWriter, Sample
from paceline.data.loading import (
    ProcessTransform,
    TransformedSamples,
    TransformFailed,
    open_transforms,
    require_runnable,
)
from paceline.errors import AccessDenied, CorruptData, DataRejected, InvalidInput, WorkerLost
from paceline.storage import DiskStore

MODULE = "tests.data.transforms"


@pytest.fixture
def on_disk(texts: Path, tmp_path: Path) -> Snapshot:
    settings = DataSettings(
        max_bytes=200_000, shard_bytes=8192, held_out_share=0.1, purpose="tests", seed=3
    )
    return build_snapshot(str(texts), DiskStore.url_of(tmp_path / "store"), settings, DiskStore())


def apart(name: str, processes: int = 1, deadline_s: float = 60.0) -> ProcessTransform:
    return ProcessTransform(f"{MODULE}:{name}", processes, deadline_s)


def sample_of(key: str) -> Sample:
    return Sample(key, None, np.arange(3, dtype=np.uint8))


def epoch_of(
    snapshot: Snapshot,
    where: Path,
    transforms: ProcessTransform,
    kind: str,
    most: float = 1.0,
) -> tuple[list[Batch], dict[str, str]]:
    how = DataSettings.model_validate({"batching": kind})
    with (
        ShardCache(
            snapshot, DiskStore(), where, transforms=transforms, max_bad_share=most
        ) as cache,
        open_stream(
            snapshot, "train", cache, how, context=256, global_batch=8, seed=1, world_size=1
        ) as stream,
    ):
        found = []
        while stream.position["epoch"] == 0:
            found.append(stream.next())
        return found, dict(cache.quarantined)


def keys_of(snapshot: Snapshot, quarantined: dict[str, str], where: Path) -> dict[str, str]:
    """The reason for each bad sample, by its key."""
    found = {}
    with ShardCache(snapshot, DiskStore(), where) as cache:
        for shard in snapshot.shards:
            with cache.samples(shard) as samples:
                for i in range(len(samples)):
                    if (why := quarantined.get(f"{shard.sha256}#{i}")) is not None:
                        found[samples.key(i)] = why
    assert len(found) == len(quarantined)
    return found


def same(first: list[Batch], second: list[Batch]) -> bool:
    names = ("inputs_BT", "targets_BT", "weights_BT", "documents_BT", "positions_BT")
    return len(first) == len(second) and all(
        one.skipped == other.skipped
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
        for one, other in zip(first, second, strict=True)
    )


def test_a_transform_changes_each_sample_alike_with_and_without_processes(
    on_disk: Snapshot, texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, why = epoch_of(on_disk, tmp_path / "cache", apart("shout"), "packed")
    found, why_too = epoch_of(on_disk, tmp_path / "cache", apart("shout", 2), "packed")
    assert same(found, wanted)
    assert why == why_too
    named = keys_of(on_disk, why, tmp_path / "cache")
    assert set(named) <= {"file-03.txt", "file-05.txt"}
    assert "KeyError" in named["file-03.txt"]
    assert "that talks" in capfd.readouterr().err, "not among the answers"
    with ShardCache(on_disk, DiskStore(), tmp_path / "cache", transforms=apart("shout")) as cache:
        shard = on_disk.of_split("train")[0]
        with cache.samples(shard) as samples:
            for i in range(len(samples)):
                if f"{shard.sha256}#{i}" not in why:
                    plain = (texts / samples.key(i)).read_bytes()
                    assert samples.tokens(i).tobytes() == plain.upper()
                    assert samples.features(i)["count"] >= 0
        assert cache.lengths(shard).sum() == shard.tokens


def test_a_sample_goes_and_comes_as_it_is() -> None:
    features = {
        "score": np.float32(1.5),
        "table": np.ones((2, 0, 3), dtype=np.float16),
        "large": np.arange(300_000, dtype=np.int64),
    }
    sample = Sample("ключ", None, np.arange(7, dtype=np.uint32), features)
    wanted = {**features, "score": np.float32(3), "where": np.arange(6, dtype=np.int16)}
    wanted["where"] = wanted["where"].reshape(2, 3)
    with apart("described") as processes:
        waiting = [processes.start(sample) for n in range(5)]
        for result in reversed(waiting):
            there = result.result()
            assert there.key == "ключ"
            assert there.tokens is not None
            assert (there.tokens.dtype, there.tokens.tolist()) == (np.uint32, list(range(7)))
            assert set(there.features) == set(wanted)
            for name, array in wanted.items():
                got = there.features[name]
                assert (got.dtype, got.shape) == (array.dtype, array.shape)
                assert np.array_equal(got, array)


@pytest.mark.parametrize(
    ("name", "why"),
    [("hang", "did not end within 0.5 s"), ("die", "ended its process, twice: exit code 3")],
)
def test_a_sample_that_hangs_or_kills_its_process_is_named_and_skipped(
    on_disk: Snapshot, tmp_path: Path, name: str, why: str
) -> None:
    processes = apart(name, 1, 0.5 if name == "hang" else 60.0)
    found, quarantined = epoch_of(on_disk, tmp_path / "cache", processes, "bucketed")
    named = keys_of(on_disk, quarantined, tmp_path / "cache")
    assert list(named) == ["file-03.txt"]
    assert why in named["file-03.txt"]
    assert processes.lost == (1 if name == "hang" else 2)
    (listed,) = {line for each in found for line in each.skipped}
    assert listed in quarantined
    lost = sum(each.global_tokens - float(each.weights_BT.sum()) for each in found)
    assert lost > 0, "its places have weight 0"


def test_a_malformed_transformed_sample_is_skipped_by_shard_and_row(
    on_disk: Snapshot, tmp_path: Path
) -> None:
    found, quarantined = epoch_of(on_disk, tmp_path / "cache", apart("rubbish"), "packed")
    named = keys_of(on_disk, quarantined, tmp_path / "cache")
    wanted = {
        "file-00.txt": "TypeError",
        "file-01.txt": "no numbers of ours",
        "file-02.txt": "tokens float32",
        "file-03.txt": "SystemExit: enough",
        "file-04.txt": "outside the vocabulary",
    }
    held_out = wanted.keys() - named.keys()
    assert len(held_out) < 3
    for key, why in named.items():
        assert wanted[key] in why, key
    assert {line for each in found for line in each.skipped} == set(quarantined)


def test_a_transform_that_fails_on_most_samples_stops_the_stream(
    on_disk: Snapshot, tmp_path: Path
) -> None:
    with pytest.raises(DataRejected, match=r"too many samples.*9 of 9.*no luck with.*#\d"):
        epoch_of(on_disk, tmp_path / "cache", apart("broken"), "packed", 0.5)


def test_features_keep_their_shape_and_their_kind() -> None:
    class Given:
        def start(self, sample: Sample) -> Future[Sample]:
            kinds: dict[str, dict[str, Any]] = {
                "0": {"table": np.zeros((7, 2), dtype=np.int8)},
                "1": {"table": np.zeros((2, 3), dtype=np.int16)},
                "2": {"score": np.zeros(1, dtype=np.float32)},
                "3": {"table": np.zeros((4, 2), dtype=np.float32)},
            }
            found: Future[Sample] = Future()
            found.set_result(Sample(sample.key, features=kinds[sample.key]))
            return found

    columns = [
        Column(name="score", dtype="float32", shape=()),
        Column(name="table", dtype="int16", shape=(None, 2)),
    ]
    writer = ColumnWriter(columns, "uint8")
    for n in range(4):
        features = {"score": np.float32(n), "table": np.ones((n + 1, 2), dtype=np.int16)}
        arrays = {name: np.asarray(each) for name, each in features.items()}
        writer.add(str(n), np.frombuffer(b"abc", np.uint8), arrays, None, text_bytes=3)
    stored = (writer.arrays(), 4, BYTE_VOCABULARY, columns)
    reported: dict[str, str | None] = {}
    given: Any = Given()
    found = TransformedSamples("shard", given, {}, reported.__setitem__, *stored)
    assert found.tokens(0).tobytes() == b"abc", "what is not given anew stays"
    assert found.features(0)["score"] == 0
    assert found.features(0)["table"].shape == (7, 2)
    for i, why in ((1, "another shape"), (2, "another shape"), (3, "another kind")):
        with pytest.raises(CorruptData, match=why):
            found.tokens(i)
    assert [why is None for why in reported.values()] == [True, False, False, False]


def test_a_process_that_dies_once_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCIDENT", str(tmp_path / "met"))
    with apart("accident") as processes:
        for key in ("file-01.txt", "file-03.txt", "file-04.txt"):
            result = processes.start(sample_of(key)).result()
            assert result.tokens is not None
            assert result.tokens.tolist() == [0, 1, 2]
    assert processes.lost == 1


def test_what_loses_process_after_process_stops_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.loading.transform.MOST_LOST", 1)
    bad = sample_of("file-03.txt")
    with apart("hang", deadline_s=0.2) as processes:
        with pytest.raises(TransformFailed, match="did not end"):
            processes.start(bad).result()
        with pytest.raises(DataRejected, match=r"loses its processes.*file-03\.txt"):
            processes.start(bad).result()


def test_closing_ends_a_hanging_process_and_fails_its_waiting_calls() -> None:
    processes = apart("hang", deadline_s=600.0)
    waiting = [processes.start(sample_of("file-03.txt")) for _ in range(2)]
    while not processes._children:
        time.sleep(0.005)
    child = processes._children[0]
    processes.close()
    assert child._process.returncode is not None
    with pytest.raises(WorkerLost):
        waiting[0].result()
    with pytest.raises(CancelledError):
        waiting[1].result()


def test_a_process_does_not_outlive_its_rank() -> None:
    code = f"""
import numpy as np, time
from paceline.data.formats import Sample
from paceline.data.loading.transform import ProcessTransform
apart = ProcessTransform("{MODULE}:hang", 1, 600)
apart.start(Sample("file-03.txt", None, np.arange(3, dtype=np.uint8)))
while not apart._children:
    time.sleep(0.005)
print(apart._children[0]._process.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        rank.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while Path(f"/proc/{child}/exe").exists() and _is_running(child):
        assert time.monotonic() < until, "it goes on without its rank"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bad_names_are_refused_before_anything_is_read() -> None:
    assert open_transforms("", [], processes=2, deadline_s=1) is None
    old = open_transforms(f"{MODULE}:die", [MODULE], processes=0, deadline_s=1)
    assert isinstance(old, ProcessTransform), "0, of an earlier version's job, is one process"
    with pytest.raises(AccessDenied, match="not allowed"):
        open_transforms(f"{MODULE}:die", ["elsewhere"], processes=2, deadline_s=1)
    with pytest.raises(AccessDenied, match="not allowed"):
        open_transforms("os.path:join", ["osmium", "pathlib"], processes=2, deadline_s=1)
    for name in ("tests.data.nothing_here:f", f"{MODULE}:nothing", f"{MODULE}:BAD"):
        with pytest.raises(InvalidInput, match=r"no such transform.*every node"):
            require_runnable(name)
