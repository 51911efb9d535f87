"""Train a distributed model on a validated snapshot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config import with_job_settings
from paceline.errors import Cancelled, InvalidInput, PermanentError
from paceline.flows.distribute import distribute_model
from paceline.flows.evaluate import judge
from paceline.schemas import Resources, SubmitJob, Trained
from paceline.tasks import distribute
from paceline.tasks._support import sealed_records
from paceline.tasks._support.declaring import (
    CheckpointPolicy,
    CodeRef,
    GangResources,
    JobBudget,
    JobName,
    JobSettings,
    Mesh,
    ModelId,
    Priority,
    Project,
    Purpose,
    Seed,
    SnapshotUrl,
    Team,
    Version,
    about,
    declared,
)
from paceline.tasks._support.job import JobLink, linked
from paceline.tasks._support.lineage import nest, recorded
from paceline.tasks._support.run import Run
from paceline.tasks._support.scores import require_one_process
from paceline.tasks.evaluate import require_judgeable
from paceline.tasks.prepare import permitted_snapshot, require_own_expectations, validate_data
from paceline.tasks.publish import published_url
from paceline.tasks.train import exporting, profile_of, require_base, train
from paceline.training import stored_training_id


@declared("train-model", "train {model_id} {version}")
def train_model(
    model_id: ModelId,
    version: Version,
    snapshot_url: SnapshotUrl,
    name: JobName = "",
    labels: Annotated[
        Literal["true", "shuffled"],
        about("Labels", "shuffled: a control, which has to fail in the evaluation."),
    ] = "true",
    steps: Annotated[
        Annotated[int, Field(ge=0)] | None,
        about("Steps", "Optimizer steps; default: the profile's.", 500),
    ] = None,
    ranks: Annotated[
        Annotated[int, Field(ge=1)] | None,
        about("Ranks", "Processes of the gang; default: the profile's.", 8),
    ] = None,
    learning_rate: Annotated[
        Annotated[float, Field(gt=0)] | None,
        about("Learning rate", "At its peak; default: the profile's.", 3e-4),
    ] = None,
    mesh: Annotated[
        Mesh | None, about("Mesh", "How the ranks share the model; default: the profile's.")
    ] = None,
    seed: Seed = None,
    checkpoint_policy: CheckpointPolicy = None,
    settings: JobSettings = None,
    continue_from: Annotated[
        str | None,
        about("Continue from", "The last checkpoint of this finished job.", "job-4be1c2a09f3d"),
    ] = None,
    code_ref: CodeRef = "",
    optimizer_ref: Annotated[
        str,
        about(
            "Optimiser",
            "A pinned function of the profile's security.code_sources that makes the optimiser; "
            "default: the profile's.",
            "git+https://host/repository.git@COMMIT#lion:make",
        ),
    ] = "",
    team: Team = "",
    project: Project = "",
    purpose: Purpose = "",
    priority: Priority = 0,
    budget: JobBudget = None,
    resources: GangResources = None,
    evaluate_on: Annotated[
        str | None,
        about(
            "Evaluate on",
            "The snapshot on whose held-out split the result is judged; empty: it is not judged. "
            "Default: the profile's.",
            "s3://paceline/data/snapshots/5c1f…",
        ),
    ] = None,
    state_dir: str | None = None,
    run_id: str | None = None,
    job_id: str | None = None,
) -> Trained:
    """Validate the snapshot, then fine-tune the version on it.

    Nodes that lack the version get it first; each rank starts from the weights on its own node's
    disk. With ``continue_from`` (the id of a finished job) they go on from its last checkpoint
    instead, with its settings but for what is given here.

    The queue of jobs starts it with its ``job_id``. Started otherwise, it waits until the queue, or
    Slurm or Kubernetes, admits it.

    ``settings`` are settings of the profile for this training alone, such as
    ``{"training.lora.r": 8}``; what runs on the nodes, and the gate, stay the profile's.

    With ``evaluate_on`` the result is judged as evaluate-model does, on the hosts of the gang.
    Where it is None, on the training's own snapshot if the profile has
    ``evaluation.after_training``; a job of the queue was settled when it was submitted.
    A base model that these settings cannot train, an export that the model's policy would refuse,
    and user code whose model could not be judged, are refused before a node is busy. What else
    turns out not to be judged is trained all the same: a note says why.
    """
    run = Run.open(state_dir, run_id)
    if evaluate_on is None:
        is_judged = job_id is None and run.runtime.profile.evaluation.after_training
        evaluate_on = snapshot_url if is_judged else ""
    if continue_from:
        continue_from = stored_training_id(continue_from, run.runtime.checkpoints_url, run.store)
    named = {"steps": steps, "ranks": ranks, "learning_rate": learning_rate}
    given: dict[str, Any] = {
        f"training.{key}": value for key, value in named.items() if value is not None
    }
    if mesh is not None:
        given |= {f"training.mesh.{key}": value for key, value in mesh.given().items()}
    resources = resources or Resources()
    if ranks and resources.ranks not in (0, ranks):
        raise InvalidInput(
            "two numbers of ranks are given",
            got=f"ranks {ranks}, resources.ranks {resources.ranks}",
            wanted="one of them, or the same number",
        )
    spec = SubmitJob(
        model_id=model_id,
        version=version,
        data_snapshot=snapshot_url,
        code_ref=code_ref,
        optimizer_ref=optimizer_ref,
        resources=resources,
        checkpoint_policy=checkpoint_policy,
        parameters=(settings or {}) | given,
        seed=seed,
        labels=labels,
        continue_from=continue_from or "",
        name=name,
        team=team,
        project=project,
        purpose=purpose,
        priority=priority,
        budget=budget,
        evaluate_on=evaluate_on,
    )
    given = spec.settings
    with_job_settings(run.runtime.profile, given)  # refused before anything is done
    with recorded(run, "train-model"), linked(run, spec, job_id) as link:

        def permitted() -> dict[str, Any]:
            if evaluate_on and evaluate_on != snapshot_url:
                permitted_snapshot(run, evaluate_on, purpose, [link.user])
            return permitted_snapshot(run, snapshot_url, purpose, [link.user])

        snapshot = permitted()
        link.on_admission = permitted  # hours may pass until then: a rule may have been revoked
        require_own_expectations(run, snapshot_url)
        profile = profile_of(run, given, continue_from, code_ref, optimizer_ref)
        profile = exporting(run, profile, given, model_id, version)
        if evaluate_on:
            base_url = published_url(run, model_id, version)
            require_judgeable(run, profile, snapshot_url, base_url)
            require_one_process(run, run.manifest(base_url))
        require_base(run, profile, model_id, version, snapshot_url)
        nest(run, link.sweep)
        valid = validate_data(run, snapshot)  # before nodes are requested, or the base is relayed
        if run.runtime.profile.cluster.per_job:
            link.admitted()  # no node is here before
        if link.hosts:
            here: dict[str, Any] = {"state_dir": run.state_dir, "run_id": run.run_id}
            made = distribute_model(
                model_id, version, target_workers=link.hosts, activate=False, **here
            )
            link.relayed(made.relay)
        manifest = distribute.fetch_model_manifest(run, published_url(run, model_id, version))
        nodes = distribute.start_agents(run, link.hosts or None)
        trained = train(
            run,
            manifest,
            valid,
            nodes,
            given,
            labels=labels,
            continue_from=continue_from,
            code_ref=code_ref,
            optimizer_ref=optimizer_ref,
            purpose=purpose,
        )
        assert trained.training_digest is not None  # the stage has recorded it
        sealed_records.add_references(run, "training", trained.training_digest, trained.job_id)
        if evaluate_on:
            report = _judge(run, link, model_id, version, trained, evaluate_on)
            trained = trained.model_copy(update={"report_digest": report})
        return trained


def _judge(
    run: Run, link: JobLink, model_id: str, version: str, trained: Trained, evaluate_on: str
) -> str | None:
    """Return the digest of the report, None where the training could not be judged."""
    try:
        digest = str(trained.training_digest)
        evaluated = judge(run, model_id, version, digest, evaluate_on, link.hosts or None)
    except Cancelled:
        raise
    except PermanentError as error:
        run.warn(f"{trained.job_id} is not judged: {error.one_line()}")
        return None
    link.judged(evaluated)
    return evaluated.report_digest
