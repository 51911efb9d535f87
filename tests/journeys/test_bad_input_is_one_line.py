"""What an operator gets wrong ends in one line that says what to do; nothing is half done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, name_of, rclone_s3, write_profile
from tests.journeys.guide import block
from tests.journeys.hosts import Ended, Host, Site, clock_ahead, site, until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(300)]

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


def test_no_coordinator_at_that_address(fleet: Fleet) -> None:
    node, elsewhere = fleet.nodes[:2]
    fleet.make_token(node)
    text = block("Nodes", 2, NODE="n", RACK="r1", COORDINATOR_1=elsewhere.address)
    says(node.run("bash", "-ec", text), 75, f"https://{elsewhere.address}:7400")


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
    write_profile(control, "http://10.77.200.1:9000", 200)
    control.run("sh", "-c", "(cat fleet.toml; printf '[holograms]\nlaser = 1\n') > newer.toml").ok()
    init = block("One coordinator", 1, COORDINATOR_1=control.address).strip()
    text = f"cd newer && {init.replace('fleet.toml', '../newer.toml')}"
    done = control.run("bash", "-ec", text)
    says(done, 2, "unknown key", "holograms", "wanted one of", "newer release", "Paceline")
    assert control.run("ls", "-A", "newer").ok().out == ""


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
    """Write the page's profile below ``elsewhere``, where there is no state directory."""
    write_profile(host, s3_url, 200)
    host.run("mv", "fleet.toml", "elsewhere/").ok()


def publish(host: Host, bucket: str, env: dict[str, str]) -> Ended:
    text = block("Publish", DIRECTORY="v", MODEL="m", VERSION="1", BUCKET=bucket)
    with_profile = text.replace("paceline publish", "paceline publish --profile fleet.toml")
    return host.run("bash", "-ec", with_profile, env=env, at="/home/user/elsewhere")
