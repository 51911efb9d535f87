"""What a job may not, or cannot, learn from is refused when it is submitted: no rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DataSettings, Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.data import Snapshot, build_snapshot
from paceline.errors import InvalidInput, InvalidSnapshot, SourceMissing
from paceline.models import CONFIG_FILE, config_for
from paceline.schemas import TrainJob, canonical_json, digest_of
from paceline.storage import DiskStore
from paceline.training.launcher import admit, require_data
from tests.data.test_formats import built, tokenizer_file

__all__ = ["tokenizer_file"]  # a fixture


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    made = Runtime(profile=Profile(), state_dir=tmp_path, endpoints=Endpoints(), secrets=Secrets())
    save_runtime(made)
    return made


def job(runtime: Runtime, snapshot: Snapshot, **changes: Any) -> TrainJob:
    fields = {
        "job_id": "job",
        "run_id": "run-20260101-000000-abcdef",
        "state_dir": str(runtime.state_dir),
        "model_id": "tiny",
        "version": "v1",
        "manifest_digest": "0" * 64,
        "snapshot_url": snapshot.url,
        "snapshot_digest": snapshot.digest,
        "purpose": "tests",
        "checkpoint_url": "file:///nowhere/checkpoints",
        "settings": {},
    }
    return TrainJob.model_validate(fields | changes)


def base(runtime: Runtime, **changes: Any) -> None:
    directory = runtime.node_dir("node-0") / "store" / "models" / "tiny" / "v1"
    directory.mkdir(parents=True, exist_ok=True)
    config = config_for(30_000, 16, **changes)
    (directory / CONFIG_FILE).write_text(config.model_dump_json())


def test_purpose_project_tokenizer_and_vocabulary_must_be_the_jobs(
    runtime: Runtime, tmp_path: Path, tokenizer_file: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for n in range(6):
        (source / f"{n}.txt").write_text(f"alpha {n} " * 30)
    plain = built(source, tmp_path / "store")
    tokenised = built(source, tmp_path / "store", tokenizer=str(tokenizer_file))
    digest = tokenised.vocabulary.sha256
    assert digest
    require_data(job(runtime, plain), "node-0", plain)  # the base is on another machine
    base(runtime)
    require_data(job(runtime, plain), "node-0", plain)
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        require_data(job(runtime, plain, purpose="medical"), "node-0", plain)
    elsewhere = DataSettings(project="elsewhere")
    with pytest.raises(InvalidSnapshot, match="another project"):
        require_data(job(runtime, plain, data=elsewhere), "node-0", plain)
    with pytest.raises(InvalidInput, match="different tokenizers"):
        require_data(job(runtime, tokenised), "node-0", tokenised)
    base(runtime, vocabulary=5, separator=1, tokenizer_digest=digest)
    require_data(job(runtime, tokenised), "node-0", tokenised)
    with pytest.raises(InvalidInput, match="different tokenizers"):
        require_data(job(runtime, plain), "node-0", plain)
    base(runtime, vocabulary=4, separator=1, tokenizer_digest=digest)
    with pytest.raises(InvalidInput, match="more tokens than the model"):
        require_data(job(runtime, tokenised), "node-0", tokenised)


def test_frames_alone_are_for_a_users_own_model(runtime: Runtime, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rows = [{"key": f"k{n}", "frames": [[n, n]]} for n in range(6)]
    (source / "all.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    settings = DataSettings(format="jsonl", purpose="tests")
    store = DiskStore()
    frames = build_snapshot(str(source), DiskStore.url_of(tmp_path / "store"), settings, store)
    base(runtime)
    with pytest.raises(InvalidSnapshot, match=r"no tokens.*got columns frames"):
        require_data(job(runtime, frames), "node-0", frames)
    own = {"code_ref": "package.module:function"}
    apart = {"batching": "carried"}
    require_data(job(runtime, frames, settings=own, data=apart), "node-0", frames)


def test_an_untrustworthy_record_is_refused_before_any_rank_starts(
    runtime: Runtime, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for n in range(6):
        (source / f"{n}.txt").write_text(f"alpha {n}")
    plain = built(source, tmp_path / "store")
    record = Path(plain.url.removeprefix("file://")) / "snapshot.json"
    store = DiskStore()
    admit(job(runtime, plain), "node-0", store)

    def planted(change: Any) -> TrainJob:
        fields = json.loads(record.read_bytes())
        change(fields)
        digest = digest_of(fields)
        directory = record.parent.parent / digest
        directory.mkdir()
        (directory / "snapshot.json").write_bytes(canonical_json(fields))
        url = f"{plain.url.rsplit('/', 1)[0]}/{digest}"
        return job(runtime, plain, snapshot_url=url, snapshot_digest=digest)

    def emptied(fields: dict[str, Any]) -> None:
        first = fields["shards"][0]
        fields["total_bytes"] -= first["text_bytes"]
        fields["token_count"] -= first["token_count"]
        first["text_bytes"] = first["token_count"] = 0

    def one_sided(fields: dict[str, Any]) -> None:
        for each in fields["shards"]:
            each["split"] = "train"

    with pytest.raises(InvalidSnapshot, match=r"shard [0-9a-f]{12} is empty"):
        admit(planted(emptied), "node-0", store)
    with pytest.raises(InvalidSnapshot, match="a split is empty"):
        admit(planted(one_sided), "node-0", store)
    gone = job(runtime, plain, snapshot_url=f"{plain.url.rsplit('/', 1)[0]}/{'0' * 64}")
    with pytest.raises(SourceMissing, match="no snapshot here"):
        admit(gone, "node-0", store)
