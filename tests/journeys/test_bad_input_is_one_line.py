"""What an operator gets wrong ends in one line that says what to do; nothing is half done."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import (
    BUCKET,
    ENVIRONMENT,
    Fleet,
    bring_up,
    init_of_one,
    name_of,
    rclone_s3,
)
from tests.journeys.guide import block, type_on
from tests.journeys.hosts import Ended, Host, Site, clock_ahead, site, until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

HOUR_S = 3600


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=4) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    with rclone_s3(bed, logs) as url:
        yield bring_up(bed, logs, url, ENVIRONMENT)


def says(done: Ended, code: int, *parts: str) -> None:
    """The command ended with ``code`` and one line that holds ``parts``."""
    lines = [each for each in done.err.splitlines() if each.startswith("paceline: ")]
    assert done.code == code, done
    assert len(lines) == 1, done.err
    assert done.err.splitlines()[-1] == lines[0]
    assert "Traceback" not in done.err
    for each in parts:
        assert each in lines[0], lines[0]


def join(fleet: Fleet, node: Host, name: str, state: str, **env: str) -> Ended:
    """Start an agent with the token on ``node``; it must end by itself."""
    text = block("Nodes", 2, NODE=name, RACK="r1", COORDINATOR_1=fleet.control.address)
    return node.run("bash", "-ec", text.replace("--state state", f"--state {state}"), env=env)


def test_an_expired_token(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    made = fleet.control.run("paceline", "tokens", "join", "--worker-id", "n", "--ttl", "1s").ok()
    node.write("token", made.out.strip())
    time.sleep(1.1)
    says(join(fleet, node, "n", "expired"), 77, "has expired", "Ask an admin for another token")
    assert node.run("test", "-e", "expired").code == 1


def test_a_token_of_another_node(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    fleet.make_token(node)
    says(join(fleet, node, "somebody", "other"), 77, "somebody", name_of(node))
    assert node.run("test", "-e", "other").code == 1


def test_a_token_of_another_fleet(fleet: Fleet) -> None:
    """The pin in the token is of another authority: nothing is sent there."""
    node = fleet.nodes[0]
    fleet.make_token(node)
    token = node.run("cat", "token").ok().out.strip()
    node.write("token", token.rpartition("_")[0] + "_" + "0" * 64)
    done = join(fleet, node, name_of(node), "other")
    says(done, 77, "not the coordinator that the fingerprint is of", "/ca.pem", "Check the URL")
    assert node.run("test", "-e", "other").code == 1


def test_no_coordinator_at_that_address(fleet: Fleet) -> None:
    node, elsewhere = fleet.nodes[:2]
    fleet.make_token(node)
    text = block("Nodes", 2, NODE="n", RACK="r1", COORDINATOR_1=elsewhere.address)
    says(node.run("bash", "-ec", text), 75, f"https://{elsewhere.address}:7400")


def test_two_hosts_with_one_name(fleet: Fleet) -> None:
    """The second is refused while the first is alive, which goes on."""
    first, second = fleet.nodes[:2]
    fleet.agent(first, **ENVIRONMENT)
    admin = fleet.ci_token(fleet.nodes[2])
    until(lambda: fleet.alive(admin) == 1, "the first registers")
    name = name_of(first)
    type_on(fleet.control, block("Nodes", 1, NODE=name))
    second.write("token", fleet.control.run("cat", f"{name}.token").ok().out)
    says(join(fleet, second, name, "second"), 1, name, "alive", "tokens revoke")
    assert second.run("test", "-e", "second").code == 1
    seen = len(fleet.log(name))
    time.sleep(3)
    assert "trying again" not in fleet.log(name)[seen:]
    assert fleet.alive(admin) == 1


def test_a_clock_two_hours_behind(fleet: Fleet, clock_shim: Path) -> None:
    """An hour is allowed (the page says so); beyond, the line names the clock."""
    node = fleet.nodes[2]
    fleet.make_token(node)
    behind = clock_ahead(node, clock_shim, -2 * HOUR_S)
    says(join(fleet, node, name_of(node), "late", **behind), 75, "clock")


def test_a_profile_of_a_newer_release(fleet: Fleet) -> None:
    """A setting that this release lacks is named, and that the profile may be of a newer one."""
    control = fleet.control
    control.run("mkdir", "-p", "newer").ok()
    control.write("newer.toml", 'name = "newer"\n[holograms]\nlaser = 1\n')
    init = init_of_one(control, "http://10.77.200.1:9000")
    text = f"cd newer && {init.replace('--profile hosts', '--profile ../newer.toml')}"
    done = control.run("bash", "-ec", text)
    says(done, 2, "unknown key", "holograms", "wanted one of", "newer release", "Paceline")
    assert control.run("ls", "-A", "newer").ok().out == ""


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("paceline worker --state bare --scheduler tls://10.0.0.1:8786", "flows"),
        ("paceline lifecycle", "flows"),
        (f"paceline evaluate m --base 1 --trained {'0' * 64} --snapshot s3://models/s", "flows"),
        ("paceline training start m 1 --snapshot s3://models/s", "flows"),
        ("paceline train --text texts --output made", "train"),
    ],
)
def test_a_host_without_the_extra_it_needs(fleet: Fleet, line: str, extra: str) -> None:
    """The base install is told what to do more: it ends before it calls or writes anything."""
    node = fleet.nodes[1]
    prepare = "mkdir -p lab/texts; cd lab; echo hello > texts/a; test -d .paceline ||"
    init = "paceline init --coordinator http://127.0.0.1:1 --prefect http://127.0.0.1:2/api"
    node.run("sh", "-c", f"{prepare} {init}").ok()
    before = node.run("find", "lab").ok().out
    says(node.run("sh", "-c", f"cd lab; {line}"), 2, f"paceline-*.whl)[{extra}]")
    assert node.run("find", "lab").ok().out == before


def test_nodes_report_what_they_have(fleet: Fleet) -> None:
    """Without any setting; what a virtual interface claims is no speed."""
    node = fleet.nodes[1]
    fleet.agent(node, **ENVIRONMENT)
    shown = fleet.control.run

    def found() -> dict[str, Any]:
        listed = json.loads(shown("paceline", "workers", "--json").ok().out)["workers"]
        return next((each for each in listed if each["worker_id"] == name_of(node)), {})

    until(lambda: bool(found()), "the node registers")
    has = found()["inventory"]
    assert has["cores"] == int(node.run("nproc").ok().out)
    total = node.run("sed", "-n", "s/^MemTotal: *//p", "/proc/meminfo").ok().out
    assert 0 < has["memory_bytes"] <= int(total.split()[0]) * 1024
    size = node.run("df", "-B1", "--output=size", "/dev/shm").ok().out.split()[-1]
    assert has["shared_memory_bytes"] == int(size)
    assert has["interface"]
    assert has["interface_mbit"] is None
    kept = json.loads(node.run("cat", "state/disk-speed.json").ok().out)
    assert has["disk_bytes_s"] == kept["write_bytes_s"] > 0
    assert f"{has['cores']} cores" in shown("paceline", "workers").ok().out
    plan = shown("paceline", "plan", "--size", "1GB", "--to", name_of(node)).ok().out
    assert "measured on 1 of 1" in plan
    assert "links assumed: profile" in plan


def test_a_wrong_s3_endpoint(fleet: Fleet) -> None:
    control = fleet.control
    control.run("sh", "-c", "mkdir -p elsewhere/v; echo weights > elsewhere/v/w").ok()
    write_profile_there(control, "http://10.77.200.1:9999")
    says(publish(control, "models", ENVIRONMENT), 75, "http://10.77.200.1:9999")


def test_wrong_s3_keys_and_a_wrong_bucket(fleet: Fleet) -> None:
    control = fleet.control
    control.run("sh", "-c", "mkdir -p elsewhere/v; echo weights > elsewhere/v/w").ok()
    write_profile_there(control, "http://10.77.200.1:9000")
    wrong = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "other"}
    says(publish(control, "models", wrong), 77, "http://10.77.200.1:9000")
    says(publish(control, "nobodys", ENVIRONMENT), 1, "nobodys")


def write_profile_there(host: Host, s3_url: str) -> None:
    """Write a profile below ``elsewhere``, where there is no state directory."""
    text = f'name = "fleet"\n[storage]\nbucket = "{BUCKET}"\n[objects]\nendpoint_url = "{s3_url}"\n'
    host.write("elsewhere/fleet.toml", text)


def publish(host: Host, bucket: str, env: dict[str, str]) -> Ended:
    text = block("Publish", DIRECTORY="v", MODEL="m", VERSION="1", BUCKET=bucket)
    with_profile = text.replace("paceline publish", "paceline publish --profile fleet.toml")
    return host.run("bash", "-ec", with_profile, env=env, at="/home/user/elsewhere")
