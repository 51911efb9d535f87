"""What `paceline cluster --render` prints is what the profile says, and Kubernetes and the Dask
operator accept it; the script for PBS starts a worker on each node of a job.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from paceline.cluster.dask_service import dask_settings
from tests.deployments.test_material import ROOT, parsed, pods_of_dask
from tests.journeys.guide import commands
from tests.support.command import Ended, paceline

SCHEMA = Path(__file__).with_name("daskcluster.schema.json")
SITE = """
name = "site"
[cluster]
kind = "kubernetes"
nodes = 3
scheduler = "tls://paceline-scheduler.ml-team.svc:8786"
[cluster.kubernetes]
namespace = "ml-team"
image = "registry.example/all@sha256:abc"
coordinator_image = "registry.example/coordinator:7"
node_selector = { "example.com/pool" = "h100" }
resources = { cpu = "16", memory = "200Gi", "nvidia.com/gpu" = 8 }
service_account = "models"
dask_tls_secret = "tls-of-dask"
join_secret = "tokens"
objects_secret = "s3"
ca_config_map = "authority"
node_network = "172.20.0.0/16"
[control]
coordination = "etcd"
audit = "postgres"
etcd_endpoints = ["https://etcd:2379"]
postgres_url = "postgresql://paceline@postgres/paceline"
[security]
rest_tls = "installation"
peer_tls = "mtls"
"""
REPLICAS = [
    f"https://paceline-coordinator-{n}.paceline-coordinator.ml-team.svc:8443" for n in range(3)
]


def initialised(directory: Path, profile: str = SITE, urls: list[str] = REPLICAS) -> Ended:
    (directory / "site.toml").write_text(profile)
    options = [word for url in urls for word in ("--coordinator", url)]
    where = ("--state", directory / "state", "--profile", directory / "site.toml")
    return paceline("init", *where, *options)


def rendered(directory: Path, *parts: str) -> list[dict[str, Any]]:
    options = [word for part in parts for word in ("--render", part)]
    done = paceline("cluster", "--state", directory / "state", *options)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("site")
    assert initialised(directory).returncode == 0
    return rendered(directory, "all")


def dask_cluster(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (each for each in documents if each["kind"] == "DaskCluster")
    return found


def closed(schema: Any) -> Any:
    """Return ``schema`` with unknown fields refused, as `kubectl apply` refuses them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(each) for key, each in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made:
        made.setdefault("additionalProperties", False)
    return made


def check_by_operator(cluster: dict[str, Any]) -> None:
    """Raise where the operator's definition of a DaskCluster does not admit this one."""
    schema = closed(json.loads(SCHEMA.read_text()))
    schema["properties"] |= {"apiVersion": {"const": "kubernetes.dask.org/v1"}}
    schema["properties"] |= {"kind": {"const": "DaskCluster"}, "metadata": {"type": "object"}}
    jsonschema.Draft202012Validator(schema).validate(cluster)


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_and_the_operator_accept_what_is_rendered(
    site: list[dict[str, Any]], version: str
) -> None:
    assert len(site) == 11
    for each in site:
        for checked in pods_of_dask(each) if each["kind"] == "DaskCluster" else [each]:
            kubernetes_validate.validate(checked, version, strict=True)
    check_by_operator(dask_cluster(site))


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda spec: spec["worker"].update(replicas="two"), "two"),
        (lambda spec: spec["worker"].update(nodes=2), "nodes"),
        (lambda spec: spec["scheduler"].pop("service"), "service"),
        (lambda spec: spec["worker"]["spec"].pop("containers"), "containers"),
        (lambda spec: spec["worker"]["spec"].update(hostNet=True), "hostNet"),
        (lambda spec: spec["scheduler"]["service"]["ports"][0].update(port="8786"), "8786"),
    ],
)
def test_the_operator_would_refuse_a_spoiled_field(
    site: list[dict[str, Any]], spoil: Callable[[dict[str, Any]], object], field: str
) -> None:
    spoiled = json.loads(json.dumps(dask_cluster(site)))
    spoil(spoiled["spec"])
    with pytest.raises(jsonschema.ValidationError, match=field):
        check_by_operator(spoiled)


def test_everything_that_a_site_has_of_its_own_is_the_profiles(site: list[dict[str, Any]]) -> None:
    assert {each["metadata"]["namespace"] for each in site} == {"ml-team"}
    said = texts(site)
    for left in (".paceline.svc", "paceline:0.1.0", "-train:", "paceline-dask-tls", "10.0.0.0/8"):
        assert not [text for text in said if left in text], left
    for left in ("paceline-join", "paceline-objects", "paceline-coordinator-ca"):
        assert left not in said
    assert said.count("172.20.0.0/16") == 2
    assert {"tls-of-dask", "tokens", "s3", "authority"} <= set(said)
    assert f"--coordinator={REPLICAS[0]}" in said
    images = {each for each in said if each.startswith("registry.example/")}
    assert images == {"registry.example/all@sha256:abc", "registry.example/coordinator:7"}
    (replicas,) = (each for each in site if each["kind"] == "StatefulSet")
    assert replicas["spec"]["replicas"] == 3
    assert replicas["spec"]["template"]["spec"]["containers"][0]["image"].endswith("coordinator:7")
    accounts = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"].get("serviceAccountName")
        for each in site
        if "template" in each["spec"]
    }
    assert accounts == {
        "paceline-agent": "models", "paceline-prefect-worker": "models",
        "paceline-coordinator": None,
    }  # fmt: skip


def test_a_worker_gets_its_share_and_never_shares_a_node(site: list[dict[str, Any]]) -> None:
    cluster = dask_cluster(site)
    assert cluster["spec"]["worker"]["replicas"] == 3
    _, worker = pods_of_dask(cluster)
    pod = worker["spec"]
    assert pod["nodeSelector"] == {"example.com/pool": "h100"}
    assert pod["serviceAccountName"] == "models"
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "8"},
        "limits": {"memory": "200Gi", "nvidia.com/gpu": "8"},
    }
    (agent,) = (each for each in site if each["kind"] == "DaemonSet")
    kept_off = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {each["topologyKey"] for each in kept_off} == {"kubernetes.io/hostname"}
    others = [worker["metadata"]["labels"], agent["spec"]["template"]["metadata"]["labels"]]
    for labels, each in zip(others, kept_off, strict=True):
        assert each["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_commands_of_dasks_pods_have_their_files_and_settings(
    site: list[dict[str, Any]], tmp_path: Path
) -> None:
    cluster = dask_cluster(site)
    (scheduler,) = cluster["spec"]["scheduler"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in scheduler["env"] if "DASK_" in each["name"]}
    wanted = {
        f"DASK_{key.upper().replace('.', '__').replace('-', '_')}": str(value)
        for key, value in dask_settings().items()
        if key.startswith("distributed.scheduler.")
    }
    assert given == wanted
    (worker,) = cluster["spec"]["worker"]["spec"]["containers"]
    text = "\0".join(worker["args"]).replace("$(NODE_NAME)", "node-7")
    (tmp_path / "ca.pem").touch()
    text = text.replace("$(NODE_ADDRESS)", "10.0.0.7").replace("/etc/paceline/ca/", f"{tmp_path}/")
    params = parsed(["worker", *text.split("\0")])
    assert (params["worker_id"], params["listen"]) == ("node-7", "10.0.0.7")
    assert params["scheduler"] == "tls://paceline-scheduler.ml-team.svc:8786"
    variables = {each["name"]: each.get("value") for each in worker["env"]}
    assert variables["DASK_SCHEDULER_ADDRESS"] == params["scheduler"], "the operator's is tcp://"
    mounts = [each["mountPath"] for each in worker["volumeMounts"]]
    assert str(Path(params["join_token"].removeprefix("@")).parent) in mounts
    assert str(params["state"]) in mounts


@pytest.mark.parametrize(
    ("found", "instead", "said"),
    [
        ('namespace = "ml-team"', 'namespace = "ML"', "'ML', wanted a DNS label"),
        ('namespace = "ml-team"', 'name_space = "x"', "Did you mean 'namespace'?"),
        ('memory = "200Gi"', 'memory = "200 GB"', "'200 GB', wanted a Kubernetes quantity"),
        ('image = "registry.example/all@sha256:abc"', "", "names no image"),
        ('node_network = "172.20.0.0/16"', 'node_network = "here"', "wanted a network"),
        ('join_secret = "tokens"', 'join_secret = "A b"', "wanted a Kubernetes name"),
        ('"nvidia.com/gpu" = 8', '"nvidia gpu" = 8', "wanted a Kubernetes key"),
    ],
)
def test_a_bad_profile_is_one_line_and_leaves_nothing(
    tmp_path: Path, found: str, instead: str, said: str
) -> None:
    assert found in SITE
    done = initialised(tmp_path, SITE.replace(found, instead, 1))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("found", "instead", "parts", "said"),
    [
        (
            'namespace = "ml-team"',
            'namespace = "other"',
            ["dask"],
            "wanted tls://paceline-scheduler.other.svc:8786",
        ),
        ('namespace = "ml-team"', 'namespace = "other"', ["coordinator"], "do not run in pods"),
        ('audit = "postgres"', "", ["coordinator"], "keep nothing on their disks"),
        ("", "", [], "--render all | kubectl apply"),
        ('kind = "kubernetes"', 'kind = "address"', ["dask"], "only there"),
    ],
)
def test_what_cannot_run_so_is_not_rendered(
    tmp_path: Path, found: str, instead: str, parts: list[str], said: str
) -> None:
    assert initialised(tmp_path, SITE.replace(found, instead, 1)).returncode == 0
    options = [word for part in parts for word in ("--render", part)]
    done = paceline("cluster", "--state", tmp_path / "state", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_addresses_outside_of_the_cluster_are_what_pods_get(tmp_path: Path) -> None:
    outside = SITE.replace("paceline-scheduler.ml-team.svc:8786", "dask.example:18786")
    assert initialised(tmp_path, outside, ["https://control.example:7400"]).returncode == 0
    (cluster,) = rendered(tmp_path, "dask")
    (worker,) = cluster["spec"]["worker"]["spec"]["containers"]
    assert "--coordinator=https://control.example:7400" in worker["args"]
    assert "--scheduler=tls://dask.example:18786" in worker["args"]
    assert {"name": "DASK_SCHEDULER_ADDRESS", "value": "tls://dask.example:18786"} in worker["env"]
    assert not [each for each in texts(worker) if ".svc" in each]


# qsub hands the job the variables that -v names and runs a copy of the script; pbsdsh starts one
# process for each line of the job's list of nodes, with an empty environment.
QSUB = """#!/bin/bash
while [ $# -gt 1 ]; do [ "$1" = -v ] && names=$2; shift; done
cp "$1" "$HERE/spooled"
given=(HERE="$HERE" PATH="$PATH" PBS_NODEFILE="$HERE/nodes")
for name in ${names//,/ }; do given+=("$name=${!name}"); done
exec env -i "${given[@]}" bash "$HERE/spooled"
"""
PBSDSH = """#!/bin/bash
test "$1" = --; shift
while read -r node; do
  mkdir -p "$HERE/$node"
  printf '#!/bin/sh\\necho %s\\n' "$node" > "$HERE/$node/hostname"
  chmod +x "$HERE/$node/hostname"
  (cd "$HERE/$node" && env -i PATH="$HERE/$node:/usr/bin:/bin" "$@") || exit 1
done < "$PBS_NODEFILE"
"""
PACELINE = """#!/bin/sh
if [ "$1" = tokens ]; then echo "token of $4"; exit; fi
printf '%s\\n' "$@" > called
cat state/dask-tls/ca.pem >> called
"""


@pytest.fixture
def pbs(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a control host with stand-ins for PBS and Paceline."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"qsub": QSUB, "pbsdsh": PBSDSH, "paceline": PACELINE}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".paceline" / "dask-tls").mkdir(parents=True)
    (tmp_path / ".paceline" / "dask-tls" / "ca.pem").write_text("the authority")
    (tmp_path / "deployments").symlink_to(ROOT)
    (tmp_path / "nodes").write_text("cn01\ncn02\n")
    return {
        "HERE": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin", "NODES": "cn01 cn02",
        "PACELINE_BIN": str(programs), "PACELINE_SHARED": str(tmp_path / "shared"),
        "PACELINE_STATE": "state", "PACELINE_COORDINATOR": "https://control:7400",
        "PACELINE_SCHEDULER": "tls://control:8786",
    }  # fmt: skip


def submitted(environment: dict[str, str], where: Path) -> subprocess.CompletedProcess[str]:
    """Type the page's block."""
    typed = commands("how-to/train-on-a-fleet.md")["pbs"]
    return subprocess.run(
        ["bash", "-ec", typed], env=environment, cwd=where,
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip


def test_a_job_of_pbs_starts_a_worker_on_each_node(pbs: dict[str, str], tmp_path: Path) -> None:
    done = submitted(pbs, tmp_path)
    assert done.returncode == 0, done.stderr
    for node in ("cn01", "cn02"):
        *words, copied = (tmp_path / node / "called").read_text().splitlines()
        assert copied == "the authority"
        params = parsed(words)
        assert (words[0], params["worker_id"], params["host"]) == ("worker", node, node)
        token = Path(params["join_token"].removeprefix("@"))
        assert token.read_text() == f"token of {node}\n"
        assert params["coordinator_url"] == pbs["PACELINE_COORDINATOR"]
        assert params["scheduler"] == pbs["PACELINE_SCHEDULER"]
    text = (ROOT / "pbs" / "paceline.pbs").read_text()
    assert re.findall(r"(?m)^#PBS -l place=(.*)$", text) == ["scatter:excl"], "whole nodes"


def test_a_job_of_pbs_without_a_setting_names_it(pbs: dict[str, str], tmp_path: Path) -> None:
    del pbs["PACELINE_SCHEDULER"]
    done = submitted(pbs, tmp_path)
    assert done.returncode != 0
    assert "PACELINE_SCHEDULER" in done.stderr
    assert not (tmp_path / "cn01").exists()
