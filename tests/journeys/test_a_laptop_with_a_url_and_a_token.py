"""A laptop with the wheel, a URL and a token does what a person does; it has no file of the fleet.

It types what docs/how-to/use-from-a-laptop.md shows. Coordinator, nodes and laptop share nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, rclone_s3
from tests.journeys.guide import commands, commands_under
from tests.journeys.hosts import Ended, Host, site, until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

PAGE = "how-to/use-from-a-laptop.md"
EXAMPLE = "https://paceline.example:7400"
LABELS = {1: ("r1", "a100"), 2: ("r1", "h100"), 3: ("r2", "a100")}
MODEL_BYTES = 8_000_000


@dataclass(frozen=True)
class Person:
    """The laptop, and where its fleet is."""

    laptop: Host
    fleet: Fleet
    authority: str

    def typed(self, line: str, **env: str) -> Ended:
        """Type a line of the page on the laptop."""
        line = line.replace(EXAMPLE, self.fleet.url)
        return self.laptop.run("sh", "-c", line, env={**ENVIRONMENT, **env})

    def token(self, *options: str) -> str:
        made = self.fleet.control.run("paceline", "tokens", "create", "--name", "ann", *options)
        return made.ok().out.strip()

    def log_in(self, token: str) -> Ended:
        line = commands_under(PAGE, "Log in", AUTHORITY=self.authority)[0]
        return self.typed(line, PACELINE_TOKEN=token)


@pytest.fixture(scope="module")
def person(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    logs = tmp_path_factory.mktemp("logs")
    with site(software, hosts=5) as bed, rclone_s3(bed, logs) as s3_url:
        laptop = bed.hosts[-1]
        bed.hosts = bed.hosts[:-1]
        fleet = bring_up(bed, logs, s3_url, ENVIRONMENT)
        bed.hosts = [*bed.hosts, laptop]
        for node in fleet.nodes:
            rack, pool = LABELS[node.index]
            fleet.agent(node, "--label", f"pool={pool}", rack=rack, **ENVIRONMENT)
        (line,) = commands_under(PAGE, "A token, and the authority")
        made = fleet.control.run("sh", "-c", line).ok()
        authority = re.search(r"--authority ([0-9a-f]{64})", made.err)
        assert authority, made.err
        found = Person(laptop, fleet, authority[1])
        assert found.log_in(made.out.strip()).ok().out.startswith("logged in to")
        until(
            lambda: found.typed("paceline workers --json").out.count('"alive":true') == 3,
            "the laptop sees every node",
        )
        yield found


def active(node: Host, model: str) -> str:
    """Return the version that a node serves."""
    store = f"state/nodes/node-{node.index}/store/models/{model}"
    return node.run("sh", "-c", f"basename $(readlink {store}/active)").out.strip()


def one_line(done: Ended, code: int, *words: str) -> None:
    assert done.code == code, done
    assert done.err.count("\n") == 1, done.err
    assert all(each in done.err for each in words), done.err


def test_a_person_publishes_distributes_activates_and_goes_back(person: Person) -> None:
    laptop, nodes = person.laptop, person.fleet.nodes
    for line in commands_under(PAGE, "Log in", AUTHORITY=person.authority)[1:]:
        shown = person.typed(line)
        assert shown.code == 0, shown
    sums = {}
    for version, directory in (("1", "acme"), ("2", "acme-2")):
        script = f"mkdir {directory}; head -c {MODEL_BYTES} /dev/urandom > {directory}/w"
        laptop.run("sh", "-c", script).ok()
        sums[version] = laptop.run("sha256sum", f"{directory}/w").ok().out.split()[0]
    lines = commands_under(PAGE, "Publish, distribute, activate, go back")
    publish, workers, distribute, watch, publish_2, to_rack, activate, rollback = lines
    person.typed(publish).ok()
    assert "pool=h100" in person.typed(workers).ok().out
    assert "on 3 of 3 workers, active on 3" in person.typed(distribute).ok().out
    assert "complete" in person.typed(watch).ok().out
    for node in nodes:
        copy = f"state/nodes/node-{node.index}/store/models/acme-7b/1/w"
        assert node.run("sha256sum", copy).ok().out.split()[0] == sums["1"]
        assert active(node, "acme-7b") == "1"

    program = commands("how-to/use-from-python.md", "python")["client"]
    said = laptop.run("python", "-c", program, env=ENVIRONMENT).ok().out
    assert "node-1 r1 True" in said
    assert "acme-7b 1 complete" in said.splitlines()[-1]

    by_url = distribute.replace("acme-7b 1", "s3://models/models/acme-7b/1")
    assert "acme-7b 1 on 3 of 3 workers" in person.typed(by_url).ok().out

    person.typed(publish_2).ok()
    done = person.typed(to_rack).ok()
    assert "on 2 of 2 workers, not activated" in done.out
    deployment = done.out.split()[-1]
    for node, held in zip(nodes, (0, 0, 2), strict=True):
        copy = f"state/nodes/node-{node.index}/store/models/acme-7b/2/w"
        assert node.run("ls", copy).code == held
    refused = person.typed(
        activate.replace("ID", deployment)
    )  # node-3 has the label, not the model
    one_line(refused, 2, "not every selected worker is part of this deployment", "node-3")
    narrower = activate.replace("ID", deployment).replace("pool=a100", "pool=a100,rack=r1")
    switched = json.loads(person.typed(f"{narrower} --json").ok().out)
    assert switched["workers"] == 1
    assert [active(node, "acme-7b") for node in nodes] == ["2", "1", "1"]
    person.typed(rollback.replace("ID", switched["deployment_id"])).ok()
    assert [active(node, "acme-7b") for node in nodes] == ["1", "1", "1"]


def test_the_laptop_keeps_one_file_and_no_command_needed_another(person: Person) -> None:
    found = person.laptop.run("find", ".config", "-type", "f", "-printf", "%m %p\n").ok()
    assert found.out == "600 .config/paceline/login.json\n"
    assert person.laptop.run("ls", ".paceline").code == 2


def test_an_admin_manages_tokens_from_the_laptop(person: Person) -> None:
    admin, mine = person.token("--scope", "admin"), person.token("--scope", "deploy")
    person.log_in(admin).ok()
    try:
        made = person.typed("paceline tokens create --name bob --scope read --json").ok()
        bob = json.loads(made.out)
        assert "bob" in person.typed("paceline tokens list").ok().out
        assert "POST /tokens" in person.typed("paceline audit").ok().out
        person.log_in(bob["token"]).ok()
        one_line(person.typed("paceline distribute acme-7b 1"), 77, "scope read", "scope deploy")
        one_line(person.typed("paceline tokens list"), 77, "wanted scope admin")
        person.log_in(admin).ok()
        person.typed(f"paceline tokens revoke {bob['record']['token_id']}").ok()
        one_line(person.log_in(bob["token"]), 77, "the token was revoked")
    finally:
        person.log_in(mine).ok()


def test_bad_input_is_one_line_each(person: Person) -> None:
    token = {"PACELINE_TOKEN": person.token("--scope", "deploy")}
    expired = person.token("--scope", "deploy", "--ttl", "0.01s")
    url, control = person.fleet.url, person.fleet.control
    one_line(person.typed("paceline login https://10.77.99.99:7400", **token), 75, "10.77.99.99")
    plain = url.replace("https", "http")
    one_line(person.typed(f"paceline login {plain}", **token), 2, "in the clear")
    one_line(person.typed(f"paceline login {url}", **token), 77, "not trusted here", "--authority")
    other = f"paceline login {url} --authority {'0' * 64}"
    one_line(person.typed(other, **token), 77, "the fingerprint is of", person.authority)
    line = f"echo {control.address} pace-0.example >> /etc/hosts"
    person.laptop.run("sh", "-c", line, root=True).ok()
    renamed = other.replace(control.address, "pace-0.example")
    one_line(person.typed(renamed, **token), 2, "pace-0.example", "rest_hosts")
    control.run(
        "sh", "-c", "mkdir other; cd other; paceline init --coordinator http://127.0.0.1:1"
    ).ok()
    person.laptop.write(
        "other.pem", control.run("cat", "other/.paceline/authority/ca.pem").ok().out
    )
    wrong = person.typed(f"paceline login {url} --ca other.pem", **token)
    one_line(wrong, 77, "certificate is not trusted here", url)
    one_line(person.log_in(expired), 77, "the token has expired")
    one_line(person.typed("paceline distribute acme-7b 1 --to rak=r1"), 2, "unknown label", "rack")
    one_line(person.typed("paceline distribute acme-7b 1 --to rack=r9"), 2, "rack=r1, r2")
    one_line(person.typed("paceline distribute acme-7b 9"), 1, "acme-7b/9")
    one_line(person.typed("paceline lifecycle"), 1, "has no Prefect server")


def test_client_json_takes_the_place_of_url_and_authority(person: Person) -> None:
    text = person.fleet.control.run("cat", ".paceline/client.json").ok().out
    person.laptop.write("client.json", text)
    done = person.typed(
        "paceline login client.json", PACELINE_TOKEN=person.token("--scope", "deploy")
    )
    assert person.fleet.url in done.ok().out


def test_a_node_says_what_its_doctor_finds(person: Person) -> None:
    node = person.fleet.nodes[0]
    done = node.run("paceline", "doctor", "--state", "state", "--json", env=ENVIRONMENT)
    found = {each["name"]: each for each in json.loads(done.out)["checks"]}
    assert json.loads(done.out)["place"] == "node"
    assert {
        found[each]["status"] for each in ("coordinator", "clock", "peer-port", "identity-tls")
    } == {"ok"}
    assert found["s3"]["found"].startswith("read 4.2 MB of s3://models/models/acme-7b")
    without = node.run(
        *("paceline", "doctor", "--state", "state", "--bundle", "support.tar.gz", "--json"),
        env={"AWS_EC2_METADATA_DISABLED": "true"},
    )
    assert without.code == 1
    s3 = next(each for each in json.loads(without.out)["checks"] if each["name"] == "s3")
    assert "no S3 credentials" in s3["found"]
    assert s3["do"]
    runtime = json.loads(node.run("cat", "state/runtime.json").ok().out)
    held = [runtime["secrets"]["worker_token"], runtime["secrets"]["peer_token"]]
    text = node.run("sh", "-c", "tar -xzf support.tar.gz -O").ok().out
    assert "findings" in text
    assert not [each for each in held if each in text]
