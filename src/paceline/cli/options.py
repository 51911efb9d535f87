"""Shared by several commands: options, Prefect's environment, signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from pydantic import BaseModel

from paceline.cluster import Ready, ServiceSpec
from paceline.config import Profile, Runtime, default_state_dir, load_profile, toml_value
from paceline.errors import InvalidInput
from paceline.schemas import Inventory
from paceline.text import OneLine
from paceline.units import link_mbit, size, size_bytes

F = TypeVar("F", bound=Callable[..., Any])
JSON_TYPES = (str, int, float, bool, list, dict)  # other TOML values are dates

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
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def show(answer: BaseModel | Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """Print ``answer`` as one JSON object, or ``lines`` for a person."""
    if not as_json:
        click.echo("\n".join(lines))
    elif isinstance(answer, BaseModel):
        click.echo(answer.model_dump_json())
    else:
        click.echo(json.dumps(answer))


def notice(line: str) -> None:
    """Print what a person should know on standard error, without disturbing the result."""
    click.echo(f"! {line}", err=True)


def profile_options(command: F, default: str = "embedded") -> F:
    """Add ``--profile`` and ``--set`` to ``command``."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a profile key, e.g. --set cluster.link_mbit=6 (repeatable).",
    )(command)
    return click.option(
        "--profile", default=default, show_default=True, help="Profile name or path."
    )(command)


def read_profile(profile: str, overrides: tuple[str, ...]) -> Profile:
    """Return the profile with ``KEY=VALUE`` overrides applied."""
    return load_profile(profile, _pairs(overrides))


def job_settings(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return one training's own settings from ``KEY=VALUE``, values as JSON has them."""
    return {
        key: value if isinstance(value := toml_value(text), JSON_TYPES) else text
        for key, text in _pairs(overrides).items()
    }


def _pairs(overrides: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for each in overrides:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise InvalidInput("bad --set", got=each, wanted="KEY=VALUE, e.g. cluster.nodes=4")
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
def handling(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
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
def ends_in_order() -> Iterator[None]:
    """Within the ``with``, SIGTERM and SIGHUP raise ``Terminated`` unless they are ignored."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    with handling(end, signal.SIGTERM, signal.SIGHUP):
        yield


def say_only_defects() -> None:
    """Log only records with a traceback; the command's result or error covers the rest."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    handler.addFilter(lambda record: bool(record.exc_info))
    logging.getLogger("paceline").addHandler(handler)


def extra_services(state_dir: Path) -> list[ServiceSpec]:
    """Return the one-shot service that registers prefect.yaml; readiness does not wait for it."""
    return [
        ServiceSpec(
            name="prefect-deployments",
            argv=(sys.executable, "-m", "paceline.flows.register", "--state", str(state_dir)),
            ready=Ready(kind="exit"),
            after=("prefect",),
            blocking=False,
        )
    ]


def machine_line(found: Inventory | None) -> str:
    """Return a node's machine in a line: GPUs, cores, memory, network, disk; "" if not reported."""
    if found is None:
        return ""
    gpus = [f"{each.count} × {each.kind} {size(each.memory_bytes)}" for each in found.accelerators]
    parts = [*gpus, f"{found.cores} cores", size(found.memory_bytes)]
    if found.interface_mbit is not None:
        parts.append(f"{found.interface} {found.interface_mbit:g} Mbit/s")
    if found.disk_bytes_s is not None:
        parts.append(f"disk {size(round(found.disk_bytes_s))}/s")
    return ", ".join(parts)


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
            option = parameter.opts[0]
            raise InvalidInput(
                error.what, got=error.got, wanted=error.wanted, where=option
            ) from error

    return callback


SIZE: dict[str, Any] = {"metavar": "SIZE", "callback": parsed(size_bytes)}
LINK: dict[str, Any] = {"metavar": "SPEED", "callback": parsed(link_mbit)}
