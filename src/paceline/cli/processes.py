"""`paceline agent` and `paceline coordinator`: the long-running processes of an installation."""

from __future__ import annotations

from pathlib import Path

import click

STATE = click.option(
    "--state",
    type=click.Path(path_type=Path),
    required=True,
    help="State directory of the installation (its runtime.json says where servers listen).",
)


@click.command()
@STATE
@click.option("--worker-id", required=True, help="This node's name in the fleet.")
@click.option("--host", default="", help="Label: the machine's name.")
@click.option("--rack", default="", help="Label: the rack it stands in.")
@click.option("--zone", default="", help="Label: the zone it stands in.")
@click.option(
    "--link-mbit",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="What plans count on, each direction, in Mbit/s; default: the profile's.",
)
@click.option(
    "--limit-mbit",
    type=click.FloatRange(min=0),
    default=None,
    help="Bandwidth limit, each direction, in Mbit/s; 0: none. Default: none, or the link's rate"
    " where the profile says [cluster] paced.",
)
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Peer port to listen on.")
@click.option("--warm", is_flag=True, help="Load the S3 client at the start: 25 MB, 0.4 s sooner.")
@click.option("--die-with-parent", is_flag=True, help="Exit when the process that started it dies.")
def agent(
    state: Path,
    worker_id: str,
    host: str,
    rack: str,
    zone: str,
    link_mbit: float | None,
    limit_mbit: float | None,
    listen: str,
    warm: bool,
    die_with_parent: bool,
) -> int:
    """Hold this node's models, and relay their pieces to its peers.

    Exit codes: 0 after SIGTERM or SIGINT, once what was verified is on the disk; 2 for options or a
    profile that are wrong or unsafe; 1 for a port that is taken (PortInUse), a store that another
    agent holds (StateLocked), or a disk that refuses; standard error says what, and what to do.
    """
    from paceline.relay.agent import AgentConfig, run_agent

    return run_agent(
        AgentConfig(
            state_dir=state.absolute(),
            worker_id=worker_id,
            host=host,
            rack=rack,
            zone=zone,
            link_mbit=link_mbit,
            limit_mbit=limit_mbit,
            listen=listen,
            warm=warm,
            die_with_parent=die_with_parent,
        )
    )


@click.command()
@STATE
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port to listen on.")
def coordinator(state: Path, host: str, port: int) -> int:
    """Keep the fleet's deployments and workers, and tell each agent its lanes."""
    from paceline.profile import load_runtime
    from paceline.service.app import serve

    return serve(load_runtime(state), host, port)
