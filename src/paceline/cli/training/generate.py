"""`paceline generate`: text from a model, as a look at what was trained."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import state_option
from paceline.client import Client
from paceline.config import Profile, Runtime, find_installation, object_access
from paceline.errors import InvalidInput, NotReady


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(1, 100_000), default=64, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="0: the most likely token each time; above, tokens are drawn.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the drawn tokens.")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message, by the chat template.")
@state_option
def generate(model: str, prompt: str, state: Path | None, **options: Any) -> int:
    """Print what MODEL adds to PROMPT, token by token, on this machine's CPU.

    MODEL is a directory (of transformers, or an export), s3://bucket/prefix, or models:/name@alias
    of the installation. A smoke check, not a server: each token computes its whole row.
    """
    from paceline.evaluation import TextModel, generate as generated

    with ExitStack() as stack:
        opened = TextModel.open(_directory(model, state, stack))
        for text in generated(opened, prompt, **options):
            click.echo(text, nl=False)
    click.echo()
    return 0


def _directory(model: str, state: Path | None, stack: ExitStack) -> Path:
    """Return ``model``'s directory; one that is elsewhere is downloaded until ``stack`` closes."""
    from paceline.evaluation import download_model
    from paceline.registry import resolve_source
    from paceline.storage import ObjectStore

    if (here := Path(model)).is_dir():
        return here
    runtime = _installation(state)
    if model.startswith("models:/") and runtime is not None:
        model = resolve_source(model, runtime)[0]
    if not model.startswith("s3://"):
        raise InvalidInput(
            "no model here",
            got=model,
            wanted="a directory, s3://bucket/prefix, or models:/name@alias of an installation",
        )
    if runtime is None:
        store = ObjectStore(object_access(Profile()))
    else:
        store = ObjectStore.from_runtime(runtime)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
    return download_model(model, scratch / "model", store)


def _installation(state: Path | None) -> Runtime | None:
    try:
        found = find_installation(state)
    except NotReady:
        if state is not None:
            raise
        return None
    return Client.of(found).runtime()
