"""`paceline jobs`: submit training jobs, look at the queue, pause, resume, cancel and review them.

Each command calls the coordinator only; none needs Prefect, Dask or MLflow here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from paceline.cli.commands import Group, Sections
from paceline.cli.options import (
    SNAPSHOT,
    evaluate_on_option,
    evaluate_option,
    gang_options,
    job_settings,
    json_option,
    judged_on,
    next_line,
    notice,
    optimizer_option,
    or_newest_made,
    project_option,
    purpose_option,
    remember,
    resolve_job_id,
    resolve_training_id,
    settings_option,
    show,
    show_table,
    state_option,
)
from paceline.client import (
    OUTAGE_S,
    POLL_S,
    CoordinatorClient,
    job_spec,
    require_success,
    retry,
)
from paceline.config import find_installation
from paceline.errors import PacelineError
from paceline.jobs import compared, money, range_text
from paceline.schemas import (
    JobLogShown,
    JobOutcome,
    JobReport,
    JobShown,
    JobsShown,
    JobState,
    JobView,
    LogLine,
    ReviewJob,
    StateLine,
    SubmitJob,
    TrainingJob,
)
from paceline.text import printable, shortened
from paceline.units import duration, humane, moment, size


@click.group(cls=Group)
def jobs() -> None:
    """Training jobs: they wait in a queue until their whole gang can start."""


@jobs.command(
    cls=Sections,
    sections={
        "Training": "snapshot code_ref optimizer_ref continue_from steps seed overrides",
        "Gang": "ranks ranks_per_node accelerator memory_bytes capacity within node_labels",
        "Queue": "name team project purpose priority budget queue time_limit_s idempotency_key",
        "Afterwards": "evaluate evaluate_on follow",
    },
)
@click.argument("model_id")
@click.argument("version")
@click.option("--snapshot", metavar="URL|last", required=True, help=SNAPSHOT)
@gang_options
@click.option("--code-ref", default="", help="A pinned function of security.code_sources.")
@optimizer_option
@click.option("--continue-from", default="", metavar="TRAINING",
              help="A finished job: its id, the beginning of one, or last.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), help="Default: the profile's.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the training.")
@click.option("--name", default="", help="What lists show beside the job's id.")
@click.option("--team", help="Whose quota it counts against (default: the token's team).")
@project_option
@purpose_option
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True,
              help="In the queue; the highest starts first.")  # fmt: skip
@evaluate_option
@evaluate_on_option
@click.option("--budget", type=click.FloatRange(min=0), help="Pause the job when it has cost this.")
@settings_option
@click.option("--key", "idempotency_key", help="The same key again finds the same job.")
@click.option("--follow", is_flag=True, help="Wait for its end, and show its log.")
@state_option
@json_option
def submit(
    model_id: str,
    version: str,
    snapshot: str,
    steps: int | None,
    overrides: tuple[str, ...],
    team: str | None,
    evaluate: bool | None,
    evaluate_on: str,
    idempotency_key: str | None,
    follow: bool,
    state: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Queue a training of VERSION of MODEL_ID on a snapshot.

    Its gang gets all its nodes at once or waits; the nodes get the version first.
    """
    snapshot, parameters = or_newest_made(snapshot, "url", state), job_settings(overrides)
    if steps is not None:
        parameters["training.steps"] = steps
    fields = given | ({"team": team} if team else {})
    runtime = find_installation(state)
    client = CoordinatorClient.of(runtime)
    continued = or_newest_made(fields["continue_from"], "job_id", state)
    fields["continue_from"] = resolve_training_id(client, continued)
    spec = job_spec(
        {
            "model_id": model_id,
            "version": version,
            "data_snapshot": snapshot,
            "parameters": parameters,
            "evaluate_on": judged_on(evaluate, evaluate_on, snapshot),
            **fields,
        }
    )
    made = client.submit_job(spec, idempotency_key)
    # The run stands for its result and its report, once it has them.
    last = {"training_digest": made.job.run_id, "job_id": made.job.job_id}
    if made.job.spec.evaluate_on:
        last["report_digest"] = made.job.run_id
    remember(runtime, "submit_job", last)
    if (guess := made.estimate) is not None:
        figures = (
            (guess.hours, "hours"), (guess.energy_kwh, "kWh"), (guess.price, guess.currency),
        )  # fmt: skip
        known = ", ".join(range_text(each, f" {unit}") for each, unit in figures if each)
        notice(f"estimate: {known}; {guess.based_on[0]}", mark="")
    if not follow:
        job_id = made.job.job_id
        _print(made, as_json, f"queued: {job_id}", next_line(f"jobs show {job_id}"))
        return 0
    notice(f"job {made.job.job_id}; Ctrl-C leaves it running", mark="")
    return _followed(client, made.job.job_id, as_json)


@jobs.command(
    "list",
    cls=Sections,
    sections={"Only jobs of": "states team project name submitter model"},
)
@click.option("--status", "states", multiple=True,
              type=click.Choice([each.value for each in JobState]), metavar="STATE",
              help="This state, such as queued or running (repeatable).")  # fmt: skip
@click.option("--team", default="", help="This team.")
@click.option("--project", default="", help="This project.")
@click.option("--name", default="", help="A part of the job's name.")
@click.option("--submitter", default="", help="The name of the token that submitted it.")
@click.option("--model", default="", metavar="MODEL_ID", help="The model that they train.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True,
              help="Jobs to list, at most.")  # fmt: skip
@click.option("--offset", type=click.IntRange(0, 10**6), default=0, help="Leave the newest out.")
@state_option
@json_option
def list_jobs(
    states: tuple[str, ...], offset: int, state: Path | None, as_json: bool, **wanted: Any
) -> int:
    """List jobs, the newest first: how far each is, and why it waits."""
    found = _client(state).jobs(states, offset=offset, **wanted)
    rows = [
        (
            each.job_id,
            each.spec.name,
            each.state,
            _progress(each),
            each.spec.team,
            f"{each.spec.model_id} {each.spec.version}",
            str(each.spec.priority),
            duration(time.time() - each.created_at),
            ",".join(sorted(each.placement.hosts)) if each.placement else "",
            each.reason,
        )
        for each in found.jobs
    ]
    head = "job name state progress team model priority age nodes reason"
    show_table(JobsShown(jobs=found.jobs, total=found.total), as_json, head.split(), rows)
    if not as_json and (more := found.total - offset - len(rows)) > 0:
        notice(f"{more} more: --limit, --offset, --status, --name, --team …", mark="")
    return 0


@jobs.command("show")
@click.argument("job")
@state_option
@json_option
def show_job(job: str, state: Path | None, as_json: bool) -> int:
    """Show JOB: its state and why, progress, checkpoints, ranks, and what happened."""
    client = _client(state)
    view = client.job(resolve_job_id(client, job))
    _print(view, as_json, *_lines(view))
    return 0


@jobs.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Until the job ends.")
@click.option("--attempt", type=click.IntRange(min=1),
              help="Of this attempt's flow run (default: the newest).")  # fmt: skip
@click.option("--tail", type=click.IntRange(1, 200), help="Only the last lines.")
@state_option
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object; with --follow one a line.")  # fmt: skip
def logs(
    job: str, follow: bool, attempt: int | None, tail: int | None, state: Path | None, as_json: bool
) -> int:
    """Print the log of JOB's flow."""
    if follow and (attempt or tail):
        raise click.UsageError("--follow shows the whole log: leave out --attempt and --tail.")
    client = _client(state)
    job_id = resolve_job_id(client, job)
    if follow:
        return _followed_by_program(client, job_id) if as_json else _followed(client, job_id)
    after = 0
    lines: list[str] = []
    while (found := client.job_log(job_id, after, attempt=attempt or 0, tail=tail or 0)).lines:
        after = found.after
        if as_json:
            lines += found.lines
        else:
            click.echo("\n".join(found.lines))
        if tail:
            break
    if as_json:
        show(JobLogShown(job_id=job_id, lines=tuple(lines)), as_json)
    return 0


def _changing(what: Any, text: str, *options: Callable[..., Any]) -> None:
    def change(job: str, state: Path | None, as_json: bool, budget: float | None = None) -> int:
        client = _client(state)
        made = client.change_job(resolve_job_id(client, job), what, budget=budget)
        _print(made, as_json, f"{made.job.job_id}: {made.job.state}")
        return 0

    for each in (json_option, state_option, *options, click.argument("job")):
        change = each(change)
    jobs.command(what, help=text)(change)


_changing("pause", "Save JOB's state on every rank and end them; it keeps its place in the queue.")
_changing(
    "resume",
    "Queue a paused JOB again; it goes on from its newest checkpoint.",
    click.option("--budget", type=click.FloatRange(min=0), help="From now on; 0: none. In the "
                 "currency of [prices]; also for a job that waits or runs."),
)  # fmt: skip
_changing("cancel", "End JOB for good; its checkpoints stay.")


@jobs.command()
@click.argument("job")
@click.option("--reject", is_flag=True, help="The job failed: its model must not be used.")
@click.option("--reason", default="", help="Why; kept with the decision.")
@state_option
@json_option
def review(job: str, reject: bool, reason: str, state: Path | None, as_json: bool) -> int:
    """Accept (or reject) JOB, which passed bad data over; needs a token of scope approve."""
    client = _client(state)
    made = client.review_job(
        resolve_job_id(client, job), ReviewJob(accepted=not reject, reason=reason)
    )
    _print(made, as_json, f"{made.job.job_id}: {made.job.state}")
    return 0


def _print(view: JobView, as_json: bool, *lines: str) -> None:
    show(JobShown(state=view.job.state, **dict(view)), as_json, *lines)


def _client(state: Path | None) -> CoordinatorClient:
    return CoordinatorClient.of(find_installation(state))


def _followed(client: CoordinatorClient, job_id: str, as_json: bool = False) -> int:
    """Print the job's log, its changes of state and its end; raise what it ended with."""

    def on_state(job: TrainingJob) -> None:
        if not as_json:
            notice(f"{job.state}{f': {job.reason}' if job.reason else ''}", mark="# ")

    view = _until_ended(client, job_id, on_state, lambda line: notice(line, mark=""))
    require_success(view.job)
    _print(view, as_json, *_lines(view))
    return 0


def _followed_by_program(client: CoordinatorClient, job_id: str) -> int:
    """Print the same as one JSON object a line, and return the exit code of the job's end."""

    def emit(item: BaseModel) -> None:
        click.echo(item.model_dump_json())

    job = _until_ended(
        client,
        job_id,
        lambda job: emit(StateLine(state=job.state, reason=job.reason)),
        lambda line: emit(LogLine(line=line)),
    ).job
    code = 0
    try:
        require_success(job)
    except PacelineError as error:
        code = error.exit_code
    emit(JobOutcome(job_id=job_id, state=job.state, reason=job.reason, exit_code=code))
    return code


def _until_ended(
    client: CoordinatorClient,
    job_id: str,
    on_state: Callable[[TrainingJob], None],
    on_line: Callable[[str], None],
) -> JobView:
    """Return the job once it has ended; meanwhile pass on its log and changes of its state."""
    flow_run, attempt, after, said = None, 0, 0, None
    while True:
        view = retry(lambda: client.job(job_id), OUTAGE_S, notice)
        job = view.job
        if (job.state, job.reason) != said:
            on_state(job)
        said = job.state, job.reason
        if job.flow_run_id and job.flow_run_id != flow_run:
            flow_run, attempt, after = job.flow_run_id, job.attempt, 0
        found = retry(lambda: client.job_log(job_id, after, attempt=attempt), OUTAGE_S, notice)  # noqa: B023
        for each in found.lines:
            on_line(each)
        after = found.after
        if (job.state.is_final or job.state is JobState.NEEDS_REVIEW) and not found.lines:
            return view
        if not found.lines:
            time.sleep(POLL_S)


def _progress(job: TrainingJob) -> str:
    report = job.report
    if report is None or not report.steps:
        return ""
    loss = report.metrics.get("loss")
    return f"{report.step}/{report.steps}" + (f", loss {loss:.3f}" if loss is not None else "")


def _requested(spec: SubmitJob) -> list[str]:
    """Return what was submitted and has no line of its own, without defaults."""
    elsewhere = {"model_id", "version", "data_snapshot", "name", "team", "priority", "budget"}
    given = spec.model_dump(mode="json", exclude_defaults=True, exclude=elsewhere)
    lines = []
    for key, value in given.items():
        exact = key == "parameters"  # to be copied
        pairs = (
            [f"{k}={v if exact else humane(k, v)}" for k, v in value.items()]
            if isinstance(value, dict)
            else [value]
        )
        shown = shortened([printable(str(each))[:300] or "nothing" for each in pairs], 12)
        lines.append(f"  {key.replace('_', ' '):<11} {shown}")
    return lines


def _report_lines(job: TrainingJob, report: JobReport) -> list[str]:
    """Return what the job's flow reported last."""
    rate = report.metrics.get("tokens_per_second")
    speed = f", {rate:,.0f} tokens/s" if rate else ""
    lines = [f"  progress    step {_progress(job) or report.step}{speed}"]
    if report.read_bytes is not None:
        kept = sum(each.bytes for each in report.checkpoints)
        lines.append(
            f"  store       {size(report.read_bytes)} read, "
            f"{size(report.written_bytes or 0)} written, {size(kept)} kept as checkpoints"
        )
    if report.training_id:
        lines.append(f"  training    {report.training_id}")
    if report.report_digest:
        bits = report.metrics.get("evaluation_bits_per_byte")
        figure = "" if bits is None else f"{bits:.4f} bits per byte; "
        by = f"paceline promote {job.spec.model_id} --report {report.training_id}"
        lines.append(f"  judged      {figure}next: {by}")
    lines += [
        f"  checkpoint  step {each.step}, {moment(each.created_at)}, {each.object_ref}"
        for each in report.checkpoints[-3:]
    ]
    lines += [
        f"  rank {each.rank:<6} {each.host}, {each.state}, at {moment(each.last_heartbeat)}"
        for each in report.workers
    ]
    lines += [
        f"  early ends  {host}: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"
        for host, kinds in sorted(report.failures.items())
    ]
    lines += [f"  note        {each}" for each in report.notes[-5:]]
    return lines


def _lines(view: JobView) -> list[str]:
    job, report = view.job, view.job.report

    spec = job.spec
    lines = [
        f"{job.job_id}{f' ({spec.name})' if spec.name else ''}: {job.state}"
        + (f", {job.reason}" if job.reason else ""),
        f"  model       {spec.model_id} {spec.version} on {spec.data_snapshot}",
        f"  team        {spec.team}, priority {spec.priority}, submitted by {job.submitted_by}",
        *_requested(spec),
        f"  run         {job.run_id}, flow run {job.attempt}",
    ]
    if view.spent is not None or spec.budget:
        of = f" of {money(spec.budget)}" if spec.budget else ""
        so_far = money(view.spent if job.usage else 0.0, "not known")
        lines.append(f"  cost        {so_far}{of} {view.currency}")
    if (guess := view.estimate) is not None:
        figures = compared(guess, view.hours, view.energy_kwh, view.spent)
        lines += [f"  {name:<11} {each}" for name, each in figures.items()]
    if (held := job.allocation) is not None:
        said = ", ".join(filter(None, (held.id, held.state, held.reason)))
        lines.append(f"  {held.engine:<11} {said}")
    if job.placement is not None:
        hosts = ", ".join(f"{host} ({n})" for host, n in sorted(job.placement.hosts.items()))
        level = job.placement.level
        where = "over the fleet" if level == "fleet" else f"in one {level}"
        lines.append(f"  nodes       {hosts}, {where}, score {job.placement.score:.2f}")
    if report is not None:
        lines += _report_lines(job, report)
    if view.same_submission:
        lines.append(f"  same as     {', '.join(view.same_submission)}: they share one training")
    lines += [f"  {name:<11} {url}" for name, url in view.pages.items()]
    if job.history and (earlier := job.history[0].earlier):
        lines.append(f"  {earlier} earlier changes: `paceline audit --name job.state_changed`")
    lines += [
        f"  {moment(each.at)}  {each.state}{f': {each.reason}' if each.reason else ''}"
        for each in job.history
    ]
    return lines
