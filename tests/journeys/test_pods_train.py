"""docs/how-to/run-in-kubernetes.md, typed: what its pods run brings a lifecycle to its end.

There is no Kubernetes: ``pods.py`` runs the containers' processes on hosts that share nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.test_material import pods_of_dask
from tests.journeys.fleet import ENVIRONMENT, KEY, SECRET, rclone_s3
from tests.journeys.guide import commands
from tests.journeys.hosts import Site, site, until
from tests.journeys.pods import Pod, applied, install_kubectl
from tests.journeys.trainers import SMALL, TYPED, Trainers, name_of

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(1800)]

PAGE = commands("how-to/run-in-kubernetes.md")
AUTH = "paceline:apispassword"
TINY = [*SMALL, "--set", "model.parameters=100000", "--set", "model.context=64"]


@pytest.fixture(scope="module")
def fleet(plane_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    logs = tmp_path_factory.mktemp("logs")
    with site(plane_software, hosts=4, rate_mbit=400) as bed, rclone_s3(bed, logs) as s3_url:
        made = bring_up(bed, logs, s3_url)
        texts = logs / "s3/models/texts"  # as any S3 tool puts them there
        texts.mkdir()
        for number in range(40):
            lines = "".join(f"line {n} of text {number} says {n * number}\n" for n in range(400))
            (texts / f"{number}.txt").write_text(lines)
        yield made


def bring_up(bed: Site, logs: Path, s3_url: str) -> Trainers:
    """Type the page; the coordinator, Prefect and MLflow are outside of the cluster."""
    control, pods, *nodes = bed.hosts
    at = control.address
    env = {
        **ENVIRONMENT,
        "CONTROL": at,
        "COORDINATOR": f"https://{at}:7400",
        "IMAGE": "registry.example/paceline:1",
        "PREFECT": f"http://{at}:4200/api",
        "MLFLOW": f"http://{at}:5000",
        "PREFECT_AUTH": AUTH,
        "PREFECT_API_AUTH_STRING": AUTH,
        "S3": s3_url,
        "BUCKET": "models",
        "NODES": " ".join(map(name_of, nodes)),
    }
    made = Trainers(control, tuple(nodes), bed, env, logs, typed=TYPED | PAGE)
    install_kubectl(control)
    for host in bed.hosts:  # what the cluster's DNS has
        line = f"echo {pods.address} paceline-scheduler.paceline.svc >> /etc/hosts"
        host.run("sh", "-c", line, root=True).ok()
    made.type_with("init", TINY)
    servers = {
        "prefect": f"PREFECT_SERVER_API_AUTH_STRING={AUTH} prefect server start --host {at}",
        "mlflow": "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --port 5000"
        f" --host {at} --allowed-hosts '*' --backend-store-uri sqlite:///mlflow.db",
    }
    for name, line in servers.items():
        control.start("bash", "-euc", f"exec env {line}", env=env, log=logs / name)
    made.stays("coordinator")
    for url in (
        f"https://{at}:7400/readyz",
        f"http://{at}:4200/api/health",
        f"{env['MLFLOW']}/health",
    ):
        until(lambda url=url: control.run("curl", "-skf", url).code == 0, url, 120)
    for block in ("secrets", "network", "nodes", "flows"):
        made.type(block)
    return made


def test_a_laptop_runs_the_lifecycle_on_pods(fleet: Trainers) -> None:
    control, logs = fleet.control, fleet.logs
    _, pods, *nodes = fleet.bed.hosts
    objects = {each["kind"]: each for each in applied(control)}
    scheduler, worker = (each["spec"] for each in pods_of_dask(objects["DaskCluster"]))
    assert objects["DaskCluster"]["spec"]["worker"]["replicas"] == len(nodes)
    started = Pod(scheduler, pods, control, "pods", {}).start(logs / "scheduler")
    until(lambda: "Scheduler at" in (logs / "scheduler").read_text(), "the scheduler listens")
    (probe,) = {
        each["httpGet"]["path"]
        for kind, each in scheduler["containers"][0].items()
        if kind.endswith("Probe")
    }
    pods.run("curl", "-sf", f"http://127.0.0.1:8787{probe}").ok()

    def registered() -> int:
        return (logs / "scheduler").read_text().count("Register worker")

    workers = [Pod(worker, host, control, name_of(host), ENVIRONMENT) for host in nodes]
    for each in workers:
        each.start(logs / name_of(each.host))
    until(lambda: registered() == 2, "both register", 120)
    flows = Pod(
        objects["Deployment"]["spec"]["template"]["spec"], pods, control, "pods", ENVIRONMENT
    )
    flows.start(logs / "flows")
    *_, module = fleet.typed["register"].split(" -- ")[1].split()
    flows.exec("python", "-m", module)
    token = control.run("paceline", "tokens", "create", "--name", "ann", "--scope", "deploy").ok()
    control.run(
        *("paceline", "login", "/home/user/.paceline/client.json"),
        env={"PACELINE_TOKEN": token.out.strip()},
        at="/tmp",
    ).ok()
    line = commands("how-to/run-the-control-plane.md")["lifecycle"]
    control.run("bash", "-euc", line, env=fleet.env, at="/tmp").ok()
    answer = json.loads(control.run("cat", "/tmp/lifecycle.json").ok().out)
    for host in nodes:
        at = f"/var/lib/paceline/nodes/{name_of(host)}/store/models/{answer['model']['model_id']}"
        found = host.run("readlink", f"{at}/active").ok().out.strip()
        assert found.endswith(answer["model"]["version"])
        ranks = host.run("ls", f"/var/lib/paceline/nodes/{name_of(host)}/work").ok().out
        assert ranks.strip(), "a rank ran here"
        assert host.run("grep", "-rlE", f"{KEY}|{SECRET}", "/var/lib/paceline").code == 1
        assert not host.run("ls", "-A").ok().out, "the container's own files cannot be written"
    # A container that ends is started again; its token is spent, and not needed.
    nodes[0].run("pkill", "-TERM", "-f", "bin/paceline worker").ok()
    until(lambda: nodes[0].run("pgrep", "-f", "bin/paceline").code, "nothing of it runs")
    workers[0].start(logs / "again")
    until(lambda: registered() == 3, "the worker registers again", 60)
    assert "failed with remote" not in (logs / "scheduler").read_text()
    assert started.poll() is None
