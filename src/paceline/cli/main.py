"""`paceline`: the command line.

Each command's module is imported only when it is called, so that `--help` and the agent start fast.
A PacelineError becomes one line on standard error and its own exit code; with --json also one JSON
object on standard output.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from typing import Any

import click

from paceline.errors import InvalidInput, PacelineError, ServiceUnavailable
from paceline.text import OneLine, indented

# name → (module, function, help); the help is stored here so that `--help` imports nothing
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("demo", "demo", "Run the whole lifecycle on this machine and show a summary."),
    "up": ("installation", "up", "Start the embedded installation and leave it running."),
    "init": ("access", "init", "Prepare a fleet's state directory: tokens, authority."),
    "login": ("login", "login", "Use an installation elsewhere from this machine, by a token."),
    "logout": ("login", "logout", "Delete this user's login."),
    "doctor": (
        "doctor.command",
        "doctor",
        "Check this machine and what it reaches; write a bundle.",
    ),
    "down": ("installation", "down", "Stop what `up` started; the state stays on disk."),
    "status": ("watching", "status", "Show what runs, who leads, the fleet and its deployments."),
    "lifecycle": ("flows", "lifecycle", "Run the lifecycle flow on a running installation."),
    "publish": ("distribution", "publish", "Upload a model directory with its manifest."),
    "distribute": (
        "distribution",
        "distribute",
        "Relay a published model to every node; verify, activate.",
    ),
    "watch": ("watching", "watch", "Show a deployment live: rate, ETA, who has which chunk."),
    "workers": ("watching", "workers", "List the registered workers with their labels."),
    "activate": ("watching", "activate", "Switch the fleet to a deployment's version."),
    "cancel": ("watching", "cancel", "Stop a deployment for good."),
    "plan": ("forecast", "plan", "Forecast what each topology would take, before a byte moves."),
    "simulate": ("forecast", "simulating", "Simulate a deployment, failures included."),
    "tokens": ("access", "tokens", "Make, list and revoke tokens; let a node join."),
    "authority": (
        "authority",
        "authority",
        "Replace the fleet's certificate authority, step by step.",
    ),
    "audit": ("access", "audit", "Show who changed what, from where, and what was refused."),
    "keys": ("access", "keys", "Make the keys that sign manifests."),
    "verify": ("flows", "verify", "Have every node check every byte of its copy."),
    "snapshot": ("flows", "snapshot", "Make a data snapshot: text, JSONL, Parquet or tar."),
    "train": ("training.command", "train", "Train here, or fine-tune what an installation holds."),
    "evaluate": ("flows", "evaluate", "Judge a training job's candidate on held-out files."),
    "generate": ("training.generate", "generate", "Generate text from a model, to look at it."),
    "promote": ("flows", "promote", "Gate a judged candidate; make it champion and publish it."),
    "approve": ("flows", "approve", "Approve or reject a promotion that waits for a person."),
    "checkpoints": (
        "training.checkpoints",
        "checkpoints",
        "List, verify and export (to DCP) a training's checkpoints.",
    ),
    "rollback": ("flows", "rollback", "Put the previous champion back, everywhere."),
    "reproduce": (
        "training.reproduce",
        "reproduce",
        "Train a run again and compare it bit by bit.",
    ),
    "where": ("installation", "where", "Print every link of a run: pages, logs, records."),
    "agent": ("installation", "agent", "Run a node's agent (services and Dask start it)."),
    "cluster": (
        "installation",
        "cluster",
        "Run Dask's scheduler and workers (SSH, Slurm), or render them.",
    ),
    "worker": ("installation", "worker", "Run a node's Dask worker, for flows and training."),
    "coordinator": (
        "installation",
        "coordinator",
        "Run the coordinator (the supervisor starts it).",
    ),
}


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function, _help = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"paceline.cli.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if close:
                what = f"{error.message} Did you mean {close[0]!r}?"
                raise click.UsageError(what, ctx) from error
            raise


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paceline")
def cli() -> None:
    """Run the whole life of a large model: relay, verify, train, evaluate, promote, roll out."""


def run() -> None:
    """Run the command line; entry point of the console script and of ``python -m``."""
    wants_json = "--json" in sys.argv
    if logging.lastResort is not None:  # used by commands that configure no logging
        logging.lastResort.setFormatter(OneLine())
    try:
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
