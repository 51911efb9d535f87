"""`paceline sweep`: search a training's settings; each trial is a job of the installation's queue.

Works from any machine with a login, and needs the extra sweeps, neither Prefect nor MLflow.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import (
    ends_in_order,
    job_settings,
    json_option,
    notice,
    print_table,
    show,
    state_option,
)
from paceline.client import Client
from paceline.errors import Cancelled
from paceline.jobs import Sweep, page_of, read_space, report_sweep, run_sweep, trial_row
from paceline.jobs.sweep_page import COLUMNS
from paceline.schemas import SweepShown

storage_option = click.option(
    "--storage", default="paceline-sweeps.sqlite", show_default=True,
    help="Where the study is kept: a file of SQLite, or SQLAlchemy's URL of a database.",
)  # fmt: skip


class _Sweeps(click.Group):
    """`paceline sweep NAME …` is `paceline sweep run NAME …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


@click.group(cls=_Sweeps)
def sweep() -> None:
    """Search a training's settings; `paceline sweep NAME …` is `paceline sweep run NAME …`."""


@sweep.command()
@click.argument("name")
@click.argument("model_id")
@click.argument("version")
@click.option("--snapshot", required=True, help="The data snapshot's URL.")
@click.option("--space", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="The search space, a TOML file.")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), default=16, show_default=True,
              help="In all, those of earlier runs of NAME included.")  # fmt: skip
@click.option("--parallel", type=click.IntRange(1, 256), default=2, show_default=True,
              help="Jobs at once, at most.")  # fmt: skip
@click.option("--sampler", type=click.Choice(["tpe", "cmaes", "random"]), default="tpe",
              show_default=True)  # fmt: skip
@click.option("--pruner", type=click.Choice(["none", "asha", "hyperband", "median"]),
              default="none", show_default=True, help="Cancels jobs of bad trials.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), help="The sampler's.")
@click.option("--metric", default="loss", show_default=True, help="Of the job's report.")
@click.option("--maximize", is_flag=True, help="Search the highest; else the lowest.")
@click.option("--ranks", type=click.IntRange(min=1), help="Of each gang.")
@click.option("--ranks-per-node", type=click.IntRange(min=1))
@click.option("--accelerator", default="", help="Its kind, or a part of its name: a100.")
@click.option("--steps", type=click.IntRange(min=1), help="Of each training.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="In each trial.")
@click.option("--team", default="", help="Whose quota it counts against.")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True)
@click.option("--cancel-jobs", is_flag=True, help="Ctrl-C cancels the jobs; else they go on.")
@storage_option
@state_option
@json_option
def run(
    space: Path,
    steps: int | None,
    overrides: tuple[str, ...],
    cancel_jobs: bool,
    state: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Run the sweep NAME: trainings of VERSION of MODEL_ID on a snapshot, with settings of a space.

    The same command again goes on: finished trials are kept, and running jobs are followed.
    """
    resources = {key: given.pop(key) for key in ("ranks", "ranks_per_node", "accelerator")}
    settings = job_settings(overrides) | ({} if steps is None else {"training.steps": steps})
    made = Sweep(
        space=read_space(space),
        resources={key: value for key, value in resources.items() if value},
        settings=settings,
        **given,
    )
    with Client(state=state) as client, ends_in_order():
        try:
            found = run_sweep(
                made, client, cancel_jobs=cancel_jobs, on_line=lambda line: notice(line, mark="")
            )
        except KeyboardInterrupt as error:
            raise Cancelled(
                "the sweep was cancelled",
                got="its jobs are cancelled" if cancel_jobs else "its jobs go on",
                where=made.name,
                do=f"Go on with: {shlex.join(['paceline', *sys.argv[1:]])}",
            ) from error
    _show(found, as_json)
    return 0


@sweep.command()
@click.argument("name")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a page there: parallel coordinates, importance, trials.")  # fmt: skip
@storage_option
@json_option
def report(name: str, html: Path | None, storage: str, as_json: bool) -> int:
    """Show the trials of the sweep NAME so far."""
    found = report_sweep(name, storage)
    if html is not None:
        html.write_text(page_of(found), encoding="utf-8")
    _show(found, as_json)
    return 0


def _show(found: SweepShown, as_json: bool) -> None:
    if as_json:
        show(found, as_json)
        return
    print_table(
        ("trial", "state", found.metric, *COLUMNS), [trial_row(each) for each in found.trials]
    )
    if found.best is None:
        notice("no trial is complete")
        return
    click.echo(f"best:      trial {found.best.number}, {found.metric} {found.best.value:.6g}")
    click.echo(f"reproduce: {found.reproduce}")
