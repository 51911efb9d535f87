"""One rank, in this process: what it trains on, what it refuses, what it leaves behind."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import DataSettings
from paceline.data import build_snapshot
from paceline.errors import (
    CorruptData,
    DataRejected,
    InvalidInput,
    InvalidSnapshot,
    NotSaved,
    StorageFull,
    TrainingFailed,
)
from paceline.manifest import build_manifest, write_manifest
from paceline.models import load_model, weights_digest
from paceline.storage import ObjectStore
from paceline.training.checkpoint import Generations
from paceline.training.launcher import JobTracker, NodePool
from paceline.training.loop import StopFlag
from tests.jobs.test_cost import result
from tests.support.hugging_face import change_weights, write_model
from tests.training.conftest import BUCKET, SETTINGS, Camp


def exported(camp: Camp, url: str, directory: Path) -> Path:
    directory.mkdir()
    for info in camp.store.list(url):
        camp.store.download_file(info.url, directory / info.url.rsplit("/", 1)[1])
    return directory


def test_training_lowers_the_loss_and_exports_a_loadable_model(camp: Camp, tmp_path: Path) -> None:
    code, said = camp.run_alone(camp.job("alone", steps=30))
    assert code == 0
    losses = said.losses
    assert len(losses) == 30
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert losses[-1] < losses[0] - 1
    result = said.of("result")[0].data
    directory = exported(camp, str(result["export_url"]), tmp_path / "e")
    load_model(directory)
    assert weights_digest(directory) == result["weights_digest"] != camp.base_digest
    kept = Generations(camp.store, f"s3://{BUCKET}/checkpoints/alone").steps()
    assert len(kept) == 3, "as many generations as asked for"
    assert kept[0] == 30, "the last step is saved, even where an earlier save was in its way"
    assert said.of("step")[0].data.keys() >= {
        "loss",
        "tokens_per_second",
        "grad_norm",
        "lr",
        "data_wait_share",
        "mfu",
        "busy_seconds",
        "rss_peak_bytes",
    }


def test_a_rank_reports_what_it_read_from_the_store(camp: Camp) -> None:
    job = camp.job("counted", steps=8)
    _, said = camp.run_alone(job)
    first, last = said.of("resumed")[0].data["read_bytes"], said.of("step")[-1].data["read_bytes"]
    assert 0 < first <= last
    _, again = camp.run_alone(job)
    saved = said.of("checkpoint")[-1].data["bytes"]
    assert again.of("resumed")[0].data["read_bytes"] > saved, "the checkpoint that it resumed"


def test_bytes_read_are_added_up_over_ranks_and_attempts(camp: Camp) -> None:
    account, seen = JobTracker(camp.job("summed"), 0.0), []
    for attempt in (1, 2):
        account.begin(attempt, 2)
        for rank, read in ((1, 30), (0, 100), (1, 50), (0, 120)):
            line = {"event": "step", "rank": rank, "attempt": attempt, "step": attempt,
                    "data": {"read_bytes": read}}  # fmt: skip
            event = account.on_line(line, 1.0)
            seen += [event.data["read_bytes"]] if event and rank == 0 else []
    assert seen == [130, 170, 300, 340]
    done = result().model_dump(mode="json", include={"steps", "first_loss", "final_loss",
        "tokens_per_second", "data_wait_share", "checkpoint_stall_share", "export_url",
        "weights_digest", "checkpoints", "config_digest"})  # fmt: skip
    account.on_line({"event": "result", "rank": 0, "attempt": 2, "step": 2, "data": done}, 2.0)
    assert account.result(3.0, NodePool(["node-0"], SETTINGS), 2).read_bytes == 340


def test_zero_steps_export_the_base_unchanged(camp: Camp) -> None:
    code, said = camp.run_alone(camp.job("zero", steps=0))
    assert code == 0
    result = said.of("result")[0].data
    assert result["weights_digest"] == camp.base_digest
    assert result["first_loss"] is None
    shards = camp.snapshot.of_split("train")  # of bytes: each is a token
    assert (
        result["epoch_tokens"] == result["epoch_bytes"] == sum(each.text_bytes for each in shards)
    )
    assert result["epoch_documents"] == sum(each.documents for each in shards)


def test_the_control_learns_from_other_targets(camp: Camp) -> None:
    control = camp.run_alone(camp.job("control", steps=2, labels="shuffled"))[1]
    true = camp.run_alone(camp.job("true", steps=2))[1]
    assert control.losses != true.losses


def test_a_stop_whose_state_cannot_be_saved_says_so(
    camp: Camp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageFull("disk is full", do="Free space.")

    stop = StopFlag()
    stop._asked = True
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload_file", full)
        code, said = camp.run_alone(camp.job("unsaved"), stop)
    assert code == NotSaved.exit_code, "143 would say that the state is saved"
    (failed,) = said.of("failed")
    assert (failed.data["code"], failed.data["stopped"]) == ("NotSaved", True)
    assert "disk is full" in failed.data["message"]
    generations = Generations(camp.store, f"s3://{BUCKET}/checkpoints/unsaved").find()
    assert (generations.committed, generations.unfinished) == ((), ())


def test_divergence_stops_with_a_reason_and_leaves_the_last_checkpoint(camp: Camp) -> None:
    with pytest.raises(TrainingFailed, match=r"diverged|no usable loss"):
        camp.run_alone(
            camp.job("nan", learning_rate=1e30, warmup_steps=0, checkpoints={"every_steps": 1})
        )
    generations = Generations(camp.store, f"s3://{BUCKET}/checkpoints/nan")
    for step in generations.steps():
        assert step < 24


def test_another_purpose_is_refused_by_the_rank_too(camp: Camp) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        camp.run_alone(camp.job("purpose", purpose="advertising"))
    allowed = camp.job("allowed", purpose="advertising", data_label="tests", steps=1)
    assert camp.run_alone(allowed)[0] == 0, "the table of purposes allows this label for it"


def test_another_snapshot_than_the_jobs_is_refused(camp: Camp) -> None:
    with pytest.raises(InvalidInput, match="another snapshot"):
        camp.run_alone(camp.job("snapshot", snapshot_digest="0" * 64))


def test_another_model_or_a_damaged_one_is_refused(camp: Camp, base_dir: Path) -> None:
    with pytest.raises(InvalidInput, match="another model"):
        camp.run_alone(camp.job("model", manifest_digest="0" * 64))
    with pytest.raises(InvalidInput, match="not on this node"):
        camp.run_alone(camp.job("version", version="v2"))
    damaged = base_dir.with_name("v3")
    shutil.copytree(base_dir, damaged)
    try:
        victim = max(damaged.glob("*.safetensors"))
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(bytes(data))
        with pytest.raises(CorruptData):
            camp.run_alone(camp.job("damaged", version="v3"))
    finally:
        shutil.rmtree(damaged)


def test_tied_weights_that_differ_are_refused_before_training(camp: Camp, base_dir: Path) -> None:
    tied = write_model("qwen2", base_dir.with_name("tied"), max_position_embeddings=4096)
    try:
        for added, words in ((0.0, None), (1.0, "tied weights differ")):
            change_weights(
                tied,
                lambda found, by=added: found.update(
                    {"lm_head.weight": found["model.embed_tokens.weight"] + by}
                ),
            )
            (tied / "manifest.json").unlink(missing_ok=True)
            manifest = build_manifest(tied, model_id="tiny", version="tied", link_mbit=100)
            write_manifest(tied, manifest)
            job = camp.job(
                f"tied-{added}", version="tied", manifest_digest=manifest.digest, steps=1
            )
            if words is None:
                assert camp.run_alone(job)[0] == 0
                continue
            with pytest.raises(InvalidInput, match=words):
                camp.run_alone(job)
    finally:
        shutil.rmtree(tied)


def test_a_checkpoint_of_other_settings_is_not_continued(camp: Camp) -> None:
    camp.run_alone(camp.job("settings", steps=2))
    with pytest.raises(TrainingFailed, match="another configuration"):
        camp.run_alone(camp.job("settings", steps=2, learning_rate=1e-4))


def test_a_bad_data_shard_is_passed_over_and_named(camp: Camp, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        body = "".join(f"other {n} of file {number} is {n * number}\n" for n in range(30))
        (texts / f"{number}.txt").write_text(body)
    settings = DataSettings(shard_bytes=4096, purpose="tests", held_out_share=0.2)
    snapshot = build_snapshot(str(texts), f"s3://{BUCKET}/bad-data", settings, camp.store)
    victim = snapshot.of_split("train")[0]
    where = {"snapshot_url": snapshot.url, "snapshot_digest": snapshot.digest}
    camp.store.put_bytes(snapshot.shard_url(victim), b"x" * victim.bytes)
    code, said = camp.run_alone(camp.job("bad-shard", **where))
    assert code == 0
    assert said.of("result")[0].data["quarantined_shards"] == [victim.sha256]
    assert len(said.losses) == 24
    for shard in snapshot.of_split("train"):
        camp.store.delete(snapshot.shard_url(shard))
    shutil.rmtree(camp.runtime.node_dir("node-0") / "cache")
    with pytest.raises(DataRejected, match="too many"):
        camp.run_alone(camp.job("bad-shards", **where))


PRELOADED = """
import importlib, pkgutil, sys
from paceline.training.loop import rank
rank.preload()
assert "paceline.schemas.command_results" not in sys.modules, "records of commands"
before = set(sys.modules)
for name in ("loop", "strategies", "parallel", "metrics"):
    package = importlib.import_module(f"paceline.training.{name}")
    for each in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(each.name)
print(*sorted(each for each in set(sys.modules) - before if not each.startswith("paceline")))
"""


@pytest.mark.nightly
def test_a_forked_rank_imports_no_library_again() -> None:
    command = [sys.executable, "-c", PRELOADED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [], "imported once a launcher, not once a rank"
