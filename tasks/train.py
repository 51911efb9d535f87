"""Train on the nodes: a gang of ranks, each started from the weights on its own node's disk."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.cluster import Node
from paceline.config import (
    PriceSettings,
    Profile,
    TrainingSettings,
    with_job_settings,
    with_recorded_settings,
)
from paceline.data import load_snapshot
from paceline.errors import Cancelled, InvalidInput, MissingExtra, WorkerLost
from paceline.jobs import cost_of, money
from paceline.manifest import Manifest
from paceline.models import CONFIG_FILE, json_object, lies_as_pretrained
from paceline.schemas import (
    JobPlacement,
    RankEvent,
    TaskSize,
    Trained,
    TrainingData,
    TrainJob,
    TrainResult,
    digest_of,
)
from paceline.tasks._support import artifacts, cancelling, sealed_records
from paceline.tasks._support.figures import Figures, points_of, record_job, record_result
from paceline.tasks._support.run import Run
from paceline.tasks._support.stages import stage
from paceline.tasks.distribute import holds_everywhere, relay, start_agents
from paceline.tasks.publish import published_url
from paceline.text import shortened
from paceline.training import (
    base_facts,
    check_base,
    code_ref_task_size,
    config_digest,
    continuation,
    earlier_job,
    result_data_settings,
    run_job,
    settings_for,
    store_job,
    with_derived_id,
)
from paceline.units import counted

logger = logging.getLogger(__name__)


@stage("train")
def train(
    run: Run,
    manifest: Manifest,
    snapshot: dict[str, Any],
    nodes: list[str],
    own: Mapping[str, object],
    labels: str = "true",
    continue_from: str | None = None,
    code_ref: str = "",
    optimizer_ref: str = "",
    purpose: str = "",
) -> Trained:
    """Fine-tune ``manifest``'s model on ``snapshot`` as the profile says, but for the settings in
    ``own``. Resumes the newest healthy checkpoint where the same job was interrupted.
    ``purpose`` is what the data are used for, which the caller has checked; "": the profile's.
    ``continue_from`` is the id of a finished job to go on from, with the settings that it had but
    for ``own``: more steps, or another learning rate. ``code_ref`` and ``optimizer_ref`` are the
    training's own code.
    What is not in the ledger waits for its job to be admitted, where the flow has one.

    Raises TrainingFailed when the gang used up its restarts.
    """
    asked = profile_of(run, own, continue_from, code_ref, optimizer_ref)
    profile = exporting(run, asked, own, manifest.model_id, manifest.version)
    export_changes(run, asked, profile)
    purpose = purpose or run.runtime.profile.data.purpose
    label = snapshot["label"]
    known = run.trainers(nodes)
    settings, _ = place_ranks(profile.training, known)  # raises where no admission would help
    inputs = {
        "manifest": manifest.digest,
        "snapshot": snapshot["digest"],
        "settings": settings.model_dump(mode="json", exclude={"guard", "ranks_per_node"}),
        "labels": labels,
        "data": result_data_settings(profile.data),
    }
    if (task := _task_size(run, manifest, profile)) is not None:
        inputs["task"] = task.model_dump(mode="json")
    if purpose != label:  # otherwise the snapshot's digest covers it
        inputs["purpose"] = purpose
    facts = base_facts(published_url(run, manifest.model_id, manifest.version), run.store)
    data = profile.data.model_copy(update={"project": snapshot["project"], "expectations": ""})
    job = with_derived_id(
        TrainJob(
            job_id="job",
            run_id=run.run_id,
            model_id=manifest.model_id,
            version=manifest.version,
            manifest_digest=manifest.digest,
            base_bytes=manifest.total_size,
            base_parameters=0 if facts is None else facts.parameters,
            snapshot_url=snapshot["url"],
            snapshot_digest=snapshot["digest"],
            purpose=purpose,
            data_label=None if label == purpose else label,
            data=data,
            checkpoint_url=run.runtime.checkpoints_url,
            settings=settings,
            labels="shuffled" if labels == "shuffled" else "true",
            task=task,
        )
    )
    if continue_from:
        job = continuation(job, continue_from, run.store)
        inputs["continues"] = str(job.continues)

    def work() -> dict[str, Any]:
        result = _worked(run, job, profile.training, known)
        digest = sealed_records.save(run, result, "training")
        return result.model_dump(mode="json") | {"training_digest": digest}

    trained = run.stage(
        "train",
        inputs,
        work,
        still_true=lambda o: (
            # an export of user code by an older release has no config: it is exported anew
            run.store.exists(f"{o['export_url']}/{CONFIG_FILE}")
            and _is_recorded(run, o, config_digest(job))
        ),
        describe=lambda o: _one_line(Trained.model_validate(o), run.runtime.profile.prices),
    )
    made = Trained.model_validate(trained.output)
    _keep_descent(run, manifest, made)
    if run.job is not None:
        run.job.finished(made)
    return made


def _worked(run: Run, job: TrainJob, asked: TrainingSettings, known: Sequence[Node]) -> TrainResult:
    """Record the job, train it, once more each time that it is preempted, and record the result."""
    record_job(run.registry, run.mlflow_run, job)
    store_job(job, run.store)  # for a continuation
    said = f"{counted(job.settings.steps, 'step')} on {counted(job.settings.ranks, 'rank')}"
    with (
        artifacts.Progress("training", said) as page,
        Figures(partial(run.registry.log_metrics, run.mlflow_run), page.show) as figures,
    ):
        result = None
        while result is None:
            result = _train_on_hosts(run, job, asked, known, figures)
    _report(run, result)
    held = None if run.job is None else run.job.held
    record_result(run.registry, run.mlflow_run, result, run.runtime.profile.prices, held)
    return result


def _keep_descent(run: Run, base: Manifest, made: TrainResult) -> None:
    """Have an evaluation find what ``made`` learned from by its weights, wherever they are
    published."""
    if not (made.snapshot_url and made.snapshot_digest):
        return  # a result of an older version
    data = TrainingData(
        snapshot_url=made.snapshot_url,
        snapshot_digest=made.snapshot_digest,
        quarantined_shards=made.quarantined_shards,
    )
    descent = sealed_records.Descent(
        weights_digest=made.weights_digest,
        data=data,
        base_model_id=base.model_id,
        base_manifest_digest=base.digest,
        base_weights_digest=sealed_records.weights_of(base),
    )
    sealed_records.save_descent(run, descent)


def _train_on_hosts(
    run: Run, job: TrainJob, settings: TrainingSettings, known: Sequence[Node], figures: Figures
) -> TrainResult | None:
    """Train on the hosts that the queue reserves, waiting for them; return None where the job is
    preempted: then its state is saved, and the hosts are free.
    """
    placement = None if run.job is None else run.job.admitted()
    if placement is not None:  # workers come and go while a job waits
        known = run.trainers(list(placement.hosts))
        _bring_base(run, job, [each.worker_id for each in known])
    placed, held = place_ranks(settings, known, placement)
    stops = () if run.job is None else (run.job.superseded, run.job.preempted)
    try:
        with run.fleet() as fleet, cancelling.noticed(*stops) as cancel:
            return run_job(
                job.model_copy(update={"settings": placed}),
                held,
                fleet,
                on_event=_follow(run, settings.steps, figures),
                store=run.store,
                cancel=cancel,
                on_wait=run.warn,
                state_dir=run.state_dir,
                accelerators=accelerators_of(known, held, placement),
                slots=None if placement is None else slots_of(placement),
            )
    except Cancelled:
        if run.job is None or not run.job.gives_way():
            raise
        return None


def _bring_base(run: Run, job: TrainJob, hosts: list[str]) -> None:
    """Relay the base to ``hosts`` where one lacks it: the queue reserves any that are free, and
    others after a preemption."""
    url = published_url(run, job.model_id, job.version)
    manifest = run.manifest(url)
    if not holds_everywhere(run, manifest, hosts):
        start_agents.fn(run, hosts)
        moved = relay.fn(run, manifest, url, hosts, allow_older=True)  # held and not active
        if run.job is not None:
            run.job.relayed(moved)


def profile_of(
    run: Run,
    own: Mapping[str, object],
    continue_from: str | None,
    code_ref: str,
    optimizer_ref: str,
) -> Profile:
    """Return the profile of one training; the arguments are those of ``train``."""
    from paceline.training.user_code import with_code

    profile = run.runtime.profile
    if continue_from:
        earlier = earlier_job(run.runtime.checkpoints_url, continue_from, run.store)
        profile = _as_it_was(profile, earlier)
    return with_code(with_job_settings(profile, own), code_ref, optimizer_ref)


def exporting(
    run: Run, profile: Profile, own: Collection[str], model_id: str, version: str
) -> Profile:
    """Return ``profile`` with the export that the model's policy asks for; raises as
    ``settings_for``, whose ``given`` is ``own``."""
    policy = run.runtime.profile.gate.policy(model_id)
    facts = base_facts(published_url(run, model_id, version), run.store)
    training = settings_for(profile.training, policy, own, facts)
    return profile.model_copy(update={"training": training})


def export_changes(run: Run, asked: Profile, profile: Profile) -> dict[str, object]:
    """Return the settings that ``exporting`` changed, by their keys; a note names each."""
    changed: dict[str, object] = {}
    for name in ("export_dtype", "export_program", "export_file_bytes"):
        if (value := getattr(profile.training, name)) != getattr(asked.training, name):
            run.warn(f"training.{name} is {str(value).lower()}, as the model's policy asks")
            changed[f"training.{name}"] = value
    return changed


def require_base(
    run: Run, profile: Profile, model_id: str, version: str, snapshot_url: str
) -> None:
    """Raise what ``check_base`` does where ``profile`` cannot train the published version; asked
    again within a run, nothing is done."""
    if profile.training.code_ref:
        return
    url, context = published_url(run, model_id, version), profile.model.context
    training, data = profile.training, profile.data
    dumped = [each.model_dump(mode="json") for each in (training, data)]
    asked = digest_of([url, snapshot_url, context, *dumped])
    if asked not in run.checked:  # a lifecycle has asked before its training does
        snapshot = load_snapshot(snapshot_url, run.store)
        check_base(url, run.store, training, data, context, snapshot)
        run.checked.add(asked)


def _as_it_was(profile: Profile, earlier: TrainJob) -> Profile:
    """Return ``profile`` with the settings of an earlier job, as ``with_recorded_settings``."""
    context = profile.model.context if earlier.task is None else earlier.task.context
    model = profile.model.model_copy(update={"context": context})
    recorded = {"training": earlier.settings, "data": earlier.data, "model": model}
    return with_recorded_settings(profile, profile.model_copy(update=recorded))


def _task_size(run: Run, manifest: Manifest, profile: Profile) -> TaskSize | None:
    """Return the length of rows where the base does not say it: the profile's, also for nodes
    whose own profile says another. None for our own transformer."""
    if profile.training.code_ref:
        return code_ref_task_size(profile)
    url = f"{published_url(run, manifest.model_id, manifest.version)}/{CONFIG_FILE}"
    names = {each.path for each in manifest.files}

    def read() -> dict[str, Any]:
        return json_object(run.store.get_bytes(url), url)

    if CONFIG_FILE not in names or not lies_as_pretrained(names, read):
        return None
    return TaskSize(context=profile.model.context)


def place_ranks(
    settings: TrainingSettings, nodes: Sequence[Node], placement: JobPlacement | None = None
) -> tuple[TrainingSettings, list[str]]:
    """Return ``settings`` with the ranks of each node decided, and the nodes to hold, those with
    the most ranks first: the queue's ``placement``, or the nodes with the most accelerators and
    ``guard.spares`` more. Raises InvalidInput where there are too few, WorkerLost where one of the
    queue's has no worker.
    """
    if placement is not None:
        known = {node.worker_id: node for node in nodes}
        if away := sorted(placement.hosts.keys() - known.keys()):
            raise WorkerLost("a node of the gang has no worker", where=shortened(tuple(away)))
        held = sorted(placement.hosts, key=lambda each: (-placement.hosts[each], each))
        _require_training([known[each] for each in held], settings)
        return settings.model_copy(update={"ranks_per_node": placement.hosts[held[0]]}), held
    best = sorted(nodes, key=lambda node: -node.accelerator_count)
    if best[0].accelerator_count:
        best = [node for node in best if node.accelerator_count]
    for used, last in enumerate(best, start=1):
        each = settings.ranks_per_node or max(1, last.accelerator_count)
        if used * each >= settings.ranks:
            gang = best[: used + settings.guard.spares]
            _require_training(gang, settings)
            held = [node.worker_id for node in gang]
            return settings.model_copy(update={"ranks_per_node": each}), held
    raise InvalidInput(
        "not enough nodes for the gang",
        got=f"{len(best)} nodes, {each} ranks on each",
        wanted=f"{settings.ranks} ranks",
        do="Lower training.ranks, raise training.ranks_per_node, or start more workers.",
    )


def slots_of(placement: JobPlacement) -> dict[str, tuple[int, int]]:
    """Return how many slots of how many the gang holds on each node of several slots, which it
    shares then.
    """
    return {
        name: (ranks, placement.slots[name])
        for name, ranks in placement.hosts.items()
        if name in placement.slots
    }


def accelerators_of(
    nodes: Iterable[Node], held: Collection[str], placement: JobPlacement | None
) -> dict[str, int]:
    """Return the accelerators by kind of the ``held`` ones of ``nodes``, or of them those that the
    ``placement`` reserves where it has slots (Slurm and Kubernetes give whole nodes); "cpu" counts
    the nodes without.
    """
    found: Counter[str] = Counter()
    for node in nodes:
        if node.worker_id in held:
            count, cards = node.accelerator_count, node.machine.like_cards
            if placement and placement.slots:
                count = min(count, placement.hosts[node.worker_id])
            found.update({cards[0].kind: count} if cards else {"cpu": 1})
    return dict(found)


def _one_line(trained: Trained, prices: PriceSettings) -> str:
    total = cost_of(trained, prices).total
    cost = "" if total is None else f", {money(total)} {prices.currency}"
    return (
        f"{counted(trained.steps, 'step')}, loss {trained.final_loss or math.nan:.3f}, "
        f"{trained.tokens_per_second:.0f} tokens/s, "
        f"{counted(len(trained.restarts), 'restart')}{cost}"
    )


def _require_training(gang: Sequence[Node], settings: TrainingSettings) -> None:
    """Raise MissingExtra for nodes that cannot start a rank with these settings."""
    for extra in ("train", "lora") if settings.lora is not None else ("train",):
        if without := [node.worker_id for node in gang if extra not in node.machine.extras]:
            raise MissingExtra(
                "a node cannot train",
                got=f"no extra {extra}",
                wanted=f"paceline[{extra}] on each node of the gang",
                where=shortened(tuple(without)),
                do="Install it there and start the node's worker again.",
            )


def _is_recorded(run: Run, output: dict[str, Any], config: str) -> bool:
    """Return whether the ledger's ``output`` is what a training of this configuration recorded."""
    digest = output.get("training_digest")
    result = sealed_records.load_or_none(run, digest, "training", TrainResult)
    return (
        result is not None
        and result.config_digest == config
        and result.model_dump(mode="json") | {"training_digest": digest} == output
    )


def _follow(run: Run, steps: int, figures: Figures) -> Callable[[RankEvent], None]:
    """Return what takes in a job's events; it never waits for a server (see figures.py)."""
    stragglers: set[str] = set()

    def on_event(event: RankEvent) -> None:
        if run.job is not None:
            run.job.take(event, steps)
        if event.event == "step":
            for text in (*alerts_of(event), *checkpoint_alerts_of(event)):
                run.warn(text)
            named = stragglers_of(event) if event.rank == 0 else {}
            for rank in named.keys() - stragglers:  # each is noted once
                run.warn(named[rank])
            stragglers.update(named)
        if event.event == "step" and event.rank == 0:
            fraction = event.step / max(steps, 1)
            loss = event.data.get("loss")
            shown = f", loss {loss:.3f}" if isinstance(loss, float) else ""
            rate = event.data.get("tokens_per_second")
            shown += f", {rate:,.0f} tokens/s" if isinstance(rate, float) else ""
            run.report("train", fraction, f"step {event.step}/{steps}{shown}")
            figures.take(points_of(event), fraction)
            if early := event.data.get("stopped_early"):
                run.warn(f"training ends at step {event.step}: {early}")
        elif event.event == "resumed" and event.step > 0 and event.rank == 0:
            run.warn(f"training resumed at step {event.step} (attempt {event.attempt})")
        elif event.event == "lost":
            on = f" on {event.data['worker_id']}" if event.data["worker_id"] else ""
            run.warn(f"attempt {event.attempt} ended early{on}: {event.data['reason']}")
        elif event.event == "failed" and event.data.get("code") != "Stopped":
            run.warn(f"rank {event.rank} failed at step {event.step}: {event.data.get('message')}")

    return on_event


def alerts_of(event: RankEvent) -> list[str]:
    """Return a line for each alert that this step raised or cleared."""
    found = event.data.get("alerts")
    return [
        f"rank {event.rank}, step {event.step}: {each['name']} "
        f"{'raised' if each['raised'] else 'cleared'}: {each['message']}"
        for each in (found if isinstance(found, list) else [])
    ]


def checkpoint_alerts_of(event: RankEvent) -> list[str]:
    """Return a line for each thing that rank 0, for all, has to say of its saves: slow, failed."""
    found = event.data.get("checkpoint_alerts")
    return [
        f"step {event.step}: {each}"
        for each in (found if isinstance(found, list) and event.rank == 0 else [])
    ]


def stragglers_of(event: RankEvent) -> dict[str, str]:
    """Return a line for each rank that this step names as slow."""
    found = event.data.get("stragglers")
    return {
        rank: f"rank {rank} is a straggler: {factor:.1f} times as long as the others a step"
        for rank, factor in (found if isinstance(found, dict) else {}).items()
    }


def _report(run: Run, result: TrainResult) -> None:
    for restart in result.restarts:
        run.warn(
            f"gang restarted (attempt {restart.attempt}): rank {restart.failed_rank} on "
            f"{restart.worker_id}: {restart.reason}; resumed at step {restart.resumed_step}, "
            f"{restart.lost_steps} steps lost, {restart.seconds:.1f} s to the first new step"
        )
    if result.exported:
        run.warn(f"exported: {result.exported}")
    if result.quarantined_shards:
        named = "; ".join(result.quarantine_lines[:5])
        run.warn(
            f"{len(result.quarantined_shards)} data shards or samples were passed over: "
            f"the job needs review ({named})"
        )
    artifacts.table(
        "checkpoints",
        [each.model_dump(mode="json") for each in result.checkpoints],
        "Generations kept, newest last",
    )
