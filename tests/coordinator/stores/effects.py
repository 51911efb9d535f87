"""Things to keep, made up: small ones, large ones, and what a store should give back for them."""

from __future__ import annotations

import hashlib
import random

from paceline.coordinator.state import (
    Drop,
    DropDeployment,
    EmitEvent,
    LoadedDeployment,
    LoadedState,
    PersistedState,
    Save,
    SaveDeployment,
    SaveIdempotencyKey,
    SavePlan,
)
from paceline.manifest import Chunk, FileEntry, Manifest
from paceline.schemas import (
    Deployment,
    DeploymentStatus,
    EventName,
    JobRank,
    JobReport,
    JobState,
    Labels,
    Plan,
    Receipt,
    Scope,
    StageRecord,
    SubmitJob,
    TokenRecord,
    TrainingJob,
    Worker,
)

DIGEST = "0" * 64


def worker(name: str, incarnation: int = 1) -> Save:
    return Save(
        Worker(
            worker_id=name,
            hostname="h",
            labels=Labels(),
            address="127.0.0.1:1",
            available_storage=1,
            link_mbit=80,
            incarnation=incarnation,
        )
    )


def manifest(version: str, pieces: int = 8) -> Manifest:
    """Digests of many pieces are as good as random: they do not compress."""
    source = random.Random(version)
    digests = tuple(source.randbytes(32).hex() for _ in range(pieces))
    digest = hashlib.sha256(version.encode()).hexdigest()
    size = pieces * 1024
    chunks = tuple(
        Chunk(n, at, min(8192, size - at), digest) for n, at in enumerate(range(0, size, 8192))
    )
    file = FileEntry("model.bin", size, digest, digests)
    return Manifest(
        model_id="m",
        version=version,
        piece_bytes=1024,
        chunk_bytes=8192,
        files=(file,),
        chunks=chunks,
    )


def deployment(
    name: str, version: str = "v1", pieces: int = 8, *, new: bool = True, epoch: int = 0
):
    made = manifest(version, pieces)
    record = Deployment(
        deployment_id=name,
        model_id="m",
        version=version,
        status=DeploymentStatus.INIT,
        source_url="s3://b/m",
        manifest_digest=made.digest,
        total_bytes=pieces * 1024,
        total_chunks=len(made.chunks),
        total_pieces=pieces,
        target_workers=("w0",),
        topology="chain",
        epoch=epoch,
        max_failed=0.0,
        started_at=1.0,
    )
    return SaveDeployment(record, PersistedState(created_s=5.0, seed=epoch), made if new else None)


def plan(name: str, epoch: int) -> SavePlan:
    return SavePlan(
        Plan(
            deployment_id=name,
            epoch=epoch,
            topology="chain",
            manifest_digest=DIGEST,
            workers=(),
            predicted_seconds=1,
            bound_seconds=1,
            cross_rack_bytes=0,
            origin_bytes=0,
            depth=1,
        )
    )


def receipt(name: str, worker_id: str, seconds: float = 1.0) -> Save:
    counts = ("total", "received", "origin", "reused", "refetched", "sent")
    return Save(
        Receipt(
            deployment_id=name,
            worker_id=worker_id,
            incarnation=1,
            model_id="m",
            version="v1",
            manifest_digest=DIGEST,
            path="/p",
            reused_pieces=0,
            corrupt_pieces=0,
            seconds=seconds,
            **{f"{each}_bytes": 1 for each in counts},
        )
    )


def job(name: str, ranks: int) -> TrainingJob:
    """A job that runs with so many ranks, each on a host whose name does not compress."""
    source = random.Random(name)
    gang = tuple(
        JobRank(rank=rank, host=source.randbytes(16).hex(), state="running", last_heartbeat=1.0)
        for rank in range(ranks)
    )
    return TrainingJob(
        job_id=name,
        submission_id=DIGEST,
        spec=SubmitJob(model_id="m", version="v1", data_snapshot="s3://b/s"),
        run_id="run-20260101-000000-000000",
        state=JobState.RUNNING,
        created_at=1.0,
        updated_at=2.0,
        report=JobReport(at=2.0, workers=gang),
    )


# the record of a job in the ledger of the release before (140152f5)
EARLIER_JOB = """{"job_id": "tj-000000000000", "submission_id":
"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "spec": {"model_id": "m",
"version": "1", "data_snapshot": "s3://b/data/snapshots/0", "code_ref": "", "resources": {
"ranks": 0, "ranks_per_node": 0, "accelerator": "", "memory_bytes": 0, "capacity": "",
"within": "fleet"},
"checkpoint_policy": null, "parameters": {"training.steps": 50}, "seed": null, "labels": "true",
"continue_from": "", "name": "", "team": "", "project": "", "priority": 0},
"run_id": "run-20261125-000000-000000", "state": "paused", "reason": "", "wanted": "run",
"created_at": 1.0, "updated_at": 2.0, "started_at": 1.5, "ended_at": null, "submitted_by": "ann",
"attempt": 1, "losses": 0, "preemptions": 0, "adopted": false, "flow_run_id": "f",
"placement": {"hosts": {"w0": 2}, "level": "host", "score": 0.0}, "report": {"flow_run_id": "f",
"at": 2.0, "training_id": "job-000000000000", "attempt": 1, "step": 10, "steps": 50, "metrics": {},
"checkpoints": [{"step": 10, "object_ref": "s3://b/c", "metrics": {}, "created_at": 2.0}],
"workers": [], "notes": [], "outcome": null, "error": "", "review": ""},
"history": [{"state": "queued", "at": 1.0, "reason": "", "by": "ann"},
{"state": "paused", "at": 2.0, "reason": "", "by": ""}]}"""


def token(name: str, at: float = 1.0) -> Save:
    record = TokenRecord(
        token_id=name,
        name=name,
        scopes=(Scope.READ,),
        sha256=DIGEST,
        created_at=at,
        key_sha256=DIGEST,
        admission="first",
        begun_at=at + 1,
        replaced_at=at + 2,
        nodes=3,
        joined=1,
        networks=("10.0.0.0/8",),
    )
    return Save(record)


def told(number: int = 0, **more) -> EmitEvent:
    fields = {"deployment_id": None, "worker_id": "w0", **more}
    return EmitEvent(EventName.WORKER_LOST, float(number), data={"number": number}, **fields)


def stage(name: str, seconds: float = 1.0) -> StageRecord:
    return StageRecord(
        stage=name,
        input_digest=DIGEST,
        output={"answer": 42},
        output_digest=DIGEST,
        run_id="r",
        seconds=seconds,
        finished_at=2.0,
    )


def expected(effects: list[object]) -> LoadedState:
    """What any store gives back after committing ``effects``, one after another."""
    made: dict[str, SaveDeployment] = {}
    manifests: dict[str, Manifest] = {}
    plans: dict[str, dict[int, Plan]] = {}
    receipts: dict[str, dict[str, Receipt]] = {}
    workers, tokens = {}, {}
    keys: dict[str, SaveIdempotencyKey] = {}
    for each in effects:
        match each:
            case SaveDeployment(record, _, given):
                if given is not None:
                    manifests[record.deployment_id] = given
                if record.deployment_id in manifests:
                    made[record.deployment_id] = each
            case SavePlan(one):
                plans.setdefault(one.deployment_id, {})[one.epoch] = one
            case Save(Receipt() as one):
                receipts.setdefault(one.deployment_id, {})[one.worker_id] = one
            case Save(Worker() as one):
                workers[one.worker_id] = one
            case Save(TokenRecord() as one):
                tokens[one.token_id] = one
            case Drop(kind, (name,)):
                {Worker: workers, TokenRecord: tokens}[kind].pop(name, None)
            case SaveIdempotencyKey(key):
                keys[key] = each
            case DropDeployment(name):
                for table in (made, manifests, plans, receipts):
                    table.pop(name, None)
                keys = {key: kept for key, kept in keys.items() if kept.deployment_id != name}
    return LoadedState(
        deployments=tuple(
            LoadedDeployment(
                deployment=each.deployment,
                persisted=PersistedState.from_json(each.persisted.to_json()),
                manifest=manifests[name],
                plan=max(plans[name].values(), key=lambda p: p.epoch) if name in plans else None,
                receipts=tuple(one for _, one in sorted(receipts.get(name, {}).items())),
            )
            for name, each in made.items()
        ),
        workers=tuple(one for _, one in sorted(workers.items())),
        keys=tuple(one for _, one in sorted(keys.items())),
        tokens=tuple(one for _, one in sorted(tokens.items())),
    )
