"""Kubernetes as the engine of jobs: one group of pods a gang, which Kueue admits together.

Each pod runs a worker on a node of its own. Calls ``kubectl`` of the coordinator's machine. Not run
on a cluster so far: what is applied is checked by schemas, and ``standing`` by answers written
after the documentation of Kubernetes and Kueue.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.cluster import pod_group, run_command
from paceline.config import Runtime
from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.jobs.engines.contract import (
    ForeignEngine,
    Request,
    Standing,
    nodes_of,
    on_nodes,
)
from paceline.jobs.placement import Host
from paceline.jobs.preemption import Reservation
from paceline.schemas import JobAllocation
from paceline.text import printable

log = logging.getLogger(__name__)

COMMAND_S = 10.0
JOB_LABEL = "paceline.dev/job"
REFUSED = ("invalid", "Invalid", "forbidden", "Forbidden", "denied")  # in kubectl's errors
PASSING = "exceeded quota"  # in those that pass: others hold the namespace's ResourceQuota
INSTEAD = {
    "priority": "another LocalQueue, or a priority class of Kueue",
    "resources.within": "a LocalQueue whose flavor has that topology",
    "resources.memory_bytes": "resources.accelerator",
    "resources.capacity": "resources.queue, the name of a LocalQueue",
    "resources.node_labels": "resources.queue, the name of a LocalQueue",
}
Pods = Sequence[Mapping[str, Any]]


class KubernetesEngine(ForeignEngine):
    """Applies, reads and deletes one group of pods for each training job."""

    name, instead = "Kubernetes", INSTEAD

    def __init__(self, runtime: Runtime, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(runtime, monotonic)
        self._pods: dict[str, Pods] = {}  # by training job
        self._waits: dict[str, str] = {}  # group → why Kueue has not admitted it

    def submit(self, request: Request) -> None:
        """Apply the group of pods of a training job that has none, or what its group lacks: a
        command that was interrupted has applied a part."""
        job_id = request.job.job_id
        if not self._may_ask(job_id):
            return
        pods = self._pods.get(job_id, ())
        if is_over(pods) or len(pods) >= nodes_of(request):
            return
        self._require_supported(request)
        group, there = _group(pods) if pods else "", {each["metadata"]["name"] for each in pods}
        whole = rendered(request, self._runtime, group, self._avoid.get(job_id, ()))
        made = [each for each in whole if each["metadata"]["name"] not in there]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
        applied = self._ask(job_id, lambda: self._kubectl("apply", "--filename=-", sent=text))
        if applied is None:
            return
        log.info("%s requests %d nodes as pods", job_id, len(made))
        self._pods[job_id] = [*pods, *made]

    def status(
        self,
        hosts: Sequence[Host],
        waiting: Sequence[Request],
        running: Sequence[Reservation],
        now: float,  # noqa: ARG002
    ) -> Mapping[str, Standing]:
        """Return where each job stands, by the last answer; {} before the first one."""
        requests = {each.job.job_id: each for each in waiting}
        held = {each.gang.job_id: each for each in running}
        if not self._end_round(waiting):
            return {}
        alive, found = {each.name: each for each in hosts}, {}
        for job_id, pods in self._pods.items():
            if (request := requests.get(job_id)) is not None:
                stands = standing(pods, request, alive, self._waits)
                found[job_id] = self._stands(job_id, stands)
                if is_over(pods):  # its remains go; then another group is applied
                    self.cancel(job_id)
            elif job_id in held:
                found[job_id] = held_standing(pods, held[job_id].hosts)
            else:
                found[job_id] = Standing(phase="waiting")
        gone = Standing(phase="revoked", reason="its pods are gone")
        return dict.fromkeys(held.keys() - self._pods.keys(), gone) | found

    def cancel(self, job_id: str) -> None:
        """Delete the pods of a training job, once."""
        pods = [each["metadata"] for each in self._pods.get(job_id, ())]
        if all(each.get("deletionTimestamp") for each in pods):
            return
        label = f"--selector={JOB_LABEL}={job_id}"
        try:
            self._kubectl("delete", "pods", label, "--wait=false")
        except (InvalidInput, ServiceUnavailable) as error:
            log.warning("the pods of %s are not deleted yet: %s", job_id, error)
            return
        for each in pods:  # until they are read again, and then their own
            each["deletionTimestamp"] = "now"

    def _queues(self) -> tuple[str, Mapping[str, str]]:
        settings = self._runtime.profile.cluster.kubernetes
        return settings.queue, settings.queues

    def _fetch(self) -> None:
        pods = defaultdict(list)
        for each in self._items("pods", f"--selector={JOB_LABEL}"):
            pods[each["metadata"]["labels"][JOB_LABEL]].append(each)
        self._waits = waits_of(self._items("workloads.kueue.x-k8s.io"))
        self._pods = dict(pods)

    def _items(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._kubectl("get", *words, "--output=json"))[
            "items"
        ]
        return found

    def _kubectl(self, *words: str, sent: str = "") -> str:
        namespace = f"--namespace={self._runtime.profile.cluster.kubernetes.namespace}"
        argv = ("kubectl", namespace, *words)
        code, out, err = run_command(
            *argv, sent=sent, timeout_s=COMMAND_S, environment="Kubernetes"
        )
        if code == 0:
            return out
        why = printable(err.strip().replace("\n", "; "), 300)
        is_refused = sent and PASSING not in err and any(each in err for each in REFUSED)
        kind = InvalidInput if is_refused else ServiceUnavailable
        raise kind("kubectl cannot do it", got=why, where=" ".join(argv))


def rendered(
    request: Request, runtime: Runtime, group: str = "", avoid: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the pods of a job: in the job's own queue, else its team's, else the profile's.

    They are of ``group``, by default one for each attempt, and on no node of ``avoid``.
    """
    settings, job = runtime.profile.cluster.kubernetes, request.job
    asked = job.spec.resources
    queue = asked.queue or settings.queues.get(job.spec.team) or settings.queue
    labels = {JOB_LABEL: job.job_id, "paceline.dev/team": job.spec.team}
    group = group or f"{job.job_id}-{job.attempt + 1}"
    pods = pod_group(runtime, group, labels, nodes_of(request), queue)
    for each in pods if asked.time_limit_s else ():
        each["spec"]["activeDeadlineSeconds"] = math.ceil(asked.time_limit_s)
    if asked.accelerator:  # nodes say their GPU's kind by this label of NVIDIA's GPU operator
        for each in pods:
            each["spec"]["nodeSelector"] |= {"nvidia.com/gpu.product": asked.accelerator}
    for each in pods if avoid else ():
        apart = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
        each["spec"]["affinity"]["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [apart]}]
            }
        }
    return pods


def is_over(pods: Pods) -> bool:
    """Return whether some pod has ended or is deleted: the group never runs as a whole again."""
    return any(
        each["metadata"].get("deletionTimestamp") or _phase(each) in ("Failed", "Succeeded")
        for each in pods
    )


def standing(
    pods: Pods, request: Request, alive: Mapping[str, Host], waits: Mapping[str, str]
) -> Standing:
    """Return where a waiting job stands; ``waits`` says why Kueue has not admitted a group."""
    group, states = _group(pods), sorted({_phase(each) for each in pods})
    said = f"pod group {group} is {', '.join(states)}"
    why = next(filter(None, map(_pending_reason, pods)), "")
    why = waits.get(group) or why
    allocation = JobAllocation(
        engine="kubernetes", id=group, state=", ".join(states), reason=why[:500]
    )
    if is_over(pods):
        return Standing(phase="waiting", reason=f"{said}; its pods are being deleted")
    if len(pods) < nodes_of(request):
        why = f"{said}: {len(pods)} of {nodes_of(request)} pods are there; the others are applied"
        return Standing(phase="waiting", reason=why, allocation=allocation)
    if states != ["Running"]:
        reason = f"{said}: {why}" if why else said
        return Standing(phase="waiting", reason=reason, allocation=allocation)
    nodes = [each["spec"]["nodeName"] for each in pods]
    if away := [each for each in nodes if each not in alive]:
        why = f"{said}; waiting for the workers of {', '.join(away[:5])}"
        return Standing(phase="waiting", reason=why, allocation=allocation)
    return on_nodes(nodes, said, request, alive, allocation)


def held_standing(pods: Pods, hosts: Mapping[str, int]) -> Standing:
    """Return where a job stands that was granted ``hosts``."""
    running = {each["spec"].get("nodeName") for each in pods if _phase(each) == "Running"}
    if is_over(pods) or not hosts.keys() <= running:
        return Standing(phase="revoked", reason=f"pod group {_group(pods)} was evicted")
    allocation = JobAllocation(engine="kubernetes", id=_group(pods), state="Running")
    return Standing(phase="granted", allocation=allocation)


def waits_of(workloads: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return why groups are not admitted: what their workloads, which have their names, say."""
    found = {}
    for each in workloads:
        for condition in each.get("status", {}).get("conditions", []):
            if condition["type"] == "QuotaReserved" and condition["status"] != "True":
                found[each["metadata"]["name"]] = str(condition.get("message", ""))
    return found


def _group(pods: Pods) -> str:
    return str(pods[0]["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"])


def _phase(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _pending_reason(pod: Mapping[str, Any]) -> str:
    """Return why the scheduler has not placed a pod."""
    for each in pod.get("status", {}).get("conditions", []):
        if each["type"] == "PodScheduled" and each["status"] != "True":
            return f"{each.get('reason', '')}: {each.get('message', '')}"
    return ""
