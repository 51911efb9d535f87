"""Shared by several commands: options, Prefect's environment, signals."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource
from pydantic import BaseModel

from paceline.cli.commands import Sections
from paceline.config import (
    Profile,
    Runtime,
    config_directory,
    default_state_dir,
    find_installation,
    load_profile,
    toml_value,
)
from paceline.errors import InvalidInput, NotFound, PacelineError
from paceline.schemas import (
    QUEUED_JOB_ID,
    TRAINING_ID,
    Resources,
    is_run_id,
    one_of,
)
from paceline.system import ensure_own_directory, write_private
from paceline.text import OneLine
from paceline.units import link_mbit, seconds, size_bytes

if TYPE_CHECKING:
    from paceline.client import CoordinatorClient
    from paceline.cluster import ServiceSpec
    from paceline.storage import ObjectStore

F = TypeVar("F", bound=Callable[..., Any])
JSON_TYPES = (str, int, float, bool, list, dict)  # other TOML values are dates

DEPLOYMENT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a UUID

state_option = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="State directory (default: $PACELINE_STATE or ./.paceline, else this user's login).",
)
to_option = click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="SELECTOR",
    help="Workers by label (rack=r1 or rack=r1,pool=a100) or by name (node-3,node-4); repeatable. "
    "Default: every worker that is registered and alive.",
)
run_id_option = click.option(
    "--run-id", default=None, help="Go on with this run, by its id or the beginning (default: new)."
)
deadline_option = click.option(
    "--deadline",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    help="Seconds that the fleet may take to switch.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
team_option = click.option("--team", default="", help="Whose quota it counts against.")
project_option = click.option("--project", default="", help="Whose data and costs these are.")
evaluate_option = click.option(
    "--evaluate/--no-evaluate", default=None,
    help="Judge the result on the snapshot's held-out split (default: the profile's).",
)  # fmt: skip
evaluate_on_option = click.option(
    "--evaluate-on", default="", metavar="URL", help="Judge it on this snapshot's."
)
purpose_option = click.option(
    "--purpose", default="", help="What the data are used for (default: the profile's)."
)
optimizer_option = click.option(
    "--optimizer-ref",
    default="",
    help="A pinned function of security.code_sources that makes the optimiser.",
)


def judged_on(evaluate: bool | None, evaluate_on: str, snapshot: str) -> str | None:
    """Return the snapshot that judges the result of a training, "" for none, None where the
    profile says whether one does."""
    if evaluate is False and evaluate_on:
        raise click.UsageError("--evaluate-on judges the result: leave out --no-evaluate.")
    return evaluate_on or {True: snapshot, False: "", None: None}[evaluate]


def gang_options(command: F) -> F:
    """Add what a job's gang needs; ``command`` gets it as ``resources``, its defaults left out."""

    @click.option("--ranks", type=click.IntRange(min=1),
                  help="Of the gang; default: the profile's.")  # fmt: skip
    @click.option("--ranks-per-node", type=click.IntRange(min=1),
                  help="On each node, at most.")  # fmt: skip
    @click.option("--accelerator", help="Its kind, or a part of its name: a100.")
    @click.option("--memory", "memory_bytes", callback=parsed(size_bytes), metavar="SIZE",
                  help="Of each accelerator, at least.")  # fmt: skip
    @click.option("--capacity", type=click.Choice(["on-demand", "spot"]),
                  help="Only nodes of this kind.")  # fmt: skip
    @click.option("--within", type=click.Choice(["host", "domain", "rack", "zone", "fleet"]),
                  default="fleet", show_default=True, help="It must lie within one.")  # fmt: skip
    @click.option("--label", "node_labels", multiple=True, metavar="KEY=VALUE",
                  help="That each of its nodes has (repeatable).",
                  callback=lambda _, option, given: _pairs(given, option.opts[0]))  # fmt: skip
    @click.option("--queue", help="Slurm's partition, or Kueue's LocalQueue, where these decide.")
    @click.option("--time-limit", "time_limit_s", callback=parsed(seconds), metavar="TIME",
                  help="After which Slurm or Kubernetes takes the nodes back: 12h.")  # fmt: skip
    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        resources = {key: given.pop(key) for key in Resources.model_fields}
        return command(resources={k: v for k, v in resources.items() if v}, **given)

    return cast(F, wrapped)


def with_options(
    options: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Callable[[F], F]:
    """Return the decorator that adds ``options`` to a command, the first of them first."""

    def add(command: F) -> F:
        made: Callable[..., Any] = command
        for each in reversed(options):
            made = each(made)
        return cast(F, made)

    return add


def show(answer: BaseModel | Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """Print ``answer`` as one JSON object, or ``lines`` for a person."""
    if not as_json:
        click.echo("\n".join(lines))
        return
    given = answer.model_dump(mode="json") if isinstance(answer, BaseModel) else answer
    click.echo(json.dumps({"status": "complete"} | dict(given)))


def resolve_deployment_id(client: CoordinatorClient, given: str) -> str:
    """Return the deployment id that ``given`` is or begins."""
    if DEPLOYMENT_ID.fullmatch(given):
        return given
    return one_of("deployment", given, [each.deployment_id for each in client.deployments()])


def resolve_job_id(client: CoordinatorClient, given: str) -> str:
    """Return the job id that ``given`` is or begins."""
    if re.fullmatch(QUEUED_JOB_ID, given):
        return given
    return one_of("job", given, [each.job_id for each in client.jobs(limit=500).jobs])


def resolve_run_id(runtime: Runtime, given: str) -> str:
    """Return the run id that ``given`` is, or the one of an existing run that it begins.

    With a login, and without MLflow, the runs are those of deployments and jobs.
    """
    if is_run_id(given):
        return given
    from paceline.registry import Registry, require_run_prefix

    require_run_prefix(given)
    if runtime.endpoints.mlflow_url and not runtime.is_login:
        return one_of("run", given, Registry.from_runtime(runtime).pages_of_runs(given))
    from paceline.client import CoordinatorClient

    client = CoordinatorClient.of(runtime)
    known = {each.run_id or "" for each in client.deployments()}
    known |= {each.run_id for each in client.jobs(limit=500).jobs}
    return one_of("run", given, known - {""})


def resolve_training_id(client: CoordinatorClient, given: str) -> str:
    """Return the id (``job-…``) of the training of a job that ``given`` is or begins.

    ``given`` may be the job's own id (``tj-…``). Raises NotFound where none is so, or has trained.
    """
    if not given or re.fullmatch(TRAINING_ID, given):
        return given
    if given.startswith("tj-"):
        job = client.job(resolve_job_id(client, given)).job
        if job.report is None or not job.report.training_id:
            ended = job.state.is_final
            raise NotFound(
                "this job ended without a training" if ended else "this job has not trained yet",
                got=f"{job.job_id}, {job.state.value}",
                wanted="a job that has trained",
                do=f"See `paceline jobs {'list' if ended else f'show {job.job_id}'}`.",
            )
        return job.report.training_id
    reports = (each.report for each in client.jobs(training=given, limit=500).jobs)
    return one_of("training", given, {each.training_id for each in reports if each} - {""})


LAST = "last"
MOST_INSTALLATIONS = 50  # of which a user's last things are kept
SNAPSHOT = "URL of the data snapshot; last: what this user made last there."
# What `last` means in place of a field → the flows, or the call, that answer with it; a command.
_LAST_OF = {
    "url": (("build_snapshot",), "paceline snapshot"),
    "training_digest": (("train_model", "submit_job"), "paceline training start"),
    "job_id": (("train_model", "submit_job"), "paceline training start"),
    "report_digest": (("evaluate_model", "train_model", "submit_job"), "paceline evaluate"),
}


def _newest_made() -> tuple[Path, dict[str, dict[str, str]]]:
    """Return the file of what this user's commands made last, and what is in it by installation."""
    path = config_directory() / "last.json"
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return path, found
    return path, {}


def _installation(runtime: Runtime) -> str:
    return runtime.endpoints.coordinator_url if runtime.is_login else str(runtime.state_dir)


def remember(runtime: Runtime, flow: str, answer: Mapping[str, Any]) -> None:
    """Keep what the flow ``module.function``, or a call, made there, for `last` in later commands.

    A home that cannot be written keeps nothing: the command has done its work.
    """
    made = flow.rpartition(".")[2]
    fields = [field for field, (makers, _) in _LAST_OF.items() if made in makers]
    kept = {field: str(answer[field]) for field in fields if answer.get(field)}
    if not kept:
        return
    with suppress(OSError, TypeError, PacelineError):
        path, known = _newest_made()
        place = _installation(runtime)
        held = known.pop(place, {}) | kept
        known = dict([*known.items(), (place, held)][-MOST_INSTALLATIONS:])
        ensure_own_directory(path.parent)
        write_private(path, json.dumps(known, indent=2).encode())


def or_newest_made(given: str, field: str, state: Path | None) -> str:
    """Return ``given``; of `last` the ``field`` of what this user's commands made last there.

    Raises NotFound where they have made nothing yet.
    """
    if given != LAST:
        return given
    path, known = _newest_made()
    place = _installation(find_installation(state))
    if not (found := known.get(place, {}).get(field)):
        command = _LAST_OF[field][1]
        raise NotFound(
            "this user has made none here yet",
            got=LAST,
            wanted=f"what `{command}` of this user made last in {place}",
            where=path,
            do=f"Type `{command}` first, or name it.",
        )
    return found


def again(run_id: str) -> str:
    """Return the command that was typed, as it goes on with the run ``run_id``."""
    words, whole = sys.argv[1:], []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--run-id" and word.split("=")[0] != "--run-id":  # maybe a beginning
            whole.append(word)
    return shlex.join(["paceline", *whole, "--run-id", run_id])


def there(words: str) -> str:
    """Return `paceline WORDS`, with the state directory where one was typed."""
    context, more = click.get_current_context(silent=True), ""
    if context is not None and context.params.get("state") and is_typed("state"):
        more = f" --state {shlex.quote(str(context.params['state']))}"
    return f"paceline {words}{more}"


def next_line(words: str) -> str:
    """Return the line with the command `paceline WORDS` that one would type next."""
    return f"next:     {there(words)}"


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where it is wider than the terminal, one block of lines a row."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(width=None if Console().is_terminal else 200)
    columns = zip(names, *rows, strict=True)
    if sum(3 + max(map(cell_len, each)) for each in columns) < console.width:
        table = Table(*(Column(name, no_wrap=True) for name in names))
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for row in rows:
        click.echo(row[0])
        for name, value in zip(names[1:], row[1:], strict=True):
            click.echo(f"  {name:<10} {value}".rstrip())


def show_table(
    answer: BaseModel, as_json: bool, names: Sequence[str], rows: Sequence[Sequence[str]]
) -> int:
    """Print ``answer`` as one JSON object, or ``rows`` as a table for a person."""
    if as_json:
        click.echo(answer.model_dump_json())
    else:
        print_table(names, rows)
    return 0


def notice(line: str, mark: str = "! ") -> None:
    """Print what a person should know on standard error, without disturbing the result."""
    click.echo(f"{mark}{line}", err=True)


settings_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a profile key, e.g. --set training.learning_rate=3e-4 (repeatable).",
)


def profile_options(command: F, default: str = "embedded") -> F:
    """Add ``--profile`` and ``--set`` to ``command``."""
    return click.option(
        "--profile", default=default, show_default=True, help="Profile name or path."
    )(settings_option(command))


def read_profile(profile: str, overrides: tuple[str, ...]) -> Profile:
    """Return the profile with ``KEY=VALUE`` overrides applied."""
    return load_profile(profile, _pairs(overrides))


def objects_of(
    state: Path | None, profile: str, overrides: tuple[str, ...]
) -> tuple[Profile, ObjectStore]:
    """Return the settings and the S3 store that a command means, as ``profile_and_store``; a
    ``profile`` counts as named where it was typed."""
    from paceline.python_api import profile_and_store

    return profile_and_store(_pairs(overrides), state, profile if is_typed("profile") else None)


def is_typed(parameter: str) -> bool:
    """Return whether the running command's ``parameter`` was typed."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is ParameterSource.COMMANDLINE


def refuse_typed(*headings: str, got: str, do: str | None = None) -> None:
    """Raise InvalidInput where an option below one of ``headings`` of the running command's help
    was typed: it is of another form of the command than ``got``, which has no use for it."""
    context = click.get_current_context()
    for heading in headings:
        names = cast(Sections, context.command).sections[heading].split()
        options = [each.opts[0] for each in context.command.params if each.name in names
                   and is_typed(str(each.name))]  # fmt: skip
        if options:
            raise InvalidInput(
                f'{", ".join(options)} belong{"" if options[1:] else "s"} to "{heading}"',
                got=got,
                do=do or f"See `{context.command_path} --help`.",
            )


def job_settings(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return one training's own settings from ``KEY=VALUE``, values as JSON has them."""
    return {
        key: value if isinstance(value := toml_value(text), JSON_TYPES) else text
        for key, text in _pairs(overrides).items()
    }


def _pairs(overrides: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    pairs: dict[str, str] = {}
    for each in overrides:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise InvalidInput(f"bad {option}", got=each, wanted="KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def state_directory(state: Path | None) -> Path:
    """Return the state directory that ``--state`` names, or the default."""
    return (state or default_state_dir()).absolute()


def point_prefect_at(runtime: Runtime) -> None:
    """Set what Prefect reads at import: its server, and a home inside the state directory.

    Prefect is configured only by the environment, so call this before importing it. Its tracebacks
    stay in its own log, on the run's page; on the command line an error is one line.
    """
    os.environ.update(runtime.prefect_environment())
    os.environ.setdefault("PREFECT_HOME", str(runtime.state_dir / "prefect-client"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_RESULTS_DEFAULT_SERIALIZER", "json")
    os.environ["PACELINE_STATE"] = str(runtime.state_dir)


# Commands that transfer bytes: SIGTERM and SIGHUP act like Ctrl-C, so that open files are closed
# and verified pieces are kept; and the relay's log stays out of the terminal.


class Terminated(KeyboardInterrupt):
    """This process received SIGTERM or SIGHUP."""


@contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], object], *numbers: int
) -> Iterator[None]:
    """Within the ``with``, ``handler`` gets these signals; ignored ones (nohup) stay ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def terminated_by_signals() -> Iterator[None]:
    """Within the ``with``, SIGTERM and SIGHUP raise ``Terminated`` unless they are ignored."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    with signal_handler(end, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def call_every(seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """Within the ``with``, call ``report`` every ``seconds`` in a thread of its own."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            report()

    thread = threading.Thread(target=run, name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def log_only_defects() -> None:
    """Log only records with a traceback; the command's result or error covers the rest."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    handler.addFilter(lambda record: bool(record.exc_info))
    logging.getLogger("paceline").addHandler(handler)


def extra_services(state_dir: Path) -> list[ServiceSpec]:
    """Return the one-shot service that registers prefect.yaml; readiness does not wait for it."""
    from paceline.cluster import Ready, ServiceSpec

    return [
        ServiceSpec(
            name="prefect-deployments",
            argv=(sys.executable, "-m", "paceline.flows.register", "--state", str(state_dir)),
            ready=Ready(kind="exit"),
            after=("prefect",),
            blocking=False,
        )
    ]


# Sizes and speeds, as `units` reads them: click.option("--link", **LINK).
T = TypeVar("T")


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T | None]:
    """Return a callback for click's options: ``parse`` of the value, None where it is None."""

    def callback(_: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(value)
        except InvalidInput as error:
            raise error.as_kind(InvalidInput, where=parameter.opts[0]) from error

    return callback


def _kibibyte_at_least(text: str) -> int:
    if (found := size_bytes(text)) < 1024:
        raise InvalidInput("too small", got=repr(text), wanted="1KiB at least")
    return found


SIZE: dict[str, Any] = {"metavar": "SIZE", "callback": parsed(size_bytes)}
DATA_SIZE: dict[str, Any] = {"metavar": "SIZE", "callback": parsed(_kibibyte_at_least)}
LINK: dict[str, Any] = {"metavar": "SPEED", "callback": parsed(link_mbit)}
