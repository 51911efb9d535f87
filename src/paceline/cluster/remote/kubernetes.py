"""Kubernetes manifests of an installation: `[cluster] kind = "kubernetes"`.

The files of deployments/kubernetes are complete and hold defaults; ``render`` puts what the profile
and the installation's addresses say in their place. It calls no cluster: the output is for
``kubectl apply``. The Dask operator then starts the scheduler and the workers. ``pod_group`` are
the same workers as pods of one training job, which Kueue admits together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import KubernetesSettings, Runtime
from paceline.errors import InvalidInput

PARTS = ("network", "coordinator", "agent", "dask", "prefect-worker")
_NAMESPACE = KubernetesSettings().namespace  # of the files, as all that ``render`` replaces
_COORDINATOR = f"https://paceline-coordinator-0.paceline-coordinator.{_NAMESPACE}.svc:8443"
_SCHEDULER = f"tls://paceline-scheduler.{_NAMESPACE}.svc:8786"
_READ_FROM_S3 = ("agent", "worker", "prefect-worker")  # containers


def render(runtime: Runtime, parts: Sequence[str]) -> str:
    """Return the YAML documents of ``parts`` (of PARTS) for this installation.

    Raises InvalidInput where the profile cannot run so.
    """
    import yaml

    _require_runnable(runtime, parts)
    place = _directory()
    documents = [
        _filled_in(runtime, document)
        for part in dict.fromkeys(parts)
        for document in yaml.safe_load_all((place / f"{part}.yaml").read_text())
    ]
    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=100)
    return text


def pod_group(
    runtime: Runtime, group: str, labels: Mapping[str, str], nodes: int, queue: str
) -> list[dict[str, Any]]:
    """Return the pods of one group: a worker on each of ``nodes`` nodes, all or none, once Kueue's
    LocalQueue ``queue`` admits them. They have ``labels``."""
    import yaml

    (cluster,) = yaml.safe_load_all((_directory() / "dask.yaml").read_text())
    worker = _filled_in(runtime, cluster)["spec"]["worker"]
    own = {"app.kubernetes.io/name": "paceline", **worker["metadata"]["labels"], **labels}
    spec = worker["spec"]
    # The DaskCluster's labels are the operator's; these pods keep off each other by their own.
    apart = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    apart[0]["labelSelector"]["matchLabels"] = dict(worker["metadata"]["labels"])
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{group}-{number}",
                "namespace": runtime.profile.cluster.kubernetes.namespace,
                "labels": {
                    **own,
                    "kueue.x-k8s.io/queue-name": queue,
                    "kueue.x-k8s.io/pod-group-name": group,
                },
                "annotations": {
                    "kueue.x-k8s.io/pod-group-total-count": str(nodes),
                    # a lost pod ends the group: the job asks for another one
                    "kueue.x-k8s.io/retriable-in-group": "false",
                },
            },
            "spec": copy.deepcopy(spec),
        }
        for number in range(nodes)
    ]


def _directory() -> Path:
    """Return where the manifests are: in the source tree, or in the wheel."""
    package = Path(__file__).resolve().parents[2]
    tree = package.parents[1] / "deployments" / "kubernetes"
    return tree if tree.is_dir() else package / "_kubernetes"


def _filled_in(runtime: Runtime, document: dict[str, Any]) -> dict[str, Any]:
    cluster, settings = runtime.profile.cluster, runtime.profile.cluster.kubernetes
    defaults = KubernetesSettings()
    names = ("dask_tls_secret", "join_secret", "objects_secret", "ca_config_map", "node_network")
    whole = {getattr(defaults, each): getattr(settings, each) for each in names} | {
        "paceline-train:0.1.0": settings.image,
        "paceline:0.1.0": settings.agent_image or settings.image,
        "paceline-coordinator:0.1.0": settings.coordinator_image or settings.image,
    }
    inside = {
        _COORDINATOR: runtime.endpoints.coordinator_url,
        _SCHEDULER: runtime.endpoints.scheduler_address,
        f".{_NAMESPACE}.svc": f".{settings.namespace}.svc",
    }
    made: dict[str, Any] = _replaced(document, whole, inside)
    made["metadata"]["namespace"] = settings.namespace
    spec = made["spec"]
    if made["kind"] == "DaskCluster":
        spec["worker"]["replicas"] = 0 if cluster.per_job else cluster.nodes
        pod = spec["worker"]["spec"]
        pod["nodeSelector"] = dict(settings.node_selector)
        (container,) = pod["containers"]
        container["resources"] = _resources(settings.resources)
    elif made["kind"] == "StatefulSet":
        spec["replicas"] = len(runtime.endpoints.coordinator_urls)
    for pod in _pods(spec):
        if pod["containers"][0]["name"] in _READ_FROM_S3:
            pod["serviceAccountName"] = settings.service_account
    return made


def _replaced(value: Any, whole: Mapping[str, str], inside: Mapping[str, str]) -> Any:
    """Return ``value`` with strings that are keys of ``whole``, and parts of ``inside``, changed.

    Only the first key of ``inside`` that a string has is replaced: later ones may be in its value.
    """
    if isinstance(value, dict):
        return {key: _replaced(each, whole, inside) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, whole, inside) for each in value]
    if not isinstance(value, str) or value in whole:
        return whole.get(value, value) if isinstance(value, str) else value
    found = next((each for each in inside if each in value), None)
    return value.replace(found, inside[found]) if found else value


def _resources(asked: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return requests and limits: of all but CPU, whose limit would slow a worker for nothing."""
    return {
        "requests": dict(asked),
        "limits": {key: value for key, value in asked.items() if key != "cpu"},
    }


def _pods(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specifications of a workload or a DaskCluster."""
    held = [spec.get("template"), spec.get("worker"), spec.get("scheduler")]
    return [each["spec"] for each in held if each]


def _require_runnable(runtime: Runtime, parts: Sequence[str]) -> None:
    """Raise InvalidInput where an address names no Service of these manifests, or a store a disk.

    An address outside of the cluster (without ``.svc``) is a site's own way to the same port.
    """
    settings, control = runtime.profile.cluster.kubernetes, runtime.profile.control
    within = f".{settings.namespace}.svc"
    urls = runtime.endpoints.coordinator_urls
    replicas = tuple(
        _COORDINATOR.replace("-0.", f"-{n}.").replace(f".{_NAMESPACE}.svc", within)
        for n in range(len(urls))
    )
    scheduler = _SCHEDULER.replace(f".{_NAMESPACE}.svc", within)
    address = runtime.endpoints.scheduler_address
    if "dask" in parts and ".svc" in address and address != scheduler:
        raise InvalidInput(
            "the scheduler's address is not of the profile's namespace",
            got=f"cluster.scheduler = {address}",
            wanted=scheduler,
            do="Make the directory with `paceline init` and that address.",
        )
    if "coordinator" not in parts:
        return
    if urls != replicas:
        raise InvalidInput(
            "these coordinators do not run in pods",
            got=", ".join(urls),
            wanted=", ".join(replicas),
            do="Render the other parts, or make the directory with `paceline init` and these URLs.",
        )
    if (control.coordination, control.audit) != ("etcd", "postgres"):
        raise InvalidInput(
            "coordinators in pods keep nothing on their disks",
            got=f'[control] coordination = "{control.coordination}", audit = "{control.audit}"',
            wanted='coordination = "etcd" and audit = "postgres"',
            do="Name these stores in the profile, or run the coordinator outside.",
        )
