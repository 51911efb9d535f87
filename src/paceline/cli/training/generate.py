"""`paceline generate`: text from a model, as a look at what was trained."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import json_option, show, state_option
from paceline.python_api import model_directory
from paceline.schemas import Generated


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(1, 100_000), default=64, show_default=True,
              help="Tokens to write, at most.")  # fmt: skip
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="0: the most likely token each time; above, tokens are drawn.",
)
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**64 - 1),
    default=0,
    show_default=True,
    help="Of the drawn tokens.",
)
@click.option("--chat", is_flag=True, help="PROMPT is a user's message, by the chat template.")
@state_option
@json_option
def generate(model: str, prompt: str, state: Path | None, as_json: bool, **options: Any) -> int:
    """Print what MODEL adds to PROMPT, token by token, on a GPU of this machine or its CPU.

    MODEL is a directory (of transformers, or an export), s3://bucket/prefix, or models:/name@alias
    of the installation. A smoke check, not a server: it takes one prompt at a time.
    """
    from paceline.evaluation import TextModel, generate as generated

    began, made = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        opened = TextModel.open(model_directory(model, Path(scratch) / "model", state))
        for text in generated(opened, prompt, **options):
            made += text
            if not as_json:
                click.echo(text, nl=False)
    seconds = time.monotonic() - began
    show(Generated(model=model, prompt=prompt, text=made, seconds=seconds), as_json, "")
    return 0
