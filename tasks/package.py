"""The directory of a candidate as it would be published: its weights, card and version.

The next step, the gate, sees the digest of exactly these files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.data import Snapshot, load_snapshot
from paceline.errors import Conflict, CorruptData, PermanentError, SourceMissing
from paceline.evaluation import model_card
from paceline.manifest import Manifest, build_manifest, fetch_manifest, scan_model
from paceline.models import (
    CARD_FILE,
    MAX_CARD_BYTES,
    PROGRAM_FILE,
    file_sha256,
    is_pretrained,
)
from paceline.schemas import Evaluation, TrainResult, digest_of
from paceline.tasks._support.run import Run, StageResult
from paceline.tasks._support.stages import stage
from paceline.tasks.publish import published_url

MAX_VERSIONS = 10_000  # of one base; each is one look into the bucket


@stage("package-candidate", retries=2)
def package_candidate(
    run: Run, base: Manifest, trained: TrainResult, evaluation: Evaluation
) -> StageResult:
    """Fetch the export, write its card, give it the next free version, and compute its manifest:
    the digest that the gate judges is the digest that will be published."""

    def work() -> dict[str, Any]:
        directory = candidate_dir(run, trained)
        card = model_card(
            evaluation,
            trained,
            _base_card(run, base),
            is_pretrained=is_pretrained(directory),
            data=_learned_from(run, trained),
        )
        manifest, card = _named(run, base, directory, card)
        run.registry.log_artifact_text(run.mlflow_run, card, CARD_FILE)
        return {
            "card": card,
            "version": manifest.version,
            "manifest_digest": manifest.digest,
            **_sizes({each.path: each.size for each in manifest.files}),
            "piece_bytes": manifest.piece_bytes,
            "piece_hash": manifest.piece_hash,
            "chunk_bytes": manifest.chunk_bytes,
        }

    def still_free(output: dict[str, Any]) -> bool:
        taken = _published(run, base.model_id, str(output["version"]))
        return taken is None or taken.digest == output["manifest_digest"]

    packaged = run.stage(
        "package",
        {
            "weights": trained.weights_digest,
            "export": trained.export_url,
            "model": base.model_id,
            "after": base.version,
            "evaluation": digest_of(evaluation),
        },
        work,
        still_true=still_free,
        describe=lambda o: f"{base.model_id} v{o['version']}, manifest {o['manifest_digest'][:12]}",
    )
    if not packaged.reused:
        return packaged
    # What the gate limits is measured, not read from the ledger: other callers may write there.
    output = packaged.output
    published = _published(run, base.model_id, str(output["version"]))
    if published is None or published.digest != output["manifest_digest"]:
        held = {each.path: each.size for each in scan_model(candidate_dir(run, trained))}
        held[CARD_FILE] = len(output["card"].encode())
    else:
        held = {each.path: each.size for each in published.files}
    return replace(packaged, output=output | _sizes(held))


def _sizes(held: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of all files of a candidate, and of its largest file of weights."""
    weights = [size for path, size in held.items() if path.endswith(".safetensors")]
    return {"bytes": sum(held.values()), "file_bytes": max(weights)}


def next_version(version: str) -> str:
    """Return the version after ``version``: its last number, one higher (``"1"`` → ``"2"``)."""
    head, dot, tail = version.rpartition(".")
    return f"{head}{dot}{int(tail) + 1}" if tail.isdigit() else f"{version}.1"


def _learned_from(run: Run, trained: TrainResult) -> Snapshot | None:
    """Return the training's snapshot; None where its record is not there any more."""
    if trained.snapshot_url is None:  # of an older version
        return None
    try:
        return load_snapshot(trained.snapshot_url, run.store)
    except PermanentError:
        return None


def _base_card(run: Run, base: Manifest) -> str:
    """Return the README.md of the base model; "" where it has none that can be read."""
    url = f"{published_url(run, base.model_id, base.version)}/{CARD_FILE}"
    held = [each for each in base.files if each.path == CARD_FILE]
    if not held or held[0].size > MAX_CARD_BYTES:
        return ""
    return run.store.get_bytes(url, MAX_CARD_BYTES).decode("utf-8", errors="replace")


def _named(run: Run, base: Manifest, directory: Path, card: str) -> tuple[Manifest, str]:
    """Return the manifest of ``directory`` with ``card`` under the first version after the base's
    that is free, and the card. A candidate that is published already keeps its version, and the
    card that it got with its first evaluation."""
    profile = run.runtime.profile
    (directory / CARD_FILE).write_text(card)

    def built(version: str) -> Manifest:
        return build_manifest(
            directory,
            model_id=base.model_id,
            version=version,
            link_mbit=profile.cluster.link_mbit,
            piece_bytes=profile.relay.piece_bytes,
            chunk_bytes=profile.relay.chunk_bytes,
            piece_hash=profile.security.piece_hash,
        )

    version = next_version(base.version)
    first = built(version)
    for _ in range(MAX_VERSIONS):
        taken = _published(run, base.model_id, version)
        if taken is None:
            return (first if first.version == version else built(version)), card
        if _files(taken) == _files(first):
            url = f"{published_url(run, base.model_id, version)}/{CARD_FILE}"
            card = run.store.get_bytes(url, MAX_CARD_BYTES).decode()
            (directory / CARD_FILE).write_text(card)
            return taken, card
        version = next_version(version)
    raise Conflict(
        "no free version is left",
        got=f"{MAX_VERSIONS} published after {base.version}",
        where=published_url(run, base.model_id, base.version),
        do="Delete versions that nobody needs from the bucket.",
    )


def _files(manifest: Manifest) -> list[tuple[str, int, str]]:
    """Return what makes two versions the same model: all files but the card."""
    held = [each for each in manifest.files if each.path != CARD_FILE]
    return [(each.path, each.size, each.sha256) for each in held]


def _published(run: Run, model_id: str, version: str) -> Manifest | None:
    try:
        return fetch_manifest(published_url(run, model_id, version), run.store)
    except SourceMissing:
        return None


def candidate_dir(run: Run, trained: TrainResult) -> Path:
    """Return a local copy of the export, fetched once and checked against its weights digest."""
    from paceline.models import weights_digest

    directory = run.work_dir / "candidate"
    if directory.is_dir() and weights_digest(directory) == trained.weights_digest:
        _require_program(directory, trained)
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    fresh = run.work_dir / "candidate.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    prefix = trained.export_url.rstrip("/") + "/"
    for item in run.store.list(prefix):
        path = fresh / item.url.removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        run.store.download_file(item.url, path)
    if (got := weights_digest(fresh)) != trained.weights_digest:
        raise CorruptData(
            "the export does not match its digest",
            got=got,
            wanted=trained.weights_digest,
            where=trained.export_url,
            do="Run the training stage again.",
        )
    _require_program(fresh, trained)
    fresh.rename(directory)
    return directory


def _require_program(directory: Path, trained: TrainResult) -> None:
    """Raise CorruptData where ``directory`` has another program than the training recorded."""
    path = directory / PROGRAM_FILE
    got = file_sha256(path) if path.is_file() else "none"
    wanted = trained.program.sha256 if trained.program else "none"
    if got != wanted:
        raise CorruptData(
            f"the export's {PROGRAM_FILE} is not what the training wrote",
            got=got,
            wanted=wanted,
            where=trained.export_url,
            do="Run the training stage again.",
        )
