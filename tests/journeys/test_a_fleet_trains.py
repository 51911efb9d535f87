"""Journey (b): hosts with workers that their operators start train a model; hosts come and go.

Types the blocks of docs/how-to/train-on-a-fleet.md: the scheduler is Dask's own, S3 is somebody
else's, checkpoints go there. Two ranks run on each of two hosts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import KEY, SECRET, rclone_s3
from tests.journeys.hosts import Host, site, until
from tests.journeys.trainers import TYPED, Trainers, add_nodes, make_base, name_of, start_control

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(plane_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with site(plane_software, hosts=4) as bed, rclone_s3(bed, logs) as s3_url:
        every = start_control(bed, logs, s3_url, "scheduler", init="init")
        made = replace(every, nodes=every.nodes[:-1])  # one host joins later
        add_nodes(made)
        make_base(made)
        yield made


def listeners(host: Host) -> set[str]:
    """Return the addresses at which anything on the host listens."""
    found = host.run("ss", "-Hltn").ok().out.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in found}


def started_train(fleet: Trainers) -> subprocess.Popen[Any]:
    """Type the page's training; it goes on."""
    return fleet.control.start(
        "bash", "-euc", TYPED["train"], env=fleet.env, log=fleet.logs / "train"
    )


def checkpoints(fleet: Trainers) -> int:
    """Return how many generations were committed, as the S3 server's disk shows."""
    return len(list((fleet.logs / "s3/models/checkpoints").glob("*/*/commit.json")))


def test_a_model_is_trained_on_two_hosts_and_rolled_out(fleet: Trainers) -> None:
    fleet.type("publish")
    training = started_train(fleet)
    until(lambda: checkpoints(fleet) or training.poll() is not None, "a checkpoint", 180)
    heard = {host.index: listeners(host) for host in fleet.nodes}
    ranks = {
        host.index: host.run("pgrep", "-fc", "training.launcher.forkserver").out.strip()
        for host in fleet.nodes
    }
    assert training.wait(300) == 0, (fleet.logs / "train").read_text()
    for host in fleet.nodes:
        assert heard[host.index] <= {host.address, "127.0.0.1"}, "gloo, the store, Dask, the agent"
        assert int(ranks[host.index]) >= 3, "a launcher and two ranks"
    trained = fleet.answer("trained.json")
    assert trained["ranks"] == 4 and not trained["restarts"]
    fleet.type("promote")
    fleet.type("roll-out")
    for host in fleet.nodes:
        store = f"state/nodes/{name_of(host)}/store/models/tiny"
        assert host.run("readlink", f"{store}/active").ok().out.strip().endswith("2")
        sums = host.run("sh", "-c", f"cd {store}/2 && sha256sum *.safetensors").ok().out
        assert sums == fleet.nodes[0].run(
            "sh", "-c", f"cd state/nodes/{name_of(fleet.nodes[0])}/store/models/tiny/2"
            " && sha256sum *.safetensors"
        ).ok().out  # fmt: skip
        assert host.run("grep", "-rlE", f"{KEY}|{SECRET}", "state").code == 1
        assert host.run("grep", "-rl", "/home/user/.paceline", "state/nodes").code == 1


def test_a_host_that_is_cut_off_is_named_and_training_goes_on(fleet: Trainers) -> None:
    """The same job at another seed; a node's network swallows everything after a checkpoint."""
    lost = fleet.nodes[1]
    before = checkpoints(fleet)
    longer = TYPED["train"].replace("paceline train", "paceline train --steps 400")
    training = fleet.control.start(
        *("bash", "-euc", longer), env=fleet.env, log=fleet.logs / "train-cut"
    )
    until(lambda: checkpoints(fleet) > before or training.poll() is not None, "a checkpoint", 180)
    fleet.bed.bed.cut(lost.index)
    try:
        assert training.wait(400) == 0, (fleet.logs / "train-cut").read_text()
    finally:
        fleet.bed.bed.mend(lost.index)
    trained = fleet.answer("trained.json")
    assert trained["steps"] == 400
    assert trained["ranks"] == 2, "with those that are left"
    first = trained["restarts"][0]
    assert first["worker_id"] == name_of(lost) or name_of(lost) in first["reason"], first
    assert first["resumed_step"] > 0

    def verified() -> bool:
        """Every node reads its copy again: the host is one of them."""
        done = fleet.control.run("paceline", "verify", "tiny", "1", "--json", env=fleet.env)
        return done.code == 0 and json.loads(done.out)["verified"] == len(fleet.nodes)

    until(verified, "the host is a node again", timeout_s=120)


def test_a_host_that_joins_meanwhile_takes_the_place_of_one_that_leaves(fleet: Trainers) -> None:
    """Both are nodes like any other afterwards: one is served, the other is not waited for."""
    gone, stays, newcomer = *fleet.nodes, fleet.bed.hosts[-1]
    before = checkpoints(fleet)
    longer = TYPED["train"].replace("paceline train", "paceline train --steps 1000")
    training = fleet.control.start(
        *("bash", "-euc", longer), env=fleet.env, log=fleet.logs / "train-leave"
    )
    until(lambda: checkpoints(fleet) > before or training.poll() is not None, "a checkpoint", 180)
    add_nodes(replace(fleet, nodes=(newcomer,)))
    fleet.type("serve-new", **fleet.node(newcomer))
    for line in TYPED["leave"].splitlines():  # a shell that has both on its line would match
        gone.run("bash", "-euc", line).ok()
    until(lambda: not gone.run("pgrep", "-f", "bin/paceline").out, "nothing runs there", 60)
    assert training.wait(400) == 0, (fleet.logs / "train-leave").read_text()
    trained = fleet.answer("trained.json")
    assert (trained["steps"], trained["ranks"]) == (1000, 4)
    first = trained["restarts"][0]
    assert first["worker_id"] == name_of(gone) or name_of(gone) in first["reason"], first
    work = f"work/{trained['job_id']}"
    for host in (stays, newcomer):
        assert host.run("ls", f"state/nodes/{name_of(host)}/{work}").ok().out.count("rank-") == 2
    fleet.type("roll-out")
    active = f"state/nodes/{name_of(newcomer)}/store/models/tiny/active"
    assert newcomer.run("readlink", active).ok().out.strip().endswith("2")
