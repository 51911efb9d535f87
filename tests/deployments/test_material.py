"""Units and manifests: what they start exists, what they refer to fits together."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from paceline.api import ROUTES
from paceline.cli import cli
from paceline.config import load_profile
from paceline.errors import InvalidInput
from tests.journeys.guide import commands

ROOT = Path(__file__).resolve().parents[2] / "deployments"
UNITS = sorted((ROOT / "systemd").glob("*.service"))
OURS = [each for each in UNITS if "bin/paceline " in each.read_text().split("ExecStart=")[1]]
STAY = [each for each in UNITS if "Type=exec" in each.read_text()]
MANIFESTS = sorted((ROOT / "kubernetes").glob("*.yaml"))
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")


def unit(path: Path) -> dict[str, list[str]]:
    """Return a unit's settings; a key may stand several times."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def parsed(words: list[str]) -> dict[str, Any]:
    """Return what `paceline` understands of a command line; raises for what it does not."""
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return command.make_context(words[0], words[1:]).params


def documents() -> list[dict[str, Any]]:
    return [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]


def pods_of_dask(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of scheduler and worker, with the labels that the Dask operator adds."""
    name, made = cluster["metadata"]["name"], []
    for role in ("scheduler", "worker"):
        part = cluster["spec"][role]
        labels = cluster["metadata"]["labels"] | part["metadata"]["labels"]
        labels |= {"dask.org/cluster-name": name, "dask.org/component": role}
        metadata = {"name": f"{name}-{role}", "labels": labels}
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": part["spec"]})
    return made


def workload(component: str) -> dict[str, Any]:
    (found,) = (
        each
        for each in documents()
        if each["kind"] in WORKLOADS and each["metadata"]["name"] == f"paceline-{component}"
    )
    return found


def test_the_material_is_there() -> None:
    assert [each.name for each in UNITS] == [
        "paceline-agent@.service",
        "paceline-backup.service",
        "paceline-coordinator.service",
        "paceline-mlflow.service",
        "paceline-prefect-worker.service",
        "paceline-prefect.service",
    ]
    assert [each.name for each in MANIFESTS] == [
        "agent.yaml",
        "coordinator.yaml",
        "dask.yaml",
        "network.yaml",
        "prefect-worker.yaml",
    ]


@pytest.mark.parametrize("path", OURS, ids=lambda each: each.name)
def test_a_unit_starts_a_command_with_options_that_it_has(path: Path) -> None:
    (start,) = unit(path)["ExecStart"]
    filled = start.replace("%i", "node-7").replace("%H", "host-7").replace("%d", "/run/credentials")
    given = {
        "${PACELINE_COORDINATOR}": "https://c.example:8443",
        "$PACELINE_OPTIONS": "--rack r3 --link-mbit 10000 --listen 10.0.0.7:7070",
        "${PACELINE_HOST}": "10.0.0.1",
        "${PACELINE_PORT}": "8443",
        "${PACELINE_ADVERTISE}": "https://c1.example:8443",
    }
    for name, value in given.items():
        filled = filled.replace(name, value)
    assert "$" not in filled
    words = shlex.split(filled)
    assert words[0].endswith("/paceline")
    params = parsed(words[1:])
    state = unit(path)["StateDirectory"][0]
    assert params["state"] == Path("/var/lib") / state, "the only place that it may write"
    if words[1] == "agent":
        assert params["worker_id"] == "node-7"
        # the node's Dask worker adopts it by this very word on its command line
        assert "node-7" in words


@pytest.mark.parametrize("path", ["prefect", "mlflow"])
def test_a_server_starts_as_its_page_says_after_the_check_of_its_settings(path: str) -> None:
    settings = unit(ROOT / "systemd" / f"paceline-{path}.service")
    (check,) = settings["ExecStartPre"]
    assert parsed(shlex.split(check)[1:])["servers"] is True
    typed = commands("how-to/run-the-control-plane.md")[path].splitlines()[-1]
    assert settings["ExecStart"] == [typed.replace("exec ", "/opt/paceline/bin/")]
    assert settings["EnvironmentFile"] == [f"/etc/paceline/{path}.env"]


@pytest.mark.parametrize("path", STAY, ids=lambda each: each.name)
def test_a_unit_is_hardened_and_gives_up_on_what_restarts_cannot_mend(path: Path) -> None:
    settings = unit(path)
    wanted = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes",
        "PrivateTmp": "yes", "PrivateDevices": "yes", "CapabilityBoundingSet": "",
        "RestrictNamespaces": "yes", "LockPersonality": "yes", "UMask": "0077",
        "StateDirectoryMode": "0700", "Restart": "always",
    }  # fmt: skip
    assert {key: settings[key][0] for key in wanted} == wanted
    assert settings["RestartPreventExitStatus"] == [str(InvalidInput.exit_code)]
    assert settings["User"][0] != "root"
    for key, values in settings.items():
        for value in values:
            assert "TOKEN=" not in value.upper(), f"a secret in {key} is in everybody's list"


@pytest.mark.services
@pytest.mark.parametrize("path", UNITS, ids=lambda each: each.name)
def test_systemd_finds_nothing_wrong_with_a_unit(path: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        reason = "needs systemd-analyze (Debian's systemd)"
        if "systemd" in os.environ.get("PACELINE_REQUIRE", ""):
            pytest.fail(reason)
        pytest.skip(reason)
    copy = tmp_path / path.name.replace("@.", "@node-7.")
    program = tmp_path / "paceline"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy.write_text(re.sub(r"/opt/paceline/bin/\w+", str(program), path.read_text()))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda each: each.name)
def test_kubernetes_accepts_a_manifest(path: Path, version: str) -> None:
    for each in yaml.safe_load_all(path.read_text()):
        for checked in pods_of_dask(each) if each["kind"] == "DaskCluster" else [each]:
            kubernetes_validate.validate(checked, version, strict=True)


def test_files_of_the_stores_that_a_profile_names_are_mounted() -> None:
    (container,) = workload("coordinator")["spec"]["template"]["spec"]["containers"]
    places = {each["mountPath"] for each in container["volumeMounts"]}
    control = load_profile("fleet-1000").control
    for name in filter(None, (control.etcd_ca, control.etcd_cert, control.etcd_key)):
        assert str((Path("/var/lib/paceline") / name).parent) in places, name


def test_policies_open_the_ports_of_servers_and_no_other() -> None:
    policies = {
        each["metadata"]["name"].removeprefix("paceline-"): each["spec"]
        for each in documents()
        if each["kind"] == "NetworkPolicy"
    }
    assert policies.pop("deny") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    (dask,) = (each for each in documents() if each["kind"] == "DaskCluster")
    pods = {
        "coordinator": workload("coordinator")["spec"]["template"],
        "scheduler": pods_of_dask(dask)[0],
    }
    opened = {}
    for name, policy in policies.items():
        (rule,) = policy["ingress"]
        (port,) = rule["ports"]
        opened[name] = port["port"]
        if name in pods:
            wanted = policy["podSelector"]["matchLabels"].items()
            assert wanted <= pods[name]["metadata"]["labels"].items()
            ports = pods[name]["spec"]["containers"][0]["ports"]
            (opened[name],) = (
                each["containerPort"] for each in ports if each["name"] == port["port"]
            )
        clients = [
            each["podSelector"]["matchLabels"] for each in rule["from"] if "ipBlock" not in each
        ]
        flows = workload("prefect-worker")["spec"]["template"]["metadata"]["labels"]
        assert any(each.items() <= flows.items() for each in clients), "flows reach it"
    assert opened == {"coordinator": 8443, "scheduler": 8786, "prefect": 4200, "mlflow": 5000}


@pytest.mark.parametrize("component", ["coordinator", "agent"])
def test_a_workload_starts_a_command_with_options_that_it_has(
    component: str, tmp_path: Path
) -> None:
    (container,) = workload(component)["spec"]["template"]["spec"]["containers"]
    environment = {each["name"] for each in container["env"]}
    text = "\0".join(container["args"])
    assert set(re.findall(r"\$\((\w+)\)", text)) <= environment
    filled = text.replace("$(NODE_ADDRESS)", "10.0.0.7")
    filled = re.sub(r"\$\(\w+\)", "name-0", filled)
    (tmp_path / "ca.pem").touch()  # the one file that must be there for the options to be read
    words = filled.replace("--ca=/etc/paceline/", f"--ca={tmp_path}/").split("\0")
    params = parsed([*container["command"][1:], *words])
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert str(params["state"]) in mounts
    assert not mounts[str(params["state"])].get("readOnly")
    if component == "agent":
        assert params["listen"] == "10.0.0.7:7070"
        assert params["ca"] == tmp_path / "ca.pem"
        assert "/etc/paceline" in mounts
        # the node's Dask worker adopts it by this very word on its command line
        assert "$(NODE_NAME)" in container["args"]


@pytest.mark.parametrize("component", ["coordinator", "agent", "prefect-worker"])
def test_a_workload_fits_together_and_may_do_little(component: str) -> None:
    found = workload(component)
    spec, template = found["spec"], found["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    fits_together(template["spec"])


def test_dasks_pods_fit_together_and_may_do_little() -> None:
    (found,) = (each for each in documents() if each["kind"] == "DaskCluster")
    for each in pods_of_dask(found):
        fits_together(each["spec"])


def fits_together(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    inner = container["securityContext"]
    assert inner["allowPrivilegeEscalation"] is False
    assert inner["readOnlyRootFilesystem"] is True
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    assert "memory" in container["resources"]["limits"]
    names = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(kind, {})
        if (asked := probe.get("httpGet")) is not None:
            assert asked["port"] in names
            if asked["port"] == "https":
                assert ROUTES["GET", asked["path"]].is_open, "a probe has no token"
        elif (asked := probe.get("tcpSocket")) is not None:
            assert asked["port"] in names
    for each in container["env"]:
        secret = re.search("TOKEN|SECRET|PASSW|KEY|AUTH", each["name"])
        assert "valueFrom" in each or not secret, "a secret by reference, never by value"


def test_the_service_leads_to_the_replicas_and_most_of_them_stay() -> None:
    kinds = {each["kind"]: each for each in documents()}
    service, budget, replicas = (
        kinds["Service"], kinds["PodDisruptionBudget"], workload("coordinator"),
    )  # fmt: skip
    labels = replicas["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert replicas["spec"]["serviceName"] == service["metadata"]["name"]
    assert replicas["spec"]["replicas"] in (3, 5)
    assert budget["spec"]["maxUnavailable"] == 1
    container = replicas["spec"]["template"]["spec"]["containers"][0]
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}
    (agent,) = workload("agent")["spec"]["template"]["spec"]["containers"]
    name = f"{replicas['metadata']['name']}-0.{service['metadata']['name']}"
    url = f"https://{name}.{service['metadata']['namespace']}.svc:{port['port']}"
    assert f"--coordinator={url}" in agent["args"]


def test_node_images_install_the_base_and_coordinators_the_stores_too() -> None:
    text = (ROOT / "Containerfile").read_text()
    assert re.findall(r"(?m)^ARG LOCKS=(.*)$", text) == ['"base"']
    built = re.findall(r"-t (\S+) (?:--build-arg LOCKS=\"(.*)\" )?\.", text)
    images = {
        each: workload(each)["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in ("agent", "coordinator", "prefect-worker")
    }
    everything = "base train torch flows stores sweeps"
    assert dict(built) == {
        images["agent"]: "", images["coordinator"]: "base stores",
        images["prefect-worker"]: everything,
    }  # fmt: skip
    (dask,) = (each for each in documents() if each["kind"] == "DaskCluster")
    for pod in pods_of_dask(dask):
        assert pod["spec"]["containers"][0]["image"] == images["prefect-worker"]
    for each in everything.split():
        assert (ROOT.parent / "requirements" / f"{each}.lock").is_file()
