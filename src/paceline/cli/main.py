"""`paceline`: the command line.

Each command's module is imported only when it is called, so that `--help` and the agent start fast.
A PacelineError becomes one line on standard error and its own exit code; with --json also one JSON
object on standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from paceline.cli.commands import COMMANDS, Paceline
from paceline.errors import InvalidInput, PacelineError, ServiceUnavailable
from paceline.text import OneLine, has_password, indented

cli = Paceline(
    "paceline",
    {name: name for name in COMMANDS},
    "Run the whole life of a large model: relay, verify, train, evaluate, promote, roll out.",
)
cli.context_settings = {"help_option_names": ["-h", "--help"]}
cli = click.version_option(package_name="paceline")(cli)


def run() -> None:
    """Run the command line; entry point of the console script and of ``python -m``."""
    wants_json = "--json" in sys.argv
    if logging.lastResort is not None:  # used by commands that configure no logging
        logging.lastResort.setFormatter(OneLine())
    try:
        _refuse_passwords(sys.argv[1:])
        code = cli.main(prog_name="paceline", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(_misused(error), wants_json)
    except (click.Abort, KeyboardInterrupt) as error:
        # click turns every KeyboardInterrupt into Abort; ``Terminated`` is one
        terminated = type(error.__cause__ or error).__name__ == "Terminated"
        click.echo("terminated" if terminated else "interrupted", err=True)
        sys.exit(143 if terminated else 130)
    except PacelineError as error:
        _fail(error, wants_json)
    except BrokenPipeError:
        # the reader of standard output closed it (`paceline … | head`): no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:  # noqa: BLE001 - last resort: one line, an exit code
        _fail(_translated(error), wants_json)
    except BaseException as error:
        if type(error).__name__ != "TerminationSignal":  # Prefect's, for SIGTERM inside a flow
            raise
        click.echo("terminated", err=True)
        sys.exit(143)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_passwords(words: Sequence[str]) -> None:
    """Raise InvalidInput for a URL with a password or token: flow runs and records would show it.

    Of MLflow and a sweep's study it stays in this process; a profile is a file.
    """
    for before, word in zip(["", *words], words, strict=False):
        option = word.split("=")[0] if word.startswith("--") else before
        if has_password(word) and option not in ("--mlflow", "--storage", "--set"):
            raise InvalidInput(
                "a URL has a password or a token before its host",
                got=word,
                wanted="a URL without it",
                do="Credentials come from the environment and from files.",
            )


def _fail(error: PacelineError, wants_json: bool) -> None:
    if wants_json:
        click.echo(json.dumps({"status": "failed", "error": problem(error)}))
    click.echo(f"paceline: {error.one_line()}", err=True)
    sys.exit(error.exit_code)


def _misused(error: click.ClickException) -> PacelineError:
    """Return click's usage error as a PacelineError, on one line."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "paceline"
    what, do = error.format_message(), f"See `{path} --help`."
    if what.endswith("?"):  # a question cannot be joined with the next sentence by a period
        return InvalidInput(f"{what} {do}")
    return InvalidInput(what.rstrip("."), do=do)


def _translated(error: Exception) -> PacelineError:
    """Return an untranslated error as a PacelineError: Prefect is unreachable, or a defect."""
    first = (str(error).splitlines() or [""])[0][:500]
    library = type(error).__module__.partition(".")[0]
    if library in ("httpx", "httpcore") or first.startswith("Failed to reach API"):
        return ServiceUnavailable(
            "Prefect's server does not answer",
            got=first or type(error).__name__,
            where=os.environ.get("PREFECT_API_URL"),
            do="Start it where it runs; `paceline up` starts an embedded installation's.",
        )
    if type(error).__name__ == "ParameterTypeError":  # Prefect's: of the flow's own schema
        lines = [line.strip() for line in str(error).splitlines() if line.strip().startswith("- ")]
        return InvalidInput("a parameter is not acceptable", got="; ".join(lines)[:500] or first)
    sys.stderr.write(indented("".join(traceback.format_exception(error)).rstrip()) + "\n")
    return PacelineError(
        "unexpected error",
        got=f"{type(error).__name__}: {first}",
        do="This is a defect of Paceline: please report it with the lines above.",
    )


def problem(error: PacelineError) -> dict[str, Any]:
    """Return ``error`` as the JSON object that every command prints."""
    return {
        "code": error.code,
        "message": error.one_line(),
        "got": None if error.got is None else str(error.got),
        "wanted": None if error.wanted is None else str(error.wanted),
        "where": None if error.where is None else str(error.where),
        "do": error.do,
    }


if __name__ == "__main__":
    run()
