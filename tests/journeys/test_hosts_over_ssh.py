"""The page's "The same over SSH": one command brings up scheduler, workers and agents of all hosts.

A real sshd runs on each host. A host that loses its worker gets another; when the command ends,
nothing of it is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import KEY, SECRET, rclone_s3
from tests.journeys.hosts import SOFTWARE, Host, Site, site, until
from tests.journeys.trainers import (
    Trainers,
    make_base,
    name_of,
    start_control,
    started_train,
    with_steps,
)

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]


def accept_logins(bed: Site, logs: Path) -> None:
    """Let the control host's user log in as each node's user, by a key."""
    control, *nodes = bed.hosts
    for host in bed.hosts:
        user = f'useradd --uid {host.uid} --password "*" --no-create-home --home-dir /home/user ops'
        host.run("bash", "-euc", user, root=True).ok()
    control.write(".ssh/config", "StrictHostKeyChecking accept-new\n")
    control.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ".ssh/id_ed25519").ok()
    key = control.run("cat", ".ssh/id_ed25519.pub").ok().out
    for host in nodes:
        host.write(".ssh/authorized_keys", key)
        host.write(
            ".aws/credentials",
            f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n",
        )
        host.run("bash", "-euc", "ssh-keygen -A; mkdir -p -m 755 /run/sshd", root=True).ok()
        path = f"SetEnv=PATH={SOFTWARE}/bin:/usr/bin:/bin"
        listen = f"ListenAddress={host.address}"
        host.start(
            *("/usr/sbin/sshd", "-D", "-e", "-o", listen, "-o", path, "-o", "UsePAM=no"),
            log=logs / f"sshd-{host.index}",
            root=True,
        )


@pytest.fixture(scope="module")
def fleet(plane_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with site(plane_software, hosts=3) as bed, rclone_s3(bed, logs) as s3_url:
        yield bring_up(bed, logs, s3_url)


def bring_up(bed: Site, logs: Path, s3_url: str) -> Trainers:
    accept_logins(bed, logs)
    hosts = ", ".join(
        f'{{ssh = "ops@{each.address}", worker_id = "{name_of(each)}", rack = "r1"}}'
        for each in bed.hosts[1:]
    )
    made = start_control(bed, logs, s3_url, init="ssh-init", HOSTS=f"[{hosts}]")
    make_base(made)
    return made


def workers(host: Host) -> list[str]:
    return host.run("pgrep", "-f", "paceline worker").out.split()


def stop(fleet: Trainers, running: subprocess.Popen[Any]) -> None:
    """End the command as systemd does; it closes its connections."""
    fleet.control.run("pkill", "-TERM", "-f", "bin/paceline cluster").ok()
    assert running.wait(60) == 0, (fleet.logs / "cluster-0").read_text()[-2000:]


def test_one_command_starts_every_host_and_trains_on_them(fleet: Trainers) -> None:
    running = fleet.stays("cluster")
    log = fleet.logs / "cluster-0"
    until(lambda: log.read_text().count("Registered to") == 2, "both register", timeout_s=90)
    fleet.type("publish")
    first = fleet.nodes[0]
    (before,) = workers(first)
    first.run("kill", "-KILL", before).ok()
    until(lambda: workers(first) not in ([], [before]), "its worker is started again", 60)
    until(lambda: log.read_text().count("Registered to") == 3, "it registers", timeout_s=90)
    fleet.type("train")
    trained = fleet.answer("trained.json")
    assert (trained["ranks"], trained["restarts"]) == (4, [])
    for host in fleet.nodes:
        work = f"paceline-state/nodes/{name_of(host)}/work/{trained['job_id']}"
        assert host.run("ls", work).ok().out.count("rank-") == 2
    share_a_host(fleet)
    fleet.type("promote")
    fleet.type("roll-out")
    for host in fleet.nodes:
        active = f"paceline-state/nodes/{name_of(host)}/store/models/tiny/active"
        assert host.run("readlink", active).ok().out.strip().endswith("2"), "what was promoted"
    stop(fleet, running)
    for host in fleet.nodes:
        until(lambda at=host: not at.run("pgrep", "-f", "bin/python").out, "nothing is left")


def share_a_host(fleet: Trainers) -> None:
    """Two trainings of one rank each, at the same time, have one host of two slots."""
    line = fleet.typed["train"].replace("--json > trained.json", "--ranks 1 --steps $STEPS --json")
    both = {}
    for steps in ("3000", "3001"):
        log = fleet.logs / f"shares-{steps}"
        env = {**fleet.env, "STEPS": steps}
        both[steps] = fleet.control.start("bash", "-euc", line, env=env, log=log)

    def placed() -> list[dict[str, int]]:
        jobs = json.loads(fleet.control.run("paceline", "jobs", "list", "--json").ok().out)["jobs"]
        return [each["placement"]["hosts"] for each in jobs if each["state"] == "running"]

    until(lambda: len(placed()) == 2, "both make steps", timeout_s=180)
    first, second = placed()
    assert first == second, "they share it"
    fleet.control.run("pkill", "-INT", "-f", "bin/paceline training").ok()
    assert [each.wait(60) for each in both.values()] == [130, 130]


def test_a_host_that_refuses_the_login_is_named_with_what_to_try(fleet: Trainers) -> None:
    lost = fleet.nodes[1]
    lost.run("mv", ".ssh/authorized_keys", ".ssh/away").ok()
    running = fleet.stays("cluster")
    log = fleet.logs / "cluster-0"
    said = f"no worker on host=ops@{lost.address} why=the host cannot be prepared"
    until(lambda: said in log.read_text(), "it is named", timeout_s=60)
    assert "Permission denied" in log.read_text()
    lost.run("mv", ".ssh/away", ".ssh/authorized_keys").ok()
    until(
        lambda: "Registered to" in log.read_text().rpartition(said)[2],
        "it is used once it lets us in",
        timeout_s=90,
    )
    stop(fleet, running)


def test_a_host_that_is_cut_off_is_used_again_once_it_answers(fleet: Trainers) -> None:
    """A training goes on with the other host's ranks; the next one has both hosts."""
    log, lost = fleet.logs / "cluster-0", fleet.nodes[1]
    earlier = log.read_text() if log.exists() else ""

    def registered() -> int:
        return log.read_text()[len(earlier) :].count("Registered to")

    running = fleet.stays("cluster")
    until(lambda: registered() == 2, "both register", timeout_s=90)
    if fleet.control.run("test", "-f", "snapshot.json").code:  # the first test, where it ran
        fleet.type("publish")
    training = started_train(fleet, with_steps(400), "train-cut")
    (before,) = workers(lost)
    fleet.bed.bed.cut(lost.index)
    cut = time.monotonic()
    try:
        assert training.wait(400) == 0, (fleet.logs / "train-cut").read_text()
        sys.stdout.write(f"trained {time.monotonic() - cut:.0f} s after the cut\n")
        said = f"host=ops@{lost.address}"
        until(
            lambda: said in log.read_text()[len(earlier) :], "its loss is in the command's log", 60
        )
    finally:
        fleet.bed.bed.mend(lost.index)
    seconds, trained = time.monotonic() - cut, fleet.answer("trained.json")
    first = trained["restarts"][0]
    assert (trained["steps"], trained["ranks"]) == (400, 2)
    assert name_of(lost) in (first["worker_id"], first["reason"].split()[0]), first
    sys.stdout.write(f"cut off for {seconds:.0f} s: {first}\n")
    until(lambda: registered() == 3, "it is used again", timeout_s=180)
    assert len(workers(lost)) == 1 and workers(lost) != [before], "one worker, and a new one"
    fleet.control.run("bash", "-euc", with_steps(70), env=fleet.env).ok()
    trained = fleet.answer("trained.json")
    assert (trained["ranks"], trained["restarts"]) == (4, [])
    stop(fleet, running)
    for host in fleet.nodes:
        until(lambda at=host: not at.run("pgrep", "-f", "bin/python").out, "nothing is left")
