"""`paceline keys`: the pairs of keys that sign manifests."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paceline.cli.options import json_option

path_argument = click.argument("path", type=click.Path(path_type=Path, dir_okay=False))


@click.group()
def keys() -> None:
    """Make the keys that sign manifests (Ed25519)."""


@keys.command()
@path_argument
@json_option
def new(path: Path, as_json: bool) -> int:
    """Write a new private key to PATH (mode 0600) and print its public key.

    The public key goes into security.trusted_publishers of the profiles that shall trust it.
    """
    from paceline.manifest import new_key

    _say(path, new_key(path), as_json)
    return 0


@keys.command()
@path_argument
@json_option
def show(path: Path, as_json: bool) -> int:
    """Print the public key of the private key in PATH."""
    from paceline.manifest import load_key, public_key

    _say(path, public_key(load_key(path)), as_json)
    return 0


def _say(path: Path, public: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"status": "complete", "path": str(path), "public_key": public}))
    else:
        click.echo(public)
