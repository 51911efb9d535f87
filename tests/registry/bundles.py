"""Evidence for tests: whole, consistent, and different for every ``seed``."""

from __future__ import annotations

import hashlib

from paceline.schemas import (
    EvaluationReport,
    Evidence,
    GateCheck,
    GateDecision,
    Interval,
    ModelScore,
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_evidence(
    model_id: str, seed: str, *, passed: bool = True, approver: str | None = None
) -> Evidence:
    bits = Interval(value=2.5, low=2.4, high=2.6)
    score = ModelScore(
        name="candidate",
        kind="transformer",
        bits_per_byte=bits,
        weights_digest=digest(f"weights {seed}"),
    )
    check = GateCheck(name="better than base", passed=passed, got="-0.3", wanted="below 0")
    return Evidence(
        run_id="run-20261120-153600-9f3a1c",
        model_id=model_id,
        manifest_digest=digest(f"manifest {model_id} {seed}"),
        weights_digest=digest(f"weights {seed}"),
        base_version="v1",
        base_manifest_digest=digest("base"),
        snapshot_digest=digest("snapshot"),
        job_id=f"job-{seed}",
        training_config_digest=digest("config"),
        code_version="abc123",
        evaluation=EvaluationReport(
            snapshot_digest=digest("snapshot"),
            documents=10,
            bytes=1000,
            scores=(score,),
            slices=({"slice": "size", "bits_per_byte": 2.25},),
            seconds=1.0,
        ),
        gate=GateDecision(passed=passed, checks=(check,)),
        approver=approver,
    )
