"""`paceline init`: a fleet's state directory, from which a coordinator starts and nodes join."""

import json
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from paceline.cli import cli
from paceline.config import load_runtime
from paceline.schemas import schema_text
from tests.journeys.guide import commands
from tests.support.command import paceline

DEADLINE_S = 60.0
TLS = ("--set", 'security.rest_tls="installation"', "--profile", "ci")


def command(*words, state):
    return paceline(*words, "--state", state)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(log, *words):
    with log.open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", *words], stdout=said, stderr=said
        )


def until(check, what):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := check()):
        assert time.monotonic() < end_s, f"timed out waiting until {what}"
        time.sleep(0.5)  # a look is a command
    return found


def end(processes):
    for each in processes:
        each.send_signal(signal.SIGTERM)
    for each in processes:
        try:
            each.wait(20)
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


def test_a_fleet_begins_with_init_and_its_first_node_joins_over_tls(tmp_path):
    port, state = free_port(), tmp_path / "coordinator"
    url = f"https://localhost:{port}"
    made = command("init", *TLS, "--coordinator", url, "--json", state=tmp_path / "first")
    assert made.returncode == 0, made.stderr
    (tmp_path / "first").rename(state)  # as on another machine, where the copy has another path
    jsonschema.validate(json.loads(made.stdout), json.loads(schema_text("init")))
    assert stat.S_IMODE((state / "runtime.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((state / "authority" / "ca-key.pem").stat().st_mode) == 0o600
    words = ["coordinator", "--state", str(state), "--host", "127.0.0.1", "--port", str(port)]
    running = [started(tmp_path / "coordinator.log", *words, "--advertise", url)]
    try:
        until(lambda: command("status", "--json", state=state).returncode == 0, "it answers")
        token = command("tokens", "join", "--worker-id", "node-1", state=state).stdout.strip()
        node = tmp_path / "node"
        agent = ["agent", "--state", str(node), "--worker-id", "node-1", "--join", token]
        running.append(started(tmp_path / "agent.log", *agent, "--coordinator", url))

        def joined():
            report = json.loads(command("status", "--json", state=state).stdout)
            return [each["worker_id"] for each in report["workers"]] == ["node-1"]

        until(joined, "the node is in the fleet")
        assert load_runtime(node).secrets.coordinator_token == "", "it got a token of its own"
        again = command("init", *TLS, "--coordinator", url, state=state)
        assert again.returncode != 0
        assert "installation's already" in again.stderr
        assert command("status", "--json", state=state).returncode == 0, "nothing has changed"
    finally:
        end(running)
    assert list((state / "authority").iterdir()), "the authority outlives its coordinator"
    assert not (tmp_path / "first").exists(), "nothing is written where it was made"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--coordinator", "http://10.0.0.1:7400"), "https://"),
        (("--coordinator", "https://10.0.0.1:7400"), "rest_tls"),
        ((*TLS, "--coordinator", "http://127.0.0.1:7400"), "https://"),
        ((*TLS, "--coordinator", "https://a:1", "--coordinator", "https://b:1"), "etcd"),
        ((*TLS, "--coordinator", "a:1"), "http"),
        ((*TLS,), "--coordinator"),
    ],
)
def test_what_would_not_be_safe_is_refused_and_leaves_nothing(tmp_path: Path, words, wanted):
    done = command("init", *words, state=tmp_path / "state")
    assert done.returncode == 2
    assert wanted in done.stderr
    assert not (tmp_path / "state").exists()


def test_the_thousand_machines_profile_names_every_replica(tmp_path):
    urls = [f"https://c{n}.example:8443" for n in range(3)]
    words = [word for url in urls for word in ("--coordinator", url)]
    done = command("init", "--profile", "fleet-1000", *words, state=tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("paceline coordinator --state") == 3
    needed = done.stdout.partition("still needs:")[2].partition("Next,")[0]
    assert "etcd/ca.pem: the file of [control] etcd_ca" in needed
    assert "$PACELINE_POSTGRES_PASSWORD" in needed
    runtime = load_runtime(tmp_path / "state")
    assert runtime.endpoints.coordinator_urls == tuple(urls)
    assert runtime.profile.security.rest_hosts == tuple(f"c{n}.example" for n in range(3))
    assert runtime.secrets.coordinator_token not in done.stdout


def test_a_scheduler_gets_tls_files_of_its_own_and_up_starts_no_fleet(tmp_path):
    state, scheduler = tmp_path / "state", "tls://10.0.0.1:8786"
    words = ("--coordinator", "https://10.0.0.1:7400", "--scheduler", scheduler)
    assert command("init", *TLS, *words, state=state).returncode == 0
    cluster = load_runtime(state).profile.cluster
    assert (cluster.kind, cluster.scheduler) == ("address", scheduler)
    files = {
        each.name: stat.S_IMODE(each.stat().st_mode) for each in (state / "dask-tls").iterdir()
    }
    assert files == dict.fromkeys(("ca.pem", "server.pem", "server-key.pem"), 0o600)
    over_ssh = tmp_path / "ssh"
    assert command("init", "--profile", "ssh", *words, state=over_ssh).returncode == 0
    assert load_runtime(over_ssh).profile.cluster.kind == "ssh"
    refused = command("up", "--profile", "ssh", state=tmp_path / "up")
    assert refused.returncode == 2
    assert "one machine's nodes" in refused.stderr
    bad = command("init", *TLS, *words[:2], "--scheduler", "10.0.0.1", state=tmp_path / "bad")
    assert bad.returncode == 2
    assert "cluster.scheduler" in bad.stderr
    assert not (tmp_path / "bad").exists() and not (tmp_path / "up").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("lifecycle",),
        ("training", "start", "acme/tiny", "1", "--snapshot", "s3://paceline/data/snapshots/x"),
        ("verify", "acme/tiny", "1"),
        ("snapshot", "s3://paceline/texts"),
    ],
    ids=lambda words: words[0],
)
def test_a_fleet_without_prefect_says_so_instead_of_starting_a_server(tmp_path, words):
    state = tmp_path / "state"
    made = command("init", "--coordinator", "http://127.0.0.1:1", *TLS[2:], state=state)
    assert made.returncode == 0, made.stderr
    done = command(*words, state=state)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert "no Prefect server" in line
    assert "paceline init" in line and "--prefect" in line


def test_the_replicas_page_makes_a_state_and_its_options_are_known(tmp_path):
    page = commands("how-to/run-coordinator-replicas.md")["replicas"]
    init, serve = page.replace("DIR", str(tmp_path / "state")).splitlines()
    done = paceline(*shlex.split(init)[1:])
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "state/client.json").read_text())["coordinators"]
    _, name, *words = shlex.split(serve)
    cli.get_command(None, name).make_context(name, words)
