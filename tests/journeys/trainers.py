"""Hosts that train, brought up by what docs/how-to/train-on-a-fleet.md has an operator type."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.journeys.fleet import ENVIRONMENT
from tests.journeys.guide import commands, keeping
from tests.journeys.hosts import Ended, Host, Site, until

TYPED = {name: keeping(text) for name, text in commands("how-to/train-on-a-fleet.md").items()}
# A model that is trained in seconds; the page does not say how large its reader's is.
SMALL = [
    *("--set", "training.steps=60", "--set", "training.batch_sequences=16"),
    *("--set", "training.learning_rate=3e-3", "--set", "training.warmup_steps=5"),
    *("--set", "data.shard_bytes=262144"),
    *("--set", "training.checkpoints.every_steps=5"),
    *("--set", "data.max_bytes=1000000"),
    *("--set", 'gate.except_baselines=["ngram", "gzip", "xz"]'),
]


@dataclass(frozen=True)
class Trainers:
    """A control host with its servers, nodes with agent and worker."""

    control: Host
    nodes: tuple[Host, ...]
    bed: Site
    env: dict[str, str]
    logs: Path
    typed: Mapping[str, str] = field(default_factory=lambda: TYPED)

    def type(self, block: str, host: Host | None = None, **more: str) -> Ended:
        """Type a block of the page on a host (the control host), in its home."""
        on = host or self.control
        env = {**self.env, **more}
        return on.run("bash", "-euc", self.typed[block], env=env).ok()

    def type_with(self, block: str, options: Sequence[str]) -> Ended:
        """Type a block of one command on the control host, with ``options`` beside the page's."""
        line = f"{self.typed[block].rstrip()} {shlex.join(options)}"
        return self.control.run("bash", "-euc", line, env=self.env).ok()

    def stays(self, block: str, host: Host | None = None, **more: str) -> subprocess.Popen[Any]:
        """Start a block of the page that goes on."""
        on = host or self.control
        log = self.logs / f"{block}-{on.index}"
        text = self.typed[block]
        last = text if "exec " in text else f"exec {text}"
        return on.start("bash", "-euc", last, env={**self.env, **more}, log=log)

    def node(self, host: Host) -> dict[str, str]:
        return {"NODE": host.address, "NAME": name_of(host)}

    def answer(self, file: str) -> Any:
        return json.loads(self.control.run("cat", file).ok().out)


def name_of(host: Host) -> str:
    return f"node-{host.index}"


def start_control(
    bed: Site, logs: Path, s3_url: str, *servers: str, init: str, **more: str
) -> Trainers:
    """Type the block ``init`` on the first host, and start the coordinator and ``servers``."""
    control, *nodes = bed.hosts
    env = {**ENVIRONMENT, "CONTROL": control.address, "S3": s3_url, "BUCKET": "models", **more}
    fleet = Trainers(control, tuple(nodes), bed, env, logs)
    fleet.type_with(init, SMALL)
    for each in ("coordinator", "prefect", "mlflow", *servers):
        fleet.stays(each)
    for url in (
        f"https://{control.address}:7400/readyz",
        "http://127.0.0.1:4200/api/health",
        "http://127.0.0.1:5000/health",
    ):
        until(lambda at=url: control.run("curl", "-skf", at).code == 0, url, timeout_s=120)
    return fleet


def make_base(fleet: Trainers) -> None:
    """Make a small model ``base`` and texts on the control host."""
    fleet.control.run("mkdir", "texts").ok()
    for number in range(40):
        lines = "".join(f"line {n} of text {number} says {n * number}\n" for n in range(400))
        fleet.control.write(f"texts/{number}.txt", lines)
    first = (
        "paceline train --text texts --output made --steps 5 --ranks 1"
        " --set model.parameters=100000 --set model.context=64 --mlflow '' --json"
    )
    fleet.control.run("bash", "-euc", f"{first} && mv made/checkpoints/*/export base").ok()


def add_nodes(fleet: Trainers) -> None:
    """Let every node join, with an agent and a worker."""
    for host in fleet.nodes:
        token = fleet.type("token", **fleet.node(host)).out
        host.write("token", token)
        host.run("mkdir", "state").ok()
        fleet.control.copy(".paceline/dask-tls", host, into="state")  # the page's `scp -pr`
        fleet.stays("agent", host, **fleet.node(host))
        until(
            lambda at=host: at.run("test", "-f", "state/runtime.json").code == 0,
            f"{name_of(host)} joins",
        )
        fleet.stays("worker", host, **fleet.node(host))


def with_steps(steps: int) -> str:
    """Return the page's training, longer."""
    return TYPED["train"].replace("training start", f"training start --steps {steps}")


def started_train(
    fleet: Trainers, typed: str = TYPED["train"], log: str = "train"
) -> subprocess.Popen[Any]:
    """Type a training; return it once it has made a checkpoint, or ended."""
    before = checkpoints(fleet)
    training = fleet.control.start("bash", "-euc", typed, env=fleet.env, log=fleet.logs / log)
    until(lambda: checkpoints(fleet) > before or training.poll() is not None, "a checkpoint", 180)
    return training


def checkpoints(fleet: Trainers) -> int:
    """Return how many generations were committed, as the S3 server's disk shows."""
    return len(list((fleet.logs / "s3/models/checkpoints").glob("*/*/commit.json")))
