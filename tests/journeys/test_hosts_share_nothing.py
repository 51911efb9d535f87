"""An operator brings up hosts that share nothing, with an S3 server of somebody else's.

What docs/how-to/bring-up-a-fleet.md has a user type: init, a coordinator, join tokens, agents with
mutual TLS, publish, a deployment over REST, watch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, KEY, MODEL, SECRET, Fleet, bring_up, rclone_s3
from tests.journeys.guide import block, type_on
from tests.journeys.hosts import Site, site, until

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

SOURCE = "s3://models/models/acme-7b/1"
MEGABYTES = 12


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=4) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    with rclone_s3(bed, logs) as url:
        yield bring_up(bed, logs, url, ENVIRONMENT)


def test_hosts_see_no_file_of_another(bed: Site, tmp_path: Path) -> None:
    """Whatever a host writes, no other host and no file of this machine shows it."""
    first, second = bed.hosts[:2]
    for place in ("/tmp/it", "/var/tmp/it", "/dev/shm/it", "/run/it", "/home/it", "/etc/it"):
        root = place.startswith("/etc")
        first.run("sh", "-c", f"echo private > {place}", root=root).ok()
        assert first.run("cat", place).ok().out == "private\n"
        assert second.run("cat", place, root=True).code == 1
        assert not Path(place).exists()
    assert second.run("ls", str(Path(__file__).parent)).code == 2  # nor the checkout


def test_a_model_reaches_every_node_by_its_own_credentials(fleet: Fleet) -> None:
    """One node has AWS's variables, the other a file: neither's key is in a file of ours."""
    control, (first, second, ci) = fleet.control, fleet.nodes
    second.write(
        ".aws/credentials",
        f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n",
    )
    fleet.agent(first, **ENVIRONMENT)
    fleet.agent(second)
    wanted = fleet.publish("1", MEGABYTES, ENVIRONMENT)
    token = fleet.ci_token(ci)
    until(lambda: fleet.alive(token) == 2, "both nodes register")
    answer = fleet.distribute(ci, token, "1", (first, second)).ok()
    assert json.loads(answer.out)["status"] in ("init", "downloading")
    assert "2 of 2 workers" in type_on(control, block("Distribute from CI", 4)).out
    for each in (first, second):
        assert fleet.holds(each, "1") == wanted
        assert each.run("grep", "-rlE", f"{KEY}|{SECRET}", "state").code == 1
    assert control.run("grep", "-rlE", f"{KEY}|{SECRET}", ".paceline").code == 1

    again = fleet.publish("2", 1, ENVIRONMENT)  # without curl, and without Prefect's libraries
    text = block("Distribute from CI", 5, MODEL=MODEL, VERSION="2")
    assert "on 2 of 2 workers, active on 2" in type_on(control, text, env=ENVIRONMENT).out
    assert [fleet.holds(each, "2") for each in (first, second)] == [again, again]


def test_missing_credentials_are_named_where_they_are_missing(fleet: Fleet) -> None:
    """A publish without credentials says which, where, and what to do."""
    fleet.control.run("sh", "-c", "mkdir -p secretless; echo weights > secretless/w").ok()
    refused = fleet.control.run(
        *("paceline", "publish", "secretless", SOURCE, "--model", "acme-7b", "--version", "3"),
        env={"AWS_EC2_METADATA_DISABLED": "true"},
    )
    assert refused.code == 77, refused
    assert "no S3 credentials" in refused.err
    assert "AWS_ACCESS_KEY_ID" in refused.err
    assert refused.err.count("\n") == 1
