"""Judge a candidate on held-out files, on a node, in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.client import raised
from paceline.cluster import Fleet, Node
from paceline.config import EvaluationSettings, Profile
from paceline.data import ChatTemplate, load_snapshot, template_files
from paceline.errors import Conflict, InvalidInput, PermanentError, SourceMissing, WorkerLost
from paceline.evaluation import (
    AllowedCode,
    as_markdown,
    download_model,
    plot_report,
    read_tasks,
    require_metrics,
)
from paceline.extras import is_installed, require_extras
from paceline.manifest import Manifest, publish_model
from paceline.models import CONFIG_FILE, TOKENIZER_FILE, file_sha256, json_object, user_code_of
from paceline.registry import lineage
from paceline.schemas import (
    Evaluated,
    Evaluation,
    EvaluationReport,
    EvaluationSpec,
    Evidence,
    RecordedScore,
    TrainingData,
    TrainResult,
    digest_of,
)
from paceline.system import PYTHON
from paceline.tasks._support import artifacts, cancelling, sealed_records
from paceline.tasks._support.lineage import log_page
from paceline.tasks._support.run import Run
from paceline.tasks._support.scores import (
    Gang,
    OnEvent,
    Process,
    judging_gang,
    metrics_of,
    recorded_besides,
    recorded_scores,
    scored_bytes,
    scored_in_parts,
    scored_on_ranks,
    scorer_version,
    scores_in_parts,
    unfinished_scores,
)
from paceline.tasks._support.stages import stage
from paceline.tasks.publish import published_url
from paceline.training import base_facts
from paceline.training.user_code import Task, check, parse, require_allowed

# Of models of MODEL_BYTES together, and of as much text in such rows as by default; more weights,
# text or longer rows get more, in proportion.
DEADLINE_S = 900.0
DEFAULTS = EvaluationSettings()
MODEL_BYTES = 400_000_000
COMPARED_BYTES_PER_S = 8e6  # of training text, at the least: 18 MB/s on one quiet core
TASKS_BYTES = 100_000  # of tasks' files, for DEADLINE_S each: rows repeat, with choices and shots
METRIC_BYTES = 1_000_000  # of text that a metric reads, likewise
NEW_TOKENS = 32  # for each of its documents, likewise
REPORTS = 2  # of what a report says; 2: intervals of slices, the longest row, rows of tasks
READS = 2  # version of what models are given to read; 2: first the tokenizer's BOS
MAX_GENERATIONS = 1000


def trained_on(run: Run, base: Manifest, trained: TrainResult) -> tuple[TrainingData, ...]:
    """Return every snapshot that the candidate learned from: its own training's, and those of what
    it was trained from and so on. That is found by its weights, under whatever name they were
    published, or as a version that was promoted here.

    Raises InvalidInput where it was not trained from ``base``. What was trained elsewhere, or has
    other bytes than the training exported, is in no record.
    """
    if trained.base_manifest_digest != base.digest:
        raise InvalidInput(
            "the candidate was not trained from this version",
            got=f"{base.model_id} {base.version}, manifest {base.digest}",
            wanted=f"manifest {trained.base_manifest_digest or 'missing'}",
            where=f"training {trained.job_id}",
            do="Name the version that it was trained from with --base.",
        )
    found = {
        str(trained.snapshot_digest): TrainingData(
            snapshot_url=str(trained.snapshot_url),
            snapshot_digest=str(trained.snapshot_digest),
            quarantined_shards=trained.quarantined_shards,
        )
    }
    model_id, digest, weights = base.model_id, base.digest, sealed_records.weights_of(base)
    seen = {""}
    for _ in range(MAX_GENERATIONS):
        descent = None if weights in seen else sealed_records.load_descent(run, weights)
        seen.add(weights)  # a training of no steps has its base's
        if descent is not None:
            found.setdefault(descent.data.snapshot_digest, descent.data)
        evidence = _promoted(run, model_id, digest)
        if evidence and evidence.training_snapshot_url and evidence.training_snapshot_digest:
            before = TrainingData(
                snapshot_url=evidence.training_snapshot_url,
                snapshot_digest=evidence.training_snapshot_digest,
            )
            found.setdefault(before.snapshot_digest, before)
        if descent is not None and descent.base_model_id:
            model_id, digest = descent.base_model_id, descent.base_manifest_digest
            weights = descent.base_weights_digest
        elif evidence is not None:
            digest, weights = evidence.base_manifest_digest, ""
        else:
            return tuple(found.values())
    raise Conflict(
        "too many versions before this one",
        got=f"more than {MAX_GENERATIONS}",
        where=f"{base.model_id} {base.version}",
        do="Publish the base anew, as a model of its own.",
    )


def _promoted(run: Run, model_id: str, manifest_digest: str) -> Evidence | None:
    version = run.registry.by_manifest(model_id, manifest_digest)
    return None if version is None else run.registry.evidence(model_id, version.version)


def published_tasks(run: Run) -> tuple[str, str]:
    """Return where the profile's tasks are for every node, and their manifest's digest; "" twice
    where it names none.

    Raises InvalidInput for tasks that are not data alone or without rows, MissingExtra without
    lm-eval: before any node is busy.
    """
    named = run.runtime.profile.evaluation.tasks
    if not named:
        return "", ""
    require_extras("eval")
    if named.startswith("s3://"):
        with TemporaryDirectory(prefix="tasks-") as scratch:
            read_tasks(download_model(named, Path(scratch) / "tasks", run.store))
        return named, run.manifest(named).digest
    directory = Path(named)
    read_tasks(directory)
    files = sorted(each for each in directory.iterdir() if each.is_file())
    content = digest_of([[each.name, file_sha256(each)] for each in files])
    url, profile = f"{run.runtime.data_url}/tasks/{content[:16]}", run.runtime.profile
    manifest = publish_model(
        directory,
        url,
        model_id="tasks",
        version="1",
        store=run.store,
        link_mbit=profile.cluster.link_mbit,
        piece_hash=profile.security.piece_hash,
        allow_older=True,
    )
    return url, manifest.digest


def require_judgeable(run: Run, profile: Profile, snapshot_url: str, base_url: str) -> None:
    """Raise what ``user_code.check`` does, before any node is busy, where ``profile`` trains by
    user code whose model could not be judged on this snapshot, or a metric cannot judge;
    InvalidInput where tasks need a chat template that the base has not."""
    _require_metrics(run)
    _require_template(run, base_url)
    if not (code_ref := profile.training.code_ref):
        return
    task = Task(
        seed=profile.training.seed,
        context=profile.model.context,
        vocabulary=load_snapshot(snapshot_url, run.store).vocabulary.vocab_size,
        parameters=profile.model.parameters,
    )
    sources = run.runtime.profile.security.code_sources
    check(code_ref, sources, run.runtime.state_dir / "code", task, judged=True)


def _require_template(run: Run, base_url: str) -> None:
    asked = run.runtime.profile.evaluation
    if not (asked.tasks and asked.tasks_as_chat):
        return
    config, template = template_files(f"{base_url}/{TOKENIZER_FILE}")[:2]
    there = {each.url for each in run.store.list(base_url)}
    if template not in there and not (
        config in there and json_object(run.store.get_bytes(config), config).get("chat_template")
    ):
        raise InvalidInput(
            "tasks are judged as chat, and the base has no chat template",
            got="evaluation.tasks_as_chat = true",
            wanted="chat_template.jinja, or chat_template in tokenizer_config.json",
            where=base_url,
            do="Publish the base with its template, or leave tasks_as_chat out.",
        )
    if is_installed("transformers"):
        rendered = ChatTemplate(f"{base_url}/{TOKENIZER_FILE}", run.store)
        try:
            rendered.text_of([{"role": "user", "content": "text"}], add_generation_prompt=True)
        except InvalidInput as error:
            do = "Publish the base with a template that works, or leave tasks_as_chat out."
            raise error.as_kind(InvalidInput, do=do) from error


def _require_metrics(run: Run) -> None:
    """Raise what ``require_metrics`` does for the profile's, in processes of their own here."""
    profile = run.runtime.profile
    allowed = AllowedCode(profile.security.code_sources, run.runtime.state_dir / "code")
    require_metrics(profile.evaluation, allowed)


def _require_buildable(run: Run, export_url: str) -> None:
    """Raise SourceMissing where the candidate's export does not say how it is built, AccessDenied
    where that is by user code that is not allowed."""
    url = f"{export_url}/{CONFIG_FILE}"
    try:
        config = user_code_of(json_object(run.store.get_bytes(url), url), url)
    except SourceMissing as error:
        raise SourceMissing(
            "nothing says how the candidate is built",
            got=f"no {CONFIG_FILE}, as of user code before this release",
            where=export_url,
            do="Run the same `train` again, which exports anew, and evaluate its result.",
        ) from error
    if config is not None:
        require_allowed(parse(config.code_ref), run.runtime.profile.security.code_sources)


def _deadline_s(run: Run, spec: EvaluationSpec, base: Manifest) -> float:
    """Return how long judging may take, by the sizes of the weights, the held-out text, its rows,
    the tasks and the training data, and by what metrics read and have written."""
    urls = [url for url in spec.models.values() if url.startswith("s3://")]
    weights = sum(each.size for url in urls for each in run.store.list(url))
    if len(urls) < len(spec.models):  # the base is on the nodes' disks
        weights += sum(each.size for each in base.files)
    compared_bytes = sum(
        load_snapshot(each.snapshot_url, run.store).record.total_bytes for each in spec.trained_on
    )
    times = max(1.0, scored_bytes(run, spec) / DEFAULTS.held_out_bytes)
    if spec.tasks_url:
        tasks_bytes = sum(each.size for each in run.manifest(spec.tasks_url).files)
        times += tasks_bytes / TASKS_BYTES
    texts = max(1.0, spec.settings.held_out_bytes / METRIC_BYTES)
    times += sum(texts * (1 + each.max_new_tokens / NEW_TOKENS) for each in metrics_of(run, spec))
    if not (context := spec.settings.context):  # each model's own; all descend from the base
        facts = base_facts(published_url(run, base.model_id, base.version), run.store)
        context = (facts and facts.context) or DEFAULTS.context
    times *= max(1.0, context / DEFAULTS.context)
    scored_s = DEADLINE_S * max(1.0, weights / MODEL_BYTES) * times
    return scored_s + compared_bytes / COMPARED_BYTES_PER_S


@stage("evaluate")
def evaluate(
    run: Run,
    models: dict[str, dict[str, str]],
    snapshot: dict[str, Any],
    nodes: Sequence[Node],
    *,
    base: Manifest,
    training_digest: str,
    trained_on: tuple[TrainingData, ...],
    ranks: int | None = None,
) -> Evaluated:
    """Score every one of ``models`` (name → {url, digest}), an n-gram model and compressors, and
    look for the held-out documents in what the candidate was ``trained_on``, on the last of
    ``nodes``; of many documents each node scores a part. ``ranks`` score each model together, or
    those that ``judging_gang`` names. The report is recorded (see ``sealed_records``); its
    ``report_digest`` is what a promotion asks for.

    Raises WorkerLost when the evaluating process dies, Cancelled once it is gone because the flow
    run was cancelled; the same call is safe to repeat.
    """
    profile = run.runtime.profile
    _require_buildable(run, models["candidate"]["url"])
    _require_metrics(run)
    tasks_url, tasks_digest = published_tasks(run)
    spec = EvaluationSpec(
        run_id=run.run_id,
        snapshot_url=snapshot["url"],
        snapshot_digest=snapshot["digest"],
        models={name: each["url"] for name, each in models.items()},
        settings=profile.evaluation,
        tasks_url=tasks_url,
        tasks_digest=tasks_digest,
        trained_on=trained_on,
        scorer=scorer_version(profile.evaluation),
    )
    digests = {name: each["digest"] for name, each in models.items()}

    def work() -> dict[str, Any]:
        with artifacts.Progress("evaluation", "bits per byte on held-out files") as page:
            report = _judged(run, spec, models, nodes, base, ranks, page)
            _log(run, report)
            evaluation = Evaluation(
                model_id=base.model_id,
                base_version=base.version,
                base_manifest_digest=base.digest,
                training_digest=training_digest,
                snapshot_url=snapshot["url"],
                models=digests,
                report=report,
            )
            return _output(report, sealed_records.save(run, evaluation, "evaluation"))

    def is_recorded(output: dict[str, Any]) -> bool:
        """Return whether the ledger's ``output`` is what an evaluation of these recorded."""
        digest = str(output.get("report_digest"))
        known = sealed_records.load_or_none(run, digest, "evaluation", Evaluation)
        return (
            known is not None
            and (known.training_digest, known.models) == (training_digest, digests)
            and _output(known.report, digest) == output
        )

    result = run.stage(
        "evaluate",
        {
            "models": digests,
            "snapshot": snapshot["digest"],
            "training": training_digest,
            "trained_on": [each.model_dump(mode="json") for each in trained_on],
            "settings": profile.evaluation.model_dump(
                mode="json", exclude={"ranks", "tp", "after_training"}
            ),
            "tasks": tasks_digest,
            "reads": READS,
            "reports": REPORTS,
            **_together(profile.evaluation, ranks),
        },
        work,
        # a model that could not be scored (a node had lost its copy) is tried again
        still_true=lambda o: not o.get("failures") and is_recorded(o),
        describe=_one_line,
    )
    report = Evaluated.model_validate(result.output)
    page = as_markdown(report) + f"\nReport digest, for a promotion: `{report.report_digest}`\n"
    artifacts.markdown("evaluation", page, "Scores on held-out files")
    return report


def _judged(
    run: Run,
    spec: EvaluationSpec,
    models: dict[str, dict[str, str]],
    nodes: Sequence[Node],
    base: Manifest,
    ranks: int | None,
    page: artifacts.Progress,
) -> EvaluationReport:
    """Return the report on ``spec``: scores that are recorded are taken, the missing ones are made
    by a gang of ranks or by parts on all nodes, and the last node makes the rest and the report."""
    answer: dict[str, Any] = {}
    furthest = 0.0

    def on_event(line: dict[str, Any]) -> None:
        nonlocal furthest
        if line.get("event") == "result":
            answer.update(line["data"])
        elif line.get("event") == "score":
            sealed_records.save_score(run, RecordedScore.model_validate(line["data"]))
        elif line.get("event") == "progress":
            data = line.get("data", {})
            # training data are compared beside tasks and metrics: it does not go back
            furthest = max(furthest, float(data.get("fraction", 0)))
            run.report("evaluate", furthest, str(data.get("message", "")))
            page.show(furthest)

    with_tasks = bool(spec.tasks_url or spec.settings.metrics)
    gang = judging_gang(run, nodes, base, ranks, with_tasks=with_tasks)
    asked = _scored_by(gang, spec)
    known = recorded_scores(run, spec, models, asked.scorer)
    missing = {name: models[name] for name in models if name not in known}
    part = asked.model_copy(update={"models": {each: spec.models[each] for each in missing}})
    scores, failures = [*known.values()], dict[str, str]()
    longest_s = _deadline_s(run, spec, base)
    with run.fleet() as fleet, cancelling.noticed() as cancel:
        process = _on_a_node(fleet, longest_s, cancel)
        if missing and gang is not None:
            limits: dict[str, Any] = {"deadline_s": longest_s, "cancel": cancel}
            part = part.model_copy(update={"known": unfinished_scores(run, asked, missing)})
            found, failures = scored_on_ranks(run, part, gang, fleet, **limits)
            scores += found
        elif missing and len(nodes) > 1 and scores_in_parts(run, spec):
            scores += scored_in_parts(run, part, missing, nodes, process)
        whole = spec.model_copy(
            update={
                "known": (
                    *scores,
                    *unfinished_scores(run, spec, missing),
                    *recorded_besides(run, spec, models),
                ),
                "failures": failures,
                "mesh": spec.mesh if gang is None else gang.settings.mesh,
            }
        )
        process(nodes[-1], whole, on_event)
    return EvaluationReport.model_validate(answer)


def _log(run: Run, report: EvaluationReport) -> None:
    """Log figures, page and plot of ``report`` in the run's lineage."""
    run.registry.log_metrics(run.mlflow_run, lineage.evaluation_metrics(report))
    log_page(run, "evaluation", as_markdown(report), "evaluation.md")
    plot = plot_report(report, run.work_dir / "evaluation.png")
    run.registry.log_artifact_file(run.mlflow_run, plot)


def _scored_by(gang: Gang | None, spec: EvaluationSpec) -> EvaluationSpec:
    """Return ``spec`` for scores by ``gang``, whose latency and memory are not one process's."""
    if gang is None:
        return spec
    by = f"{spec.scorer}, {gang.settings.ranks} ranks, tp {gang.settings.mesh.tp}"
    return spec.model_copy(update={"scorer": by})


def _together(settings: EvaluationSettings, ranks: int | None) -> dict[str, list[int]]:
    asked = settings.ranks if ranks is None else ranks
    return {"ranks": [asked, settings.tp]} if asked > 1 else {}


def _on_a_node(fleet: Fleet, deadline_s: float, cancel: threading.Event) -> Process:
    """Return a function that evaluates a spec on a node, in a process of its own."""

    def process(node: Node, asked: EvaluationSpec, on_event: OnEvent) -> None:
        last: dict[str, Any] = {}

        def take(line: dict[str, Any]) -> None:
            last.update(line)
            on_event(line)

        ended = fleet.run_process(
            node.worker_id,
            argv=[PYTHON, "-m", "paceline.evaluation.run"],
            env={},
            input_json=asked.model_dump_json(),
            on_event=take,
            deadline_s=deadline_s,
            cancel=cancel,
            accelerators=node.accelerator_count,
        )
        if last.get("event") == "failed":
            kind, said = raised(f"{last['data']['code']}: {last['data']['message']}")
            if kind is not None and issubclass(kind, PermanentError):
                raise kind(said, where=node.worker_id)
        if ended.exit_code != 0 or not (last.get("event") == "result" or asked.share):
            raise WorkerLost(
                "the evaluation process failed",
                got=f"exit code {ended.exit_code}: {ended.stderr_tail.strip()[-400:]}",
                wanted="a report",
                where=node.worker_id,
                do="Run the same command again; read the node's log if it fails the same way.",
            )

    return process


def _output(report: EvaluationReport, digest: str) -> dict[str, Any]:
    return report.model_dump(mode="json") | {"report_digest": digest}


def _one_line(output: dict[str, Any]) -> str:
    report = Evaluated.model_validate(output)
    scores = ", ".join(f"{each.name} {each.bits_per_byte.value:.3f}" for each in report.scores)
    return f"{scores} bits/byte, report {report.report_digest[:12]}"
