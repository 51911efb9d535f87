"""Options and environment that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.errors import InvalidInput
from paceline.profile import Profile, Runtime, default_state_dir, load_profile

F = TypeVar("F", bound=Callable[..., Any])

state_option = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="State directory (default: $PACELINE_STATE or ./.paceline).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def profile_options(command: F) -> F:
    """Add ``--profile`` and ``--set`` to ``command``."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a profile key, e.g. --set cluster.link_mbit=6 (repeatable).",
    )(command)
    return click.option(
        "--profile", default="embedded", show_default=True, help="Profile name or path."
    )(command)


def read_profile(profile: str, overrides: tuple[str, ...]) -> Profile:
    """Return the profile with ``KEY=VALUE`` overrides applied."""
    pairs: dict[str, str] = {}
    for each in overrides:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise InvalidInput("bad --set", got=each, wanted="KEY=VALUE, e.g. cluster.nodes=4")
        pairs[key.strip()] = value.strip()
    return load_profile(profile, pairs)


def state_directory(state: Path | None) -> Path:
    """Return the state directory that ``--state`` names, or the default."""
    return (state or default_state_dir()).absolute()


def point_prefect_at(runtime: Runtime) -> None:
    """Set what Prefect reads at import: its server, and a home inside the state directory.

    Prefect is configured only by the environment, so this must come before its import. Its
    tracebacks stay in its own log, on the run's page: here an error is one line.
    """
    os.environ.update(runtime.prefect_environment())
    os.environ.setdefault("PREFECT_HOME", str(runtime.state_dir / "prefect-client"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_RESULTS_DEFAULT_SERIALIZER", "json")
    os.environ["PACELINE_STATE"] = str(runtime.state_dir)
