"""Scores that an evaluation need not compute on its node: recorded ones, those of all nodes, and
those of ranks that hold each model together; and which ranks do."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline import data, evaluation
from paceline.client import raised
from paceline.cluster import Node
from paceline.config import EvaluationSettings, MeshSettings, MetricSettings, TrainingSettings
from paceline.errors import InvalidInput, PeerLost, PermanentError, SourceMissing, WorkerLost
from paceline.manifest import Manifest
from paceline.models import CONFIG_FILE, DESCRIBING, json_object, model_digest
from paceline.schemas import (
    UNFINISHED,
    EvaluationSpec,
    RecordedScore,
    digest_of,
    metric_digest,
    score_key,
)
from paceline.tasks._support import sealed_records
from paceline.tasks._support.lineage import sources_version
from paceline.tasks._support.run import Run
from paceline.tasks.publish import published_url
from paceline.tasks.train import place_ranks, slots_of
from paceline.training import Deadlines
from paceline.training.launcher import (
    CANCEL_GRACE_S,
    GangSupervisor,
    Launcher,
    NodePool,
    launcher_argv,
)
from paceline.units import counted

logger = logging.getLogger(__name__)

JUDGING_RANK = "paceline.tasks._support.judging_rank:main"
MAX_FILE_BYTES = 64 * 1024 * 1024  # of a tokenizer

MEMORY_SHARE = 0.7  # of a node's, for a model's weights

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
    run: Run,
    spec: EvaluationSpec,
    models: Mapping[str, dict[str, str]],
    scorer: str = "",
    *,
    others: Sequence[str] | None = None,
) -> dict[str, RecordedScore]:
    """Return what the installation recorded of ``models`` (by ``scorer``, default: ``spec``'s)
    and ``others`` (by ``spec``'s; default: the baselines), by name, on ``spec``'s documents.

    A record that cannot be trusted is named, and its subject is scored again.
    """
    if others is None:
        others = (evaluation.ngram_subject(spec.settings), *evaluation.COMPRESSORS)
    named = {each: each for each in others}
    found: dict[str, RecordedScore] = {}
    for name in (*models, *named):
        try:
            subject = named.get(name) or _model_digest(run, name, **models[name])
            by = (name in models and scorer) or spec.scorer
            key = score_key(subject, spec.snapshot_digest, spec.settings.held_out_bytes, by)
            score = sealed_records.load_score(run, key)
        except PermanentError as error:
            run.warn(f"{name} is scored again: {error.one_line()}")
            continue
        if score is not None:
            found[name] = score
    return found


def unfinished_scores(
    run: Run, spec: EvaluationSpec, models: Mapping[str, dict[str, str]]
) -> tuple[RecordedScore, ...]:
    """Return what an evaluation that was cut off recorded of the first rows of ``models``."""
    of_rows = spec.model_copy(update={"scorer": spec.scorer + UNFINISHED})
    return tuple(recorded_scores(run, of_rows, models, others=()).values())


def metrics_of(run: Run, spec: EvaluationSpec) -> list[MetricSettings]:
    """Return the metrics that are computed on ``spec``'s snapshot."""
    pairs = data.load_snapshot(spec.snapshot_url, run.store).is_paired
    return [*spec.settings.metrics_of(pairs=pairs).values()]


def recorded_besides(
    run: Run, spec: EvaluationSpec, models: dict[str, dict[str, str]]
) -> list[RecordedScore]:
    """Return what the installation recorded of ``models`` on ``spec``'s tasks, and by its
    metrics; and of the comparison with what the candidate was trained on."""
    digests = [spec.tasks_scored] if spec.tasks_url else []
    digests += [metric_digest(spec.snapshot_digest, each) for each in metrics_of(run, spec)]
    of_each = [spec.model_copy(update={"snapshot_digest": each}) for each in digests]
    of_data = spec.model_copy(update={"snapshot_digest": spec.compared_digest})
    compared = recorded_scores(run, of_data, {}, others=(evaluation.TRAINING_DATA,))
    found = [score for each in of_each for score in recorded_scores(run, each, models).values()]
    return [*compared.values(), *found]


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


def scored_bytes(run: Run, spec: EvaluationSpec) -> int:
    """Return how much held-out text of ``spec``'s snapshot is scored, at most."""
    held_out = data.load_snapshot(spec.snapshot_url, run.store).of_split("held-out")
    return min(spec.settings.held_out_bytes, sum(each.text_bytes for each in held_out))


def scores_in_parts(run: Run, spec: EvaluationSpec) -> bool:
    """Return whether so much text is scored that each node scores a part."""
    return scored_bytes(run, spec) >= spec.settings.spread_from_bytes


def scored_in_parts(
    run: Run,
    spec: EvaluationSpec,
    models: Mapping[str, dict[str, str]],
    nodes: Sequence[Node],
    process: Process,
) -> list[RecordedScore]:
    """Score ``spec``'s models (in ``models`` with their digests) on a part of the documents on each
    of ``nodes``, by ``process``, and record parts and whole: the same figures, to the bit, as of
    one node of that kind.

    Leaves out a model that a node cannot score. Raises what ``process`` raises.
    """
    parts: dict[str, dict[int, RecordedScore]] = {}

    def score(number: int) -> None:
        def on_event(line: dict[str, Any]) -> None:
            if line.get("event") == "score":
                found = RecordedScore.model_validate(line["data"])
                sealed_records.save_score(run, found)
                if not found.unfinished:
                    parts.setdefault(found.subject, {})[number] = found
            elif line.get("event") == "progress" and number == 0:
                run.report("evaluate", 0.9 * float(line["data"]["fraction"]), "a part on each node")

        by = f"{spec.scorer}, part {number} of {len(nodes)}"
        share = spec.model_copy(update={"share": (number, len(nodes)), "scorer": by})
        known = recorded_scores(run, share, models, others=())
        for each in known.values():
            parts.setdefault(each.subject, {})[number] = each
        if left := {name: models[name] for name in models if name not in known}:
            begun = unfinished_scores(run, share, left)
            urls = {name: spec.models[name] for name in left}
            todo = {"models": urls, "known": (*known.values(), *begun)}
            process(nodes[number], share.model_copy(update=todo), on_event)

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(score, range(len(nodes))))
    whole = [
        evaluation.joined([by_number[number] for number in range(len(nodes))]).model_copy(
            update={"scorer": spec.scorer}
        )
        for by_number in parts.values()
        if len(by_number) == len(nodes)
    ]
    for each in whole:
        sealed_records.save_score(run, each)
    return whole


@dataclass(frozen=True)
class Gang:
    """The ranks that score each model together, and the nodes that they run on."""

    settings: TrainingSettings  # ranks, mesh, guard
    nodes: tuple[str, ...]
    slots: dict[str, tuple[int, int]]  # see ``run_job``


def judging_gang(
    run: Run,
    nodes: Sequence[Node],
    base: Manifest,
    ranks: int | None,
    *,
    with_tasks: bool,
) -> Gang | None:
    """Return the ranks that score each model together: ``ranks`` of them, or those of the profile;
    else as many as there are where its float32 weights do not fit one node. None: one process
    scores. A note says where part of it stays with one.

    Raises InvalidInput for more ranks than were asked for and the nodes, or the job, have, and what
    ``require_one_process`` does.
    """
    require_one_process(run, base, nodes[-1:])
    settings = run.runtime.profile.evaluation
    asked = settings.ranks if ranks is None else ranks
    if asked % settings.tp and asked > 1:
        raise InvalidInput(
            "tensor parallelism does not divide the ranks that score",
            got=f"{asked} ranks, tp {settings.tp}",
            where="evaluation.tp",
            do="Change one of them.",
        )
    tp = settings.tp if asked else 1
    asked = asked or _needed_ranks(run, nodes, base)
    if asked == 1:
        return None
    mesh = MeshSettings(dp=1, shard=asked // tp, tp=tp)
    gang = _placed(run, nodes, asked, mesh)
    if with_tasks:
        run.warn(
            "tasks of lm-eval and metrics of user code are computed by one process, which holds "
            "each model whole"
        )
    return gang


def _needed_ranks(run: Run, nodes: Sequence[Node], base: Manifest) -> int:
    """Return how many ranks score ``base``: one where a node holds it, else all of ``nodes``."""
    least = min(max(1, node.accelerator_count) for node in nodes)
    count = (run.runtime.profile.training.ranks_per_node or least) * len(nodes)
    if run.job is not None and run.job.placement is not None:
        count = sum(run.job.placement.hosts.values())
    return 1 if count == 1 or _fits(run, base, nodes[-1]) else count


def _placed(run: Run, nodes: Sequence[Node], ranks: int, mesh: MeshSettings) -> Gang:
    placement = None if run.job is None else run.job.placement
    if placement is not None and ranks > (held := sum(placement.hosts.values())):
        raise InvalidInput(
            "more ranks than the job holds",
            got=ranks,
            wanted=f"at most {held}",
            where="evaluation.ranks",
        )
    training = run.runtime.profile.training
    wanted = TrainingSettings(
        ranks=ranks,
        ranks_per_node=training.ranks_per_node,
        batch_sequences=ranks,
        mesh=mesh,
        guard=training.guard.model_copy(update={"spares": 0}),
    )
    settings, names = place_ranks(wanted, nodes, placement)
    return Gang(settings, tuple(names), {} if placement is None else slots_of(placement))


def require_one_process(run: Run, base: Manifest, nodes: Sequence[Node] = ()) -> None:
    """Raise InvalidInput where the profile has tasks or metrics, for which one process holds the
    whole model, and none of ``nodes`` (default: all that Dask reaches now) has the memory for
    ``base``, on an accelerator or beside it."""
    asked = run.runtime.profile.evaluation
    per_job = run.runtime.profile.cluster.per_job  # Dask may reach other jobs' nodes alone
    if not (asked.tasks or asked.metrics) or (per_job and not nodes):
        return
    if not nodes and run.runtime.endpoints.scheduler_address:
        with run.fleet() as fleet:
            nodes = fleet.nodes()
    largest = max(  # where an accelerator has no room, the CPU scores
        (max(each.machine.memory_bytes, _memory_bytes(each)) for each in nodes), default=0
    )
    needed_bytes = _float32_bytes(run, base)
    if largest and needed_bytes > MEMORY_SHARE * largest:
        raise InvalidInput(
            "the model does not fit one process, which tasks and metrics need",
            got=f"{needed_bytes / 1e9:.1f} GB of weights in float32",
            wanted=f"at most {MEMORY_SHARE:.0%} of {largest / 1e9:.1f} GB, the largest memory of "
            f"{', '.join(each.worker_id for each in nodes)}"[:300],
            where=f"{base.model_id} {base.version}",
            do="Leave out evaluation.tasks and evaluation.metrics, or add a node with more memory.",
        )


def _memory_bytes(node: Node) -> int:
    """Return the memory of the largest accelerator of ``node``, or of one without any; 0: not
    known."""
    machine = node.machine
    return max((each.memory_bytes for each in machine.accelerators), default=0) or (
        machine.memory_bytes
    )


def _fits(run: Run, base: Manifest, node: Node) -> bool:
    """Return whether an accelerator of ``node``, or one without any, holds the weights of ``base``
    in float32, beside what it runs; True where that is not known."""
    room_bytes = _memory_bytes(node)
    return not room_bytes or _float32_bytes(run, base) <= MEMORY_SHARE * room_bytes


def _float32_bytes(run: Run, base: Manifest) -> int:
    """Return the size of the weights of ``base`` in float32; 0: it cannot be scored at all, and the
    report says why."""
    url = f"{published_url(run, base.model_id, base.version)}/{CONFIG_FILE}"
    try:
        config = json_object(run.store.get_bytes(url), url)
    except PermanentError:
        return 0
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = sum(each.size for each in base.files if each.path.endswith(".safetensors"))
    return weights * (2 if dtype.endswith("float16") else 1)


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

    A rank that dies ends the attempt; the next one leaves out what is scored, also the first rows
    of a model, as of an unfinished score that ``spec`` knows. A model of user code is left out.
    Raises what a rank raises where it is permanent, WorkerLost after ``guard.max_restarts`` more
    attempts, Cancelled.
    """
    settings, guard = gang.settings, gang.settings.guard
    found: list[RecordedScore] = []
    begun = {each.subject: each for each in spec.known}
    failures: dict[str, str] = {}
    failed: dict[str, Any] = {}
    attempt = 0

    def on_line(line: dict[str, Any]) -> None:
        kind, data = line.get("event"), line.get("data", {})
        if line.get("attempt", attempt) != attempt:  # a late line of ranks that were ended
            return
        if kind == "score":
            score = RecordedScore.model_validate(data)
            sealed_records.save_score(run, score)
            if score.unfinished:
                begun[score.subject] = score
            else:
                found.append(score)
        elif kind == "unscored" and "reason" in data:
            failures[data["model"]] = data["reason"]
        elif kind == "unscored":
            run.warn(f"{data['model']} is scored by one process: code_ref {data['code_ref']}")
        elif kind == "step":
            message = f"{data['message']}, on {counted(settings.ranks, 'rank')}"
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
            done = {"known": (*found, *begun.values()), "failures": dict(failures)}
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
