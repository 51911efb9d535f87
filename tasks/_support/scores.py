"""Scores that an evaluation need not compute on its node: recorded ones, and those of all nodes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline import data, evaluation
from paceline.cluster import Node
from paceline.errors import PermanentError, SourceMissing
from paceline.models import DESCRIBING, model_digest
from paceline.schemas import EvaluationSpec, RecordedScore, digest_of, score_key
from paceline.tasks._support import sealed
from paceline.tasks._support.lineage import sources_version
from paceline.tasks._support.run import Run
from paceline.tasks.publish import published_url

MAX_FILE_BYTES = 64 * 1024 * 1024  # of a tokenizer

OnEvent = Callable[[dict[str, Any]], None]
Process = Callable[[Node, EvaluationSpec, OnEvent], None]


def scorer_version() -> str:
    """Return the versions of all that scores: this release's sources and its libraries'."""
    found = [sources_version()]
    for name in ("torch", "transformers", "tokenizers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def recorded_scores(
    run: Run, spec: EvaluationSpec, models: dict[str, dict[str, str]]
) -> dict[str, RecordedScore]:
    """Return what the installation recorded of ``models`` and baselines, by name, on ``spec``'s
    documents.

    A record that cannot be trusted is named, and its subject is scored again.
    """
    named = {
        each: each for each in (evaluation.ngram_subject(spec.settings), *evaluation.COMPRESSORS)
    }
    found: dict[str, RecordedScore] = {}
    for name in (*models, *named):
        try:
            subject = named.get(name) or _model_digest(run, name, **models[name])
            key = score_key(
                subject, spec.snapshot_digest, spec.settings.held_out_bytes, spec.scorer
            )
            score = sealed.find_score(run, key)
        except PermanentError as error:
            run.warn(f"{name} is scored again: {error.one_line()}")
            continue
        if score is not None:
            found[name] = score
    return found


def _model_digest(run: Run, name: str, url: str, digest: str) -> str:
    """Return the digest by which the node will know the model's files. A guess where they changed
    since: the node uses no score of other files than it has."""
    if name == "candidate":
        files = {}
        for each in DESCRIBING:
            with contextlib.suppress(SourceMissing):
                content = run.store.get_bytes(f"{url.rstrip('/')}/{each}", MAX_FILE_BYTES)
                files[each] = hashlib.sha256(content).hexdigest()
        return model_digest(digest, files)
    if url.startswith("node:"):
        url = published_url(run, *url.removeprefix("node:").rsplit("/", 1))
    files = {each.path: each.sha256 for each in run.manifest(url).files}
    weights = {each: sha256 for each, sha256 in files.items() if each.endswith(".safetensors")}
    return model_digest(digest_of(weights), files)


def scores_in_parts(run: Run, spec: EvaluationSpec) -> bool:
    """Return whether so much text is scored that each node scores a part."""
    held_out = data.load_snapshot(spec.snapshot_url, run.store).of_split("held-out")
    scored_bytes = min(spec.settings.held_out_bytes, sum(each.text_bytes for each in held_out))
    return scored_bytes >= spec.settings.spread_from_bytes


def scored_in_parts(
    run: Run, spec: EvaluationSpec, nodes: Sequence[Node], process: Process
) -> list[RecordedScore]:
    """Score ``spec``'s models on a part of the documents on each of ``nodes``, by ``process``, and
    record the whole: the same figures, to the bit, as of one node of that kind.

    Leaves out a model that a node cannot score. Raises what ``process`` raises.
    """
    parts: dict[str, dict[int, RecordedScore]] = {}

    def score(number: int) -> None:
        def on_event(line: dict[str, Any]) -> None:
            if line.get("event") == "score":
                found = RecordedScore.model_validate(line["data"])
                parts.setdefault(found.subject, {})[number] = found
            elif line.get("event") == "progress" and number == 0:
                run.report("evaluate", 0.9 * float(line["data"]["fraction"]), "a part on each node")

        share = spec.model_copy(update={"share": (number, len(nodes))})
        process(nodes[number], share, on_event)

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(score, range(len(nodes))))
    whole = [
        evaluation.joined([by_number[number] for number in range(len(nodes))])
        for by_number in parts.values()
        if len(by_number) == len(nodes)
    ]
    for each in whole:
        sealed.keep_score(run, each)
    return whole
