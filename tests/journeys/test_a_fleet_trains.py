"""Journey (b): hosts with workers that their operators start train a model; hosts come and go.

Types the blocks of docs/how-to/train-on-a-fleet.md: the scheduler is Dask's own, S3 is somebody
else's, checkpoints go there. Two ranks run on each of two hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.journeys.fleet import KEY, SECRET, rclone_s3
from tests.journeys.guide import commands
from tests.journeys.hosts import Host, Site, site, until
from tests.journeys.trainers import (
    TYPED,
    Trainers,
    add_nodes,
    make_base,
    name_of,
    start_control,
    started_train,
    with_steps,
)

SOURCES = commands("how-to/import-from-a-hub.md")
CHAMPION = SOURCES["champion"].strip()
pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def bed(plane_software: Path, software: Path) -> Iterator[Site]:
    with site([*[plane_software] * 4, software], hosts=5) as made:
        yield made


@pytest.fixture(scope="module")
def laptop(bed: Site) -> Host:
    """Return a machine that is no node."""
    return bed.hosts.pop()


@pytest.fixture(scope="module")
def fleet(bed: Site, laptop: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with rclone_s3(bed, logs) as s3_url:
        every = start_control(bed, logs, s3_url, "scheduler", init="init")
        made = replace(every, nodes=every.nodes[:-1])  # one host joins later
        add_nodes(made)
        make_base(made)
        made.type("publish")
        yield made
    bed.hosts.append(laptop)


def roll_out_the_champion(fleet: Trainers, laptop: Host) -> None:
    """Distribute what MLflow calls the champion: over REST, then by a command, which switches."""
    url = f"https://{fleet.control.address}:7400"
    create = "paceline tokens create --name ci --scope deploy; cat .paceline/authority/ca.*pem"
    token, trusted = fleet.control.run("sh", "-c", create).ok().out.split("\n", 1)
    laptop.write("ca.pem", trusted)
    laptop.run("paceline", "login", url, "--ca", "ca.pem", env={"PACELINE_TOKEN": token}).ok()
    away = laptop.run("curl", "-sS", f"http://{fleet.control.address}:5000/health")
    assert away.code == 7, "MLflow answers on the control host alone"
    began = time.monotonic()
    env = {"TOKEN": token, "COORDINATOR": url, "SOURCE": CHAMPION.split()[-1]}
    made = json.loads(laptop.run("bash", "-euc", SOURCES["rest"], env=env).ok().out)
    laptop.run("paceline", "watch", made["deployment_id"]).ok()
    seconds = time.monotonic() - began
    call = f'curl -sS --cacert ca.pem -H "Authorization: Bearer {token}"'
    show = f"{call} {url}/deployments/{made['deployment_id']}"
    record = json.loads(laptop.run("sh", "-c", show).ok().out)["deployment"]
    assert record["source_url"].startswith("s3://models/models/tiny/"), "and never the alias"
    size, read = record["total_bytes"], record["origin_bytes"]
    sys.stdout.write(f"the champion: {size} bytes in {seconds:.1f} s, {read} bytes from S3\n")
    assert read < 1.5 * size, "one reader; the other node received it from the first"
    done = laptop.run("sh", "-c", f"{CHAMPION} --json").ok()
    assert json.loads(done.out)["activated"] == len(fleet.nodes)
    unknown = laptop.run("sh", "-c", CHAMPION.replace("champion", "nobody"))
    assert unknown.code == 1 and unknown.err.count("\n") == 1, unknown
    assert "no such version or alias" in unknown.err


def listeners(host: Host) -> set[str]:
    """Return the addresses at which anything on the host listens."""
    found = host.run("ss", "-Hltn").ok().out.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in found}


def test_a_model_is_trained_on_two_hosts_and_rolled_out(fleet: Trainers, laptop: Host) -> None:
    training = started_train(fleet)
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
    roll_out_the_champion(fleet, laptop)
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


def test_a_gang_that_never_fits_is_refused_and_one_that_has_no_room_waits(
    fleet: Trainers,
) -> None:
    line = TYPED["train"].rstrip()
    wide = "--ranks 64 --set training.batch_sequences=64"  # a row for each
    refused = fleet.control.run("bash", "-euc", f"{line} {wide}", env=fleet.env)
    last = refused.err.splitlines()[-1]
    assert refused.code == 2 and last.startswith("paceline: "), refused
    assert "64" in last and "2 nodes" in last, last
    assert "Traceback" not in refused.err
    both = []
    for steps, state in (("4000", "running"), ("4001", "queued")):
        log = fleet.logs / f"train-{steps}"
        text = f"{line} --steps {steps}"
        both.append(fleet.control.start("bash", "-euc", text, env=fleet.env, log=log))

        def is_there(state: str = state) -> bool:
            jobs = fleet.control.run("paceline", "jobs", "list", "--json").ok().out
            return state in {each["state"] for each in json.loads(jobs)["jobs"]}

        until(is_there, f"the job is {state}", timeout_s=180)
    full = fleet.logs / "train-4001"
    until(lambda: "waiting for 4 x any kind" in full.read_text(), "the command says so", 60)
    sys.stdout.write(f"{last}\n{full.read_text()}\n")
    fleet.control.run("pkill", "-INT", "-f", "bin/paceline training").ok()
    assert [each.wait(120) for each in both] == [130, 130], "Ctrl-C"


def test_a_host_that_is_cut_off_is_named_and_training_goes_on(fleet: Trainers) -> None:
    """The same job at another seed; a node's network swallows everything after a checkpoint."""
    lost = fleet.nodes[1]
    training = started_train(fleet, with_steps(400), "train-cut")
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


def test_a_host_leaves_for_good_and_one_that_joins_takes_its_place(fleet: Trainers) -> None:
    """A training that runs goes on with what it has left; the next one has the newcomer."""
    gone, stays, newcomer = *fleet.nodes, fleet.bed.hosts[-1]
    training = started_train(fleet, with_steps(500), "train-leave")
    for line in TYPED["leave"].splitlines():  # a shell that has both on its line would match
        gone.run("bash", "-euc", line).ok()
    until(lambda: not gone.run("pgrep", "-f", "bin/paceline").out, "nothing runs there", 60)
    add_nodes(replace(fleet, nodes=(newcomer,)))
    fleet.type("serve-new", **fleet.node(newcomer))
    assert training.wait(400) == 0, (fleet.logs / "train-leave").read_text()
    trained = fleet.answer("trained.json")
    assert (trained["steps"], trained["ranks"]) == (500, 2)
    first = trained["restarts"][0]
    assert first["worker_id"] == name_of(gone) or name_of(gone) in first["reason"], first

    fleet.control.run("bash", "-euc", with_steps(70), env=fleet.env).ok()
    trained = fleet.answer("trained.json")
    assert (trained["ranks"], trained["restarts"]) == (4, [])
    for host in (stays, newcomer):
        work = f"state/nodes/{name_of(host)}/work/{trained['job_id']}"
        assert host.run("ls", work).ok().out.count("rank-") == 2
    # The first test of this file, where it ran, made version 2 the active one.
    store = f"state/nodes/{name_of(stays)}/store/models/tiny"
    version = stays.run("readlink", f"{store}/active").ok().out.strip().rpartition("/")[2]
    done = fleet.control.run("paceline", "distribute", "tiny", version, env=fleet.env).ok()
    assert f"tiny {version}, nodes: 2, " in done.out, "who left is not waited for"
