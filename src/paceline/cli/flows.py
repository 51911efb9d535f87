"""Commands that run one flow each: in this process, or with a login on the installation."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from paceline.cli.commands import Sections
from paceline.cli.options import (
    SNAPSHOT,
    again,
    job_settings,
    json_option,
    next_line,
    notice,
    or_newest_made,
    point_prefect_at,
    project_option,
    remember,
    resolve_job_id,
    resolve_run_id,
    resolve_training_id,
    run_id_option,
    show,
    state_option,
    team_option,
)
from paceline.client import CoordinatorClient
from paceline.config import Runtime, find_installation, with_job_settings
from paceline.errors import (
    InvalidInput,
    NotFound,
    PacelineError,
    SourceMissing,
)
from paceline.extras import require_extras
from paceline.schemas import (
    MODEL_ID,
    RUN_ID,
    SHA256_HEX,
    TRAINING_ID,
    FlowAnswer,
    flow_answer,
    new_run_id,
)

if TYPE_CHECKING:
    from paceline.tasks._support.run import Run

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class FlowCall:
    """What every command that runs a flow is given: the installation, the run, the output."""

    state: Path | None
    run_id: str | None
    as_json: bool

    def run(self, name: str, *, cancels: bool = False, **parameters: Any) -> int:
        """Run the flow ``module.function`` below paceline.flows, and print its result.

        It runs in this process, or with a login where the installation has its Prefect worker. When
        interrupted, it reports the deployments that continue, or with ``cancels`` cancels them.
        """
        runtime = find_installation(self.state)
        run_id = self.run_id and resolve_run_id(runtime, self.run_id)
        if runtime.is_login:
            from paceline.cli.login import run_flow

            return run_flow(runtime, name, run_id, parameters, as_json=self.as_json)
        if not runtime.runs_flows_here:
            raise NotFound(
                "this installation has no Prefect server to run flows",
                wanted="endpoints.prefect_api_url",
                where=runtime.state_dir / "runtime.json",
                do="Name it there, or with --prefect where `paceline init` makes the directory. "
                "`paceline publish` and `distribute` need none.",
            )
        require_extras("flows")  # before anything is read
        with_job_settings(runtime.profile, parameters.get("settings") or {})  # refused at once
        require_inputs(runtime, parameters)
        run_id = run_id or new_run_id()
        # at once: Prefect's import and the flow's start take seconds
        notice(f"run {run_id}: starting {flow_name(name)} in {runtime.state_dir} …", mark="")
        point_prefect_at(runtime)  # before Prefect is imported
        from paceline.cli.progress import StageBars
        from paceline.cluster import ended_by_stop
        from paceline.tasks._support.run import Run, listening

        module, _, function = name.partition(".")
        flow = getattr(importlib.import_module(f"paceline.flows.{module}"), function)
        run = Run.open(runtime.state_dir, run_id)  # the flow opens the same
        require_records(run, parameters)
        with (
            ended_by_stop(runtime.state_dir, run_id),
            StageBars() as bars,
            listening(bars),
        ):
            try:
                result = flow(**parameters, state_dir=run.state_dir, run_id=run.run_id)
            except BaseException as error:
                if not isinstance(error, Exception):
                    bars.say(f"run {run.run_id} is interrupted; it goes on with:")
                    bars.say(f"  {again(run.run_id)}")
                    for deployment_id in run.driving:
                        bars.say(left_behind(run.coordinator, deployment_id, cancels=cancels))
                raise
        given = result.model_dump(mode="json")
        answer = flow_answer(flow_name(name), run.run_id, run.summary.notes, given)
        pages = {} if self.as_json else _pages(runtime, run.run_id, given)
        show(
            answer,
            self.as_json,
            *(f"! {note}" for note in answer.notes),
            f"done: run {run.run_id}",
            *made_and_next(name, parameters, answer),
            *(f"{page:<10}{url}" for page, url in pages.items()),
        )
        remember(runtime, name, answer.model_dump(mode="json"))
        return 0


def flow_name(name: str) -> str:
    """Return the name in Prefect of the flow ``module.function``."""
    function = name.rpartition(".")[2]
    return "lifecycle" if function == "run_lifecycle" else function.replace("_", "-")


def _pages(runtime: Runtime, run_id: str, result: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's own pages, or the start page of a server that does not answer."""
    from paceline.cli.installation import run_pages

    known = runtime.endpoints
    pages = {"prefect": known.prefect_ui_url, "mlflow": known.mlflow_url}
    found = {name: url for name, url in pages.items() if url}
    return found | (result.get("links") or {}) | run_pages(runtime, run_id)


# flow → what it made and the command that a person would type next, formats of its result
OUTCOMES = {
    "publish_model": ("{model_id} {version} at {url}", "distribute {model_id} {version}"),
    "build_snapshot": ("{url}", "training start MODEL_ID VERSION --snapshot {url}"),
    "distribute_model": (
        "{model_id} {version}, nodes: {relay[workers]}, deployment {relay[deployment_id]}",
        "status",
    ),
    "staged": ("{model_id} {version}, nodes: {relay[workers]}", "activate {relay[deployment_id]}"),
    "train_model": (
        "a candidate at {export_url}",
        "evaluate {model_id} --base {version} --trained {run_id} --snapshot {snapshot_url}",
    ),
    "judged": ("a candidate at {export_url}", "promote {model_id} --report {run_id}"),
    "evaluate_model": ("report {report_digest}", "promote {model_id} --report {run_id}"),
    "promote_model": (
        "{registry[model_id]} {published[version]} is {registry[alias]}",
        "distribute {registry[model_id]} {published[version]}",
    ),
    "run_lifecycle": (
        "{model[model_id]} {model[version]} is champion, on every node",
        "generate models:/{model[model_id]}@champion PROMPT",
    ),
    "verify_model": (
        "every byte of {model_id} {version} read again, nodes: {verified}, vouched for: {vouched}",
        "status",
    ),
    "rollback_model": (
        "{registry[model_id]} {registry[version]} is active on every node again",
        "status",
    ),
}


def made_and_next(flow: str, given: Mapping[str, Any], result: FlowAnswer) -> list[str]:
    """Return what a flow with these parameters made, and the command that one would type next."""
    name = flow.rpartition(".")[2]
    answer = {**given, **result.model_dump(mode="json")}
    if name == "distribute_model" and answer.get("activate") is None:
        name = "staged"
    if name == "train_model" and answer.get("report_digest"):
        name = "judged"
    made, then = OUTCOMES.get(name, ("", ""))
    try:
        if not made:
            return []
        return [f"made:     {made.format_map(answer)}", next_line(then.format_map(answer))]
    except (KeyError, TypeError):  # a result of which the ledger keeps nothing any more
        return []


def flow_options(command: F) -> F:
    """Add --run-id, --state and --json; ``command`` gets them as ``call``, a FlowCall."""

    @run_id_option
    @state_option
    @json_option
    @functools.wraps(command)
    def wrapped(run_id: str | None, state: Path | None, as_json: bool, **given: Any) -> Any:
        return command(call=FlowCall(state=state, run_id=run_id, as_json=as_json), **given)

    return cast(F, wrapped)


def require_inputs(runtime: Runtime, given: Mapping[str, Any]) -> None:
    """Refuse inputs that are not there before Prefect, whose import takes seconds.

    The flow checks them again, and more. Raises InvalidInput, SourceMissing and the errors of the
    object store.
    """
    from paceline.registry import published_reference
    from paceline.relay import allowed_source, fetch_allowed_manifest
    from paceline.storage import ObjectStore, is_remote

    directory, data, model = (given.get(name) for name in ("directory", "data", "model"))
    for source in (directory, model):
        if source and is_remote(source):
            allowed_source(source, runtime)
    for path in (directory, data):
        if not path or path == "stdlib" or path.startswith("s3://") or is_remote(path):
            continue
        if not Path(path).exists():
            raise SourceMissing("no such file or directory", got=path, do="Check the path.")
    reads = (given.get("reading") or {}).get("format") or runtime.profile.data.format
    for name, path, needed in (("model", directory, True), ("text", data, reads == "text")):
        if needed and path and Path(path).is_file():
            raise InvalidInput(
                f"a {name} is a directory of files", got=path, wanted="the directory that holds it"
            )
    model_id, version = given.get("model_id"), given.get("version") or given.get("base_version")
    if model and not is_remote(model) and not Path(model).is_absolute():
        model_id, version = published_reference(model)
    elif directory:
        version = None  # the one to be published
    if model_id and version:
        fetch_allowed_manifest(f"{runtime.models_url}/{model_id}/{version}", runtime)
    for snapshot_url in filter(None, (given.get("snapshot_url"), given.get("evaluate_on"))):
        from paceline.data import load_snapshot

        load_snapshot(snapshot_url, ObjectStore.from_runtime(runtime))
    if continued := given.get("continue_from"):
        from paceline.training import stored_training_id

        stored_training_id(continued, runtime.checkpoints_url, ObjectStore.from_runtime(runtime))


def require_records(run: Run, given: Mapping[str, Any]) -> None:
    """Refuse a training or an evaluation that this installation did not record, before Prefect;
    raises as ``sealed_records.load``."""
    from paceline.schemas import Evaluation, TrainResult
    from paceline.tasks._support import sealed_records

    for name, kind, record in (
        ("trained", "training", TrainResult),
        ("report", "evaluation", Evaluation),
    ):
        if named := given.get(name):
            sealed_records.load(run, sealed_records.resolve(run, named, kind), kind, record)


def left_behind(client: CoordinatorClient, deployment_id: str, *, cancels: bool) -> str:
    """Return a line on a deployment whose flow was interrupted; never raises PacelineError."""
    try:
        if client.deployment(deployment_id).status.is_final:
            return f"deployment {deployment_id} had ended"
        if cancels:
            client.cancel(deployment_id)
            return f"deployment {deployment_id} is cancelled"
    except PacelineError as error:
        return f"deployment {deployment_id}: {error.one_line()}"
    return (
        f"deployment {deployment_id} goes on: `paceline watch {deployment_id}` shows it, "
        f"`paceline cancel {deployment_id}` ends it"
    )


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of this training, e.g. --set training.learning_rate=3e-4 (repeatable).",
)
model_argument = click.argument("model_id")
version_argument = click.argument("version")


@click.command(
    cls=Sections,
    sections={
        "What": "data model",
        "Training": "overrides team project",
        "Promotion": "approver",
    },
)
@click.option("--data", help="Your own text files: a directory, or s3://bucket/prefix.")
@click.option(
    "--model",
    help="The base: MODEL_ID/VERSION as published, hf://…, oci://…, or a directory "
    "(default: the profile's model.base).",
)
@click.option("--approver", default=None, help="Who stands for the promotion; kept as evidence.")
@set_option
@team_option
@project_option
@flow_options
def lifecycle(
    call: FlowCall,
    data: str | None,
    model: str | None,
    approver: str | None,
    overrides: tuple[str, ...],
    team: str,
    project: str,
) -> int:
    """Run the whole lifecycle on the installation that is up.

    Interrupted, it prints the command that goes on; a finished stage is not done again.
    """
    source = None if data is None else placed(data)
    if model and Path(model).is_dir():
        model = str(Path(model).absolute())
    named = {"team": team, "project": project}
    owner: dict[str, Any] = {name: value for name, value in named.items() if value}
    return call.run(
        "lifecycle.run_lifecycle",
        data=source,
        model=model,
        approver=approver,
        settings=job_settings(overrides) or None,
        **owner,
    )


@click.command()
@model_argument
@version_argument
@click.option("--full", is_flag=True, help="Also by the SHA-256 of files and chunks.")
@flow_options
def verify(call: FlowCall, model_id: str, version: str, full: bool) -> int:
    """Have every node read its copy again and check every byte by the digest of its piece."""
    return call.run("distribute.verify_model", model_id=model_id, version=version, full=full)


def placed(name: str) -> str:
    """Return a path made absolute for the flow's process; S3 URLs and 'stdlib' unchanged."""
    return name if name.startswith("s3://") or name == "stdlib" else str(Path(name).absolute())


NAMED = "last, the id of its run or job, JSON of `paceline {} --json`, or its {}"
TRAINED = f"The training: {NAMED.format('training start', 'training_digest')}."
REPORT = f"The evaluation: {NAMED.format('evaluate', 'report_digest')}."


@click.command()
@model_argument
@click.option("--base", "base_version", required=True, help="Version the candidate started from.")
@click.option("--trained", metavar="last|RUN|JOB|FILE", required=True, help=TRAINED)
@click.option("--snapshot", metavar="URL|last", required=True, help=SNAPSHOT)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes that hold and score each model together (default: as few as hold it).",
)
@flow_options
def evaluate(
    call: FlowCall,
    model_id: str,
    base_version: str,
    trained: str,
    snapshot: str,
    ranks: int | None,
) -> int:
    """Judge a training job's candidate on held-out files, and record the report.

    The training is found by its digest in what the installation recorded.
    """
    digest = _digest_of(trained, "training_digest", "training start", call.state)
    return call.run(
        "evaluate.evaluate_model",
        model_id=model_id,
        base_version=base_version,
        trained=digest,
        snapshot_url=or_newest_made(snapshot, "url", call.state),
        ranks=ranks,
    )


@click.command()
@model_argument
@click.option("--report", metavar="last|RUN|JOB|FILE", required=True, help=REPORT)
@click.option("--base", "base_version", help="Refuse a report about another base version.")
@click.option("--trained", metavar="RUN|JOB|FILE", help="Refuse a report about another training.")
@click.option("--snapshot", help="Refuse a report about another data snapshot (its URL).")
@click.option("--approver", default=None, help="Who stands for the promotion; kept as evidence.")
@flow_options
def promote(
    call: FlowCall,
    model_id: str,
    report: str,
    base_version: str | None,
    trained: str | None,
    snapshot: str | None,
    approver: str | None,
) -> int:
    """Gate a judged candidate; on a pass make it champion and publish it.

    The report is found by its digest in what the installation's evaluations recorded: of a file
    nothing is read but the digest that it names.
    """
    digest = _digest_of(report, "report_digest", "evaluate", call.state)
    training = trained and _digest_of(trained, "training_digest", "training start", call.state)
    return call.run(
        "promote.promote_model",
        model_id=model_id,
        report=digest,
        base_version=base_version,
        trained=training,
        snapshot_url=snapshot and or_newest_made(snapshot, "url", call.state),
        approver=approver,
    )


@click.command("rollback")
@model_argument
@flow_options
def rollback(call: FlowCall, model_id: str) -> int:
    """Put MODEL_ID's previous champion back, in the registry and on every node: no transfer."""
    if not re.fullmatch(MODEL_ID, model_id):
        raise InvalidInput("not a model's id", got=repr(model_id[:100]), wanted="org/name")
    runtime = find_installation(call.state)
    if runtime.runs_flows_here:  # else ``run`` names what is missing
        from paceline.registry import Registry

        Registry.from_runtime(runtime).require_champion(model_id)
    return call.run("rollback.rollback_model", model_id=model_id)


def _digest_of(given: str, field: str, command: str, state: Path | None = None) -> str:
    """Return ``given`` where it is a digest, or the id of the run or job that it begins; of `last`
    the newest one of this user; else ``field`` of the JSON file with that name."""
    given = or_newest_made(given, field, state)
    if not Path(given).exists():
        if re.fullmatch(f"{SHA256_HEX}|{RUN_ID}|{TRAINING_ID}", given):
            return given
        if given.startswith("run-"):
            return resolve_run_id(find_installation(state), given)
        if given.startswith("job-"):
            return resolve_training_id(CoordinatorClient.of(find_installation(state)), given)
        if given.startswith("tj-"):
            client = CoordinatorClient.of(find_installation(state))
            return client.job(resolve_job_id(client, given)).job.run_id
    try:
        with click.open_file(given) as file:
            value = json.load(file)
    except OSError as error:
        raise (SourceMissing if isinstance(error, FileNotFoundError) else InvalidInput)(
            "no such file, and no id or digest",
            got=given,
            wanted=NAMED.format(command, field),
        ) from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deeply nested
        raise InvalidInput("not JSON", got=error, wanted="a JSON object", where=given) from error
    if not isinstance(value, dict):
        raise InvalidInput(
            "not a JSON object", got=type(value).__name__, wanted="an object", where=given
        )
    digest = value.get(field)
    if not isinstance(digest, str) or not re.fullmatch(SHA256_HEX, digest):
        raise InvalidInput(
            f"no {field}",
            got=", ".join(sorted(value)) or "an empty object",
            wanted=f"what `paceline {command} --json` printed",
            where=given,
            do=f"Run the same `paceline {command}` again: an older version did not print it, and a "
            "finished training is not trained again.",
        )
    return digest
