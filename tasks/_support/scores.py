"""Scores that an evaluation need not compute on its node: recorded ones, those of all nodes, and
those of ranks that hold each model together."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline import data, evaluation
from paceline.client import raised
from paceline.cluster import Node
from paceline.config import EvaluationSettings, TrainingSettings
from paceline.errors import PeerLost, PermanentError, SourceMissing, WorkerLost
from paceline.models import DESCRIBING, model_digest
from paceline.schemas import EvaluationSpec, RecordedScore, digest_of, metric_digest, score_key
from paceline.tasks._support import sealed
from paceline.tasks._support.lineage import sources_version
from paceline.tasks._support.run import Run
from paceline.tasks.publish import published_url
from paceline.training.launcher import (
    CANCEL_GRACE_S,
    Deadlines,
    GangSupervisor,
    Launcher,
    NodePool,
    launcher_argv,
)

logger = logging.getLogger(__name__)

JUDGING_RANK = "paceline.tasks._support.judging_rank:main"
MAX_FILE_BYTES = 64 * 1024 * 1024  # of a tokenizer

OnEvent = Callable[[dict[str, Any]], None]
Process = Callable[[Node, EvaluationSpec, OnEvent], None]


def scorer_version(settings: EvaluationSettings) -> str:
    """Return the versions of all that scores, this release's sources and its libraries', and the
    ``settings`` that its figures of one model depend on."""
    found = [sources_version()]
    for name in ("torch", "transformers", "tokenizers", "numpy", "lm_eval"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    asked = settings.model_dump(mode="json", include={"context", "serving_batch"})
    found += [f"{name} {value}" for name, value in asked.items()]  # defaults are left out
    return ", ".join(found)


def recorded_scores(
    run: Run, spec: EvaluationSpec, models: dict[str, dict[str, str]], scorer: str = ""
) -> dict[str, RecordedScore]:
    """Return what the installation recorded of ``models`` (by ``scorer``, default: ``spec``'s)
    and baselines (by ``spec``'s), by name, on ``spec``'s documents.

    A record that cannot be trusted is named, and its subject is scored again.
    """
    named = {
        each: each for each in (evaluation.ngram_subject(spec.settings), *evaluation.COMPRESSORS)
    }
    found: dict[str, RecordedScore] = {}
    for name in (*models, *named):
        try:
            subject = named.get(name) or _model_digest(run, name, **models[name])
            by = (name in models and scorer) or spec.scorer
            key = score_key(subject, spec.snapshot_digest, spec.settings.held_out_bytes, by)
            score = sealed.find_score(run, key)
        except PermanentError as error:
            run.warn(f"{name} is scored again: {error.one_line()}")
            continue
        if score is not None:
            found[name] = score
    return found


def recorded_besides(
    run: Run, spec: EvaluationSpec, models: dict[str, dict[str, str]]
) -> list[RecordedScore]:
    """Return what the installation recorded of ``models`` on ``spec``'s tasks, and by its
    metrics."""
    digests = [spec.tasks_scored] if spec.tasks_url else []
    metrics = spec.settings.metrics.values()
    digests += [metric_digest(spec.snapshot_digest, each) for each in metrics]
    of_each = [spec.model_copy(update={"snapshot_digest": each}) for each in digests]
    return [found for each in of_each for found in recorded_scores(run, each, models).values()]


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


@dataclass(frozen=True)
class Gang:
    """The ranks that score each model together, and the nodes that they run on."""

    settings: TrainingSettings  # ranks, mesh, guard
    nodes: tuple[str, ...]
    slots: dict[str, tuple[int, int]]  # see ``run_job``


def scored_on_ranks(
    run: Run,
    spec: EvaluationSpec,
    gang: Gang,
    launcher: Launcher,
    *,
    deadline_s: float,
    cancel: threading.Event | None = None,
) -> tuple[list[RecordedScore], dict[str, str]]:
    """Score ``spec``'s models on ``gang``'s ranks, and record each model's figures once it has all
    of them; return them, and why others could not be scored, by model.

    A rank that dies ends the attempt; the next one leaves out what is scored. A model of user code
    is left out. Raises what a rank raises where it is permanent, WorkerLost after
    ``guard.max_restarts`` more attempts, Cancelled.
    """
    settings, guard = gang.settings, gang.settings.guard
    found: list[RecordedScore] = []
    failures: dict[str, str] = {}
    failed: dict[str, Any] = {}
    attempt = 0

    def on_line(line: dict[str, Any]) -> None:
        kind, data = line.get("event"), line.get("data", {})
        if line.get("attempt", attempt) != attempt:  # a late line of ranks that were ended
            return
        if kind == "score":
            found.append(RecordedScore.model_validate(data))
            sealed.keep_score(run, found[-1])
        elif kind == "unscored" and "reason" in data:
            failures[data["model"]] = data["reason"]
        elif kind == "unscored":
            run.warn(f"{data['model']} is scored by one process: code_ref {data['code_ref']}")
        elif kind == "step":
            message = f"{data['message']}, on {settings.ranks} ranks"
            run.report("evaluate", 0.9 * float(data["fraction"]), message)
        elif kind == "failed" and data.get("code") != PeerLost.__name__:
            failed.update(data)
        elif kind == "result":
            logger.info("rank=%s peak_memory_bytes=%s", line["rank"], data["peak_memory_bytes"])

    ranks = {worker: count for worker, (count, _) in gang.slots.items()}
    placed = NodePool(gang.nodes, settings, ranks).assignment({})
    members = [replace(each, env={"PACELINE_WORKER_ID": each.worker_id}) for each in placed.members]
    with launcher.open_nodes(
        gang.nodes, launcher_argv(JUDGING_RANK), wait_s=guard.node_wait_s, cancel=cancel,
        on_wait=run.warn, slots=gang.slots or None, work=run.run_id,
    ) as nodes:  # fmt: skip
        # A model of any size is loaded, or a batch predicted, within what all of it may take.
        deadlines = Deadlines(start_s=deadline_s, step_s=deadline_s, checkpoint_s=deadline_s)
        gangs = GangSupervisor(nodes, deadlines, cancel=cancel, grace_s=CANCEL_GRACE_S)
        for attempt in range(1, guard.max_restarts + 2):
            failed.clear()
            done = {"known": tuple(found), "failures": dict(failures)}
            todo = spec.model_copy(update={"mesh": settings.mesh} | done)
            result = gangs.run_gang(members, todo.model_dump_json(), attempt, on_line)
            if result.ok:
                return found, failures
            if failed:
                kind, said = raised(f"{failed['code']}: {failed['message']}")
                if kind is not None and issubclass(kind, PermanentError):
                    raise kind(said, where=result.failed_worker)
            run.warn(f"ranks that score together ended (attempt {attempt}): {result.reason}")
    raise WorkerLost(
        "ranks that score models together ended",
        got=result.reason,
        wanted=f"at most {guard.max_restarts} restarts, training.guard.max_restarts",
        where=result.failed_worker,
        do="Run the same command again: models that are scored are not scored again.",
    )
