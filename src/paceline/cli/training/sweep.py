"""`paceline sweep`: search a training's settings; each trial is a job of the installation's queue.

Works from any machine with a login, and needs the extra sweeps, neither Prefect nor MLflow; with
--detach the installation's Prefect worker runs the sweep, and this machine needs no extra.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.commands import Group, Sections
from paceline.cli.options import (
    SNAPSHOT,
    gang_options,
    job_settings,
    json_option,
    next_line,
    notice,
    or_newest_made,
    print_table,
    purpose_option,
    settings_option,
    show,
    state_option,
    team_option,
    terminated_by_signals,
)
from paceline.client import Client, runtime_of
from paceline.config import Runtime, find_installation
from paceline.errors import Cancelled, InvalidInput, NotFound
from paceline.extras import installed_extras
from paceline.jobs import (
    COLUMNS,
    Search,
    Sweep,
    page_of,
    read_space,
    report_sweep,
    run_sweep,
    studies_of,
    trial_row,
)
from paceline.schemas import SWEEP, SweepShown, SweepStarted, new_run_id, sweep_key

OWN_FILE = "paceline-sweeps.sqlite"  # of a login that runs its sweeps itself

storage_option = click.option(
    "--storage",
    help="Where the study is kept: a file of SQLite, or SQLAlchemy's URL of a database. Default: "
    f"the installation's ([sweeps] storage of its profile); with a login {OWN_FILE}.",
)


class _Sweeps(Group):
    """`paceline sweep NAME …` is `paceline sweep run NAME …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


@click.group(cls=_Sweeps)
def sweep() -> None:
    """Search a training's settings; `paceline sweep NAME …` is `paceline sweep run NAME …`."""


@sweep.command(
    cls=Sections,
    sections={
        "Search": "space trials parallel sampler pruner seed metric maximize storage",
        "Each training": "snapshot_url code_ref steps overrides",
        "Gang": "ranks ranks_per_node accelerator memory_bytes capacity within node_labels",
        "Queue": "team project purpose priority budget queue time_limit_s cancel_jobs detach",
    },
)
@click.argument("name")
@click.argument("model_id")
@click.argument("version")
@click.option("--snapshot", "snapshot_url", metavar="URL|last", required=True, help=SNAPSHOT)
@click.option("--space", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="The search space, a TOML file.")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), default=16, show_default=True,
              help="In all, those of earlier runs of NAME included.")  # fmt: skip
@click.option("--parallel", type=click.IntRange(1, 256), default=2, show_default=True,
              help="Jobs at once, at most.")  # fmt: skip
@click.option("--sampler", type=click.Choice(["tpe", "cmaes", "random"]), default="tpe",
              show_default=True, help="How the next settings are chosen.")  # fmt: skip
@click.option("--pruner", type=click.Choice(["none", "asha", "hyperband", "median"]),
              default="none", show_default=True, help="Cancels jobs of bad trials.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), help="The sampler's.")
@click.option(
    "--metric", default="loss", show_default=True, help="A figure of the job's report, e.g. loss."
)
@click.option("--maximize", is_flag=True, help="Search the highest; else the lowest.")
@gang_options
@click.option("--code-ref", default="", help="A pinned function of security.code_sources.")
@click.option("--steps", type=click.IntRange(min=1), help="Of each training.")
@settings_option
@team_option
@click.option("--project", default="", help="Project of the jobs.  [default: sweep-NAME]")
@purpose_option
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True,
              help="Of each job in the queue; the highest starts first.")  # fmt: skip
@click.option("--budget", type=click.FloatRange(min=0),
              help="Start no other trial when all together have cost this.")  # fmt: skip
@click.option("--cancel-jobs", is_flag=True, help="Ctrl-C cancels the jobs; else they go on.")
@click.option("--detach", is_flag=True, help="The installation runs it; do not wait.")
@storage_option
@state_option
@json_option
def run(
    space: Path,
    steps: int | None,
    overrides: tuple[str, ...],
    cancel_jobs: bool,
    detach: bool,
    storage: str | None,
    state: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Run the sweep NAME: trainings of VERSION of MODEL_ID on a snapshot, with settings of a space.

    The same command again goes on: finished trials are kept, and running jobs are followed.
    """
    given["snapshot_url"] = or_newest_made(given["snapshot_url"], "url", state)
    settings = job_settings(overrides) | ({} if steps is None else {"training.steps": steps})
    made = Sweep.of({"space": read_space(space), "settings": settings, **given})
    with Client(state=state) as client:
        if detach:
            if storage or cancel_jobs:
                raise InvalidInput(
                    "the installation runs a detached sweep",
                    got="--storage" if storage else "--cancel-jobs",
                    do="Leave it out: the study is the installation's, and a cancel in Prefect "
                    "cancels the jobs.",
                )
            return _detach(made, client, as_json)
        runtime = runtime_of(client)
        found = _run(made, client, runtime, storage or _storage(runtime), cancel_jobs=cancel_jobs)
    _show(found, as_json)
    return 0


def _run(
    made: Sweep, client: Client, runtime: Runtime, storage: str, *, cancel_jobs: bool
) -> SweepShown:
    # MLflow's credentials are in the state directory: a login has none.
    logs = bool(not runtime.is_login and runtime.endpoints.mlflow_url) and (
        "flows" in installed_extras()
    )
    with terminated_by_signals():
        try:
            found = run_sweep(
                made, client, storage, run_id=new_run_id() if logs else "",
                cancels=lambda: cancel_jobs, on_line=lambda line: notice(line, mark=""),
            )  # fmt: skip
        except KeyboardInterrupt as error:
            raise Cancelled(
                "the sweep was cancelled",
                got="its jobs are cancelled" if cancel_jobs else "its jobs go on",
                where=made.name,
                do=f"Go on with: {shlex.join(['paceline', *sys.argv[1:]])}",
            ) from error
    if found.run_id and logs:
        from paceline.registry import Registry
        from paceline.tasks._support.figures import record_sweep

        registry = Registry.from_runtime(runtime)
        mlflow_run = registry.ensure_run(
            found.run_id, experiment=runtime.profile.model.model_id, name=f"sweep {made.name}"
        )
        record_sweep(registry, mlflow_run, found, client)
        registry.finish_run(mlflow_run)
    return found


def _detach(made: Sweep, client: Client, as_json: bool) -> int:
    given = made.model_dump(mode="json", exclude_unset=True)
    search = {key: given.pop(key) for key in Search.model_fields if key in given}
    begun = client.start("sweep", given | {"search": search}, on_notice=notice)
    answer = SweepStarted(run_id=begun.run_id, flow_run_id=begun.id, page=begun.page)
    show(answer, as_json, f"started:  {begun.page or begun.id}",
         next_line(f"sweep report {made.name}"))  # fmt: skip
    return 0


def _storage(runtime: Runtime) -> str:
    return OWN_FILE if runtime.is_login else studies_of(runtime)


@sweep.command()
@click.argument("name")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a page there: parallel coordinates, importance, trials.")  # fmt: skip
@storage_option
@state_option
@json_option
def report(
    name: str, html: Path | None, storage: str | None, state: Path | None, as_json: bool
) -> int:
    """Show the trials of the sweep NAME so far."""
    found = report_sweep(name, storage) if storage else _reported(name, find_installation(state))
    if html is not None:
        html.write_text(page_of(found), encoding="utf-8")
    _show(found, as_json)
    return 0


def _reported(name: str, runtime: Runtime) -> SweepShown:
    """Return what was found; with a login what the installation has recorded of a sweep that it
    runs, unless the study is here."""
    if not runtime.is_login or Path(OWN_FILE).is_file():
        try:
            return report_sweep(name, _storage(runtime))
        except NotFound:
            if not runtime.is_login:
                raise
    with Client.of(runtime) as client:
        record = client.coordinator.ledger_get(SWEEP, sweep_key(name))
    if record is None:
        raise NotFound("no such sweep", got=name, where=f"{OWN_FILE} and the installation",
                       do="Name its --storage.")  # fmt: skip
    return SweepShown.model_validate_json(json.dumps(record.output))


def _show(found: SweepShown, as_json: bool) -> None:
    if as_json:
        show(found, as_json)
        return
    print_table(
        ("trial", "state", found.metric, *COLUMNS), [trial_row(each) for each in found.trials]
    )
    if found.left_out:
        notice(f"{found.left_out} more trials, which are worse, are left out")
    if found.stopped:
        notice(f"no other trial starts: {found.stopped}")
    if found.best is None:
        notice("no trial is complete")
        return
    click.echo(f"best:      trial {found.best.number}, {found.metric} {found.best.value:.6g}")
    click.echo(f"reproduce: {found.reproduce}")
