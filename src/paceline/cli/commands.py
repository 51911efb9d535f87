"""The words of the command line: groups, short forms, and an example of each command.

A command's module is imported only when it is called or its help is read, so this module imports
nothing but click.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

Target = tuple[str, str, str]  # module, function, help; the help is here so that it imports nothing

# The short forms: every command of a group may be typed by its own word, too.
COMMANDS: dict[str, Target] = {
    "demo": ("demo", "demo", "Run the whole lifecycle on this machine and show a summary."),
    "up": ("installation", "up", "Start the embedded installation and leave it running."),
    "down": ("installation", "down", "Stop what `up` started; the state stays on disk."),
    "status": (
        "watching",
        "status",
        "Show what runs, who leads, the fleet, what waits for approval.",
    ),
    "login": ("login", "login", "Use an installation elsewhere from this machine, by a token."),
    "logout": ("login", "logout", "Delete this user's login."),
    "doctor": ("doctor.command", "doctor", "Check this machine and what it reaches."),
    "completion": ("commands", "completion", "Print the completion script of bash, zsh or fish."),
    "publish": ("distribution", "publish", "Upload a model directory with its manifest."),
    "verify": ("flows", "verify", "Have every node check every byte of its copy."),
    "evaluate": ("flows", "evaluate", "Judge a training's candidate on held-out files."),
    "promote": ("flows", "promote", "Gate a judged candidate; make it champion and publish it."),
    "approve": ("access", "approve", "Approve or reject a promotion that waits for a person."),
    "rollback": ("watching", "rollback", "Switch the fleet back to the version before."),
    "generate": ("training.generate", "generate", "Generate text from a model, to look at it."),
    "snapshot": ("training.data", "snapshot", "Make a data snapshot: text, JSONL, Parquet or tar."),
    "purposes": ("training.data", "purposes", "What data may be used for, and by whom."),
    "train": ("training.command", "train", "Train on this machine, no server."),
    "checkpoints": (
        "training.checkpoints",
        "checkpoints",
        "List, verify and export (to DCP) checkpoints.",
    ),
    "reproduce": ("training.reproduce", "reproduce", "Train a run again; compare it bit by bit."),
    "jobs": ("training.jobs", "jobs", "Submit training jobs; list, pause, resume, cancel them."),
    "sweep": ("training.sweep", "sweep", "Search a training's settings; each trial is a job."),
    "cost": ("training.cost", "cost", "Show what trainings cost, or what the next one would."),
    "estimate": ("training.estimate", "estimate", "Estimate a training by mesh, before it runs."),
    "lifecycle": ("flows", "lifecycle", "Run the lifecycle flow on a running installation."),
    "where": ("installation", "where", "Print every link of a run: pages, logs, records."),
    "distribute": ("distribution", "distribute", "Relay a published model to every node."),
    "watch": ("watching", "watch", "Show a deployment live: rate, ETA, who has which chunk."),
    "activate": ("watching", "activate", "Switch the fleet to a deployment's version."),
    "cancel": ("watching", "cancel", "Stop a deployment for good."),
    "plan": ("forecast", "plan", "Forecast what each topology would take; moves no byte."),
    "simulate": ("forecast", "simulating", "Simulate a deployment, failures included."),
    "workers": ("watching", "workers", "List the registered workers with their labels."),
    "init": ("authority", "init", "Prepare a fleet's state directory: tokens, authority."),
    "tokens": ("access", "tokens", "Make, list and revoke tokens; let a node join."),
    "authority": ("authority", "authority", "Replace the fleet's certificate authority."),
    "keys": ("authority", "keys", "Make the keys that sign manifests."),
    "audit": ("access", "audit", "Show who changed what, from where, and what was refused."),
    "agent": ("installation", "agent", "Run a node's agent (services and Dask start it)."),
    "worker": ("installation", "worker", "Run a node's Dask worker, for flows and training."),
    "cluster": ("installation", "cluster", "Run Dask's scheduler and workers (SSH, Slurm)."),
    "coordinator": ("installation", "coordinator", "Run a coordinator (the supervisor does)."),
}
# Words that need their group: what to start, list or roll back.
LONG_ONLY: dict[str, Target] = {
    "model rollback": ("flows", "rollback", "Put a model's previous champion back."),
    "training start": ("training.command", "start", "Fine-tune what the nodes hold."),
    "deployment list": ("watching", "deployments", "List the deployments, the newest last."),
}
# group → (what it is about, its commands); "create=distribute" is the word that is `distribute`
GROUPS: dict[str, tuple[str, str]] = {
    "model": (
        "Publish models; judge, promote and roll back their versions.",
        "publish verify evaluate promote approve rollback generate",
    ),
    "data": ("Make snapshots of data; say what they may be used for.", "snapshot purposes"),
    "training": (
        "Train here or on the nodes; checkpoints; reproduce a run.",
        "jobs sweep local=train start checkpoints reproduce cost estimate",
    ),
    "run": ("Run the whole lifecycle, and find what a run left.", "lifecycle where"),
    "deployment": (
        "Bring a version to the nodes, watch it, switch to it.",
        "create=distribute list watch activate rollback cancel plan simulate",
    ),
    "fleet": (
        "Nodes and who has access: join, tokens, certificates, audit.",
        "init workers tokens authority keys audit",
    ),
    "service": (
        "Long-running processes, which a service manager starts.",
        "agent worker cluster coordinator",
    ),
}
START = ["demo", "up", "status", "lifecycle", "down", "login", "logout", "doctor", "completion"]

EXAMPLES = {  # where more is typed than the command's words
    "demo": "demo --keep",
    "up": "up --state ./.paceline",
    "status": "status --json",
    "login": "login https://control-1:7443 --authority SHA256",
    "doctor": "doctor --bundle doctor.tar.gz",
    "completion": "completion bash > ~/.local/share/bash-completion/completions/paceline",
    "publish": "publish ./my-model --model org/name --version 1\n"
    "publish ./my-model s3://bucket/org/name/1 --model org/name --version 1\n"
    "publish hf://org/name@main",
    "verify": "verify org/name 1 --full",
    "evaluate": "evaluate org/name --base 1 --trained RUN --snapshot s3://bucket/data/DIGEST",
    "promote": "promote org/name --report RUN",
    "approve": "approve run-20261120-153600-9f3a1c --reason 'scores and data are fine'",
    "rollback": "rollback 3f1c",
    "model rollback": "model rollback org/name",
    "generate": "generate models:/org/name@champion 'def main():' --max-tokens 40",
    "snapshot": "snapshot s3://bucket/texts --format jsonl --text-field body",
    "purposes allow": "purposes allow speech-research --data s3://bucket/data/snapshots/DIGEST \\\n"
    "    --team nlp --ttl 90d --reason 'agreed with the owner'",
    "purposes list": "purposes list",
    "purposes revoke": "purposes revoke dp-4f1c",
    "train": "train --text ./texts --ranks 2",
    "training start": "training start org/name 1 --snapshot s3://bucket/data/DIGEST --ranks 8",
    "jobs submit": "jobs submit org/name 1 --snapshot s3://bucket/data/DIGEST --ranks 8 \\\n"
    "    --accelerator a100 --within rack --team nlp",
    "jobs list": "jobs list --status queued --team nlp",
    "jobs show": "jobs show tj-4f1c",
    "jobs logs": "jobs logs tj-4f1c --follow",
    "jobs pause": "jobs pause tj-4f1c",
    "jobs resume": "jobs resume tj-4f1c",
    "jobs cancel": "jobs cancel tj-4f1c",
    "jobs review": "jobs review tj-4f1c --reason 'two broken shards are fine'",
    "sweep run": "sweep lr org/name 1 --snapshot s3://bucket/data/DIGEST --space space.toml \\\n"
    "    --trials 16 --parallel 4 --pruner asha",
    "sweep report": "sweep report lr --html lr.html",
    "checkpoints list": "checkpoints list ./paceline-training --verify",
    "checkpoints export": "checkpoints export ./paceline-training ./dcp --step 500",
    "reproduce": "reproduce run-20261120-153600-9f3a1c --check",
    "cost": "cost --by model\ncost run-20261120-153600-9f3a1c --steps 5000",
    "estimate": "estimate 7B --accelerator H100 --tokens 3e11\n"
    "estimate ./my-model --accelerator H100 --ranks 64 --mesh shard8xtp8",
    "lifecycle": "lifecycle --model org/name/1 --data s3://bucket/texts \\\n"
    "    --set training.learning_rate=3e-4 --set training.lora.r=8",
    "where": "where run-20261120-153600-9f3a1c",
    "distribute": "distribute org/name 1 --to rack=r1\n"
    "distribute ./my-model --into /tmp/nodes --model org/name --as-version 1",
    "watch": "watch 3f1c",
    "activate": "activate 3f1c --to rack=r1",
    "cancel": "cancel 3f1c",
    "plan": "plan --size 500GB --workers 1000 --link 10Gbps",
    "simulate": "simulate --size 500GB --workers 1000 --link 10Gbps --seed 7",
    "workers": "workers --to rack=r1,pool=a100",
    "init": "init --profile hosts --coordinator https://control-1:7443",
    "tokens create": "tokens create --name ci --scope deploy --ttl 90d",
    "tokens join": "tokens join --worker-id node-1\n"
    "tokens join --nodes 200 --ttl 24h --from 10.1.0.0/16",
    "tokens revoke": "tokens revoke --worker-id node-1",
    "keys new": "keys new publisher.key",
    "keys show": "keys show publisher.key",
    "audit": "audit --since 12h --name change.refused",
    "agent": "agent --state /var/lib/paceline --worker-id node-1 --listen 0.0.0.0:7700 \\\n"
    "    --coordinator https://control-1:7443 --join @token",
    "worker": "worker --state /var/lib/paceline",
    "cluster": "cluster --state /var/lib/paceline",
    "coordinator": "coordinator --state /var/lib/paceline --port 7443",
}


def example_of(words: str) -> str:
    """Return the example of a command, or of a group's first one, as it is typed."""
    of_group = next((EXAMPLES[key] for key in EXAMPLES if key.startswith(f"{words} ")), words)
    lines = EXAMPLES.get(words, of_group).split("\n")
    return "\n".join(each if each.startswith(" ") else f"paceline {each}" for each in lines)


def examples(*commands: str) -> str:
    """Return the end of a help: the examples of ``commands``."""
    lines = "\n".join(map(example_of, commands)).replace("\n", "\n  ")
    return f"\b\nFor example:\n  {lines}"


class ExistingPath(click.Path):
    """A path of which the end is there. Raises SourceMissing where nothing is, as every command
    does: click alone would count that as a misuse."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not Path(value).exists():
            from paceline.errors import SourceMissing

            where = None if param is None else param.opts[0]
            what, do = "no such file or directory", "Check the path."
            raise SourceMissing(what, got=value, where=where, do=do)
        return super().convert(value, param, ctx)


class Group(click.Group):
    """A click group that lists its commands in the order of the code, each with its whole line."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.short_help_of(name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def short_help_of(self, name: str) -> str:
        """Return the line of a command: the first paragraph of its help."""
        return " ".join((self.commands[name].help or "").split("\n\n")[0].split())


class LazyGroup(Group):
    """A click group whose commands are imported when they are called."""

    def __init__(self, name: str, entries: Mapping[str, str], help: str) -> None:
        """``entries``: the word typed here → the words that name it in the tables above."""
        super().__init__(name, help=help, epilog=examples(*list(entries.values())[:3]))
        self.entries = entries

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.entries:
            return None
        words = self.entries[cmd_name]
        module, function, _help = target_of(words)
        command = getattr(importlib.import_module(f"paceline.cli.{module}"), function)
        assert isinstance(command, click.Command)
        found = dict(leaves(words, command))
        for name, leaf in found.items():
            leaf.epilog = examples(name)
        if isinstance(command, click.Group):
            command.epilog = examples(*list(found)[:3])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_commands(ctx, formatter)
        short = [name for name, words in self.entries.items() if words in COMMANDS]
        if short:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(
                    "Short forms: "
                    + ", ".join(f"paceline {self.entries[name]}" for name in short)
                    + "."
                )

    def short_help_of(self, name: str) -> str:
        """Return the line of a command, without importing it."""
        return target_of(self.entries[name])[2]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin so; click's own would import every command."""
        words = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self.short_help_of(name)) for name in words]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if close:
                what = f"{error.message} Did you mean {close[0]!r}?"
                raise click.UsageError(what, ctx) from error
            raise


class Paceline(LazyGroup):
    """`paceline` itself: the short forms and the groups."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return [*COMMANDS, *GROUPS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in GROUPS:
            return group_of(cmd_name)
        return super().get_command(ctx, cmd_name)

    def short_help_of(self, name: str) -> str:
        return GROUPS[name][0] if name in GROUPS else super().short_help_of(name)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Start here"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in START])
        with formatter.section("Groups (paceline GROUP --help)"):
            rows = [
                (name, f"{about} ({', '.join(group_of(name).entries)})")
                for name, (about, _) in GROUPS.items()
            ]
            formatter.write_dl(rows)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                "A command's own word is enough: `paceline publish` is `paceline model publish`, "
                "and `paceline distribute` is `paceline deployment create`."
            )


def target_of(words: str) -> Target:
    """Return where the command lies that ``words`` name."""
    return COMMANDS[words] if words in COMMANDS else LONG_ONLY[words]


def group_of(name: str) -> LazyGroup:
    """Return the group ``name``."""
    about, words = GROUPS[name]
    entries = {}
    for word in words.split():
        typed, _, short = word.partition("=")
        long = f"{name} {typed}"
        entries[typed] = long if long in LONG_ONLY else short or typed
    return LazyGroup(name, entries, about)


def leaves(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below ``command`` that is no group, with its words."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    for name, child in command.commands.items():
        yield from leaves(f"{words} {name}", child)


class Sections(click.Command):
    """A command whose help lists its options under headings."""

    def __init__(self, *args: object, sections: Mapping[str, str], **more: object) -> None:
        """``sections``: heading → the options below it; the others come last."""
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.sections = {**sections, "Other options": ""}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading = {name: title for title, names in self.sections.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in self.sections}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                rows[heading.get(str(parameter.name), "Other options")].append(row)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the script that completes commands and options in SHELL.

    \b
      bash  paceline completion bash > ~/.local/share/bash-completion/completions/paceline
      zsh   paceline completion zsh > "${fpath[1]}/_paceline"
      fish  paceline completion fish > ~/.config/fish/completions/paceline.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has the three
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "paceline", "_PACELINE_COMPLETE").source())
    return 0
