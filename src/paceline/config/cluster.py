"""Section ``[cluster]`` of a profile: machines of one's own, over SSH, in Slurm or Kubernetes."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import (
    Field,
    StringConstraints,
    field_validator,
)

from paceline.config.base import Settings, matching


class HostSettings(Settings):
    """A machine on which `paceline cluster` starts a worker over SSH."""

    ssh: Annotated[str, StringConstraints(pattern=r"^[^-\s]\S*$")]  # as ssh takes it: [USER@]HOST
    worker_id: str  # its name in the fleet, unique
    rack: str = ""  # plans cross a rack's uplink as rarely as they can
    zone: str = ""  # a room or site, above racks
    state: str = "paceline-state"  # its state directory, from its user's home
    program: str = "paceline"  # where its PATH does not have it: the path


class SlurmTeam(Settings):
    """What a team's training jobs ask Slurm for; "": as the profile says."""

    partition: str = ""  # what sbatch takes as --partition
    account: str = ""  # what sbatch takes as --account: who pays
    qos: str = ""  # what sbatch takes as --qos


class SlurmSettings(Settings):
    """The allocations that are requested of Slurm; "" leaves a choice to Slurm."""

    # false: `paceline cluster` requests one of cluster.nodes nodes, and training jobs share it;
    # true: the coordinator requests one for each training job, and Slurm's queue is theirs.
    per_job: bool = False
    teams: dict[str, SlurmTeam] = {}  # of training jobs, with per_job
    partition: str = ""  # what sbatch takes as --partition
    account: str = ""  # what sbatch takes as --account: who pays
    qos: str = ""  # what sbatch takes as --qos
    time_limit: str = ""  # as sbatch takes it: 2-00:00:00
    # More of sbatch's options, such as "--gpus-per-node=8".
    options: tuple[Annotated[str, StringConstraints(pattern=r"^--[a-z]")], ...] = ()
    state: str = "paceline-state"  # the nodes' state directory, from the user's home there
    program: str = "paceline"  # where the PATH of the control host does not lead to it: the path


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DnsLabel = Annotated[
    str, matching(_LABEL, "a DNS label: at most 63 of a-z, 0-9 and -, no - at its ends")
]
DnsName = Annotated[
    str, matching(rf"{_LABEL}(\.{_LABEL})*", "a Kubernetes name: a-z, 0-9, - and . inside")
]
Image = Annotated[
    str, matching(r"([a-z0-9][^\s]*)?", "an image such as registry.example/paceline:0.1.0")
]
Quantity = Annotated[
    str,
    Field(coerce_numbers_to_str=True),
    matching(
        r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?", "a Kubernetes quantity such as 64Gi or 500m"
    ),
]
LabelKey = Annotated[
    str,
    matching(
        r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
        "a Kubernetes key such as nvidia.com/gpu",
    ),
]


class KubernetesSettings(Settings):
    """What `paceline cluster --render` fills into the manifests of deployments/kubernetes."""

    namespace: DnsLabel = "paceline"  # of everything but nodes
    # Kueue's LocalQueue: each training job is a pod group of its own there; "": all share the
    # workers of the DaskCluster.
    queue: DnsName | Literal[""] = ""
    queues: dict[str, DnsName] = {}  # of teams
    image: Image = ""  # of workers, scheduler, Prefect worker; required by kind = "kubernetes"
    agent_image: Image = ""  # "": image
    coordinator_image: Image = ""  # "": image
    node_selector: dict[LabelKey, str] = {"paceline.dev/training": "true"}  # nodes with a worker
    # Of each worker, such as {cpu = "16", memory = "200Gi", "nvidia.com/gpu" = 8}.
    resources: dict[LabelKey, Quantity] = {"cpu": "1", "memory": "4Gi"}
    service_account: DnsName = "default"  # of what reads from S3: a role may be bound to it
    # Secrets: Dask's TLS files, a join token for each node, and credentials for S3.
    # the Secret with Dask's TLS files
    dask_tls_secret: DnsName = "paceline-dask-tls"  # noqa: S105 (a Secret's name)
    # the Secret with a join token for each node
    join_secret: DnsName = "paceline-join"  # noqa: S105
    # the Secret with credentials for S3
    objects_secret: DnsName = "paceline-objects"  # noqa: S105
    ca_config_map: DnsName = "paceline-coordinator-ca"  # the ConfigMap with the coordinator's CA
    node_network: str = "10.0.0.0/8"  # of the nodes, as policies name it

    @field_validator("node_network")
    @classmethod
    def _is_network(cls, value: str) -> str:
        try:
            return str(ip_network(value))
        except ValueError as error:
            raise ValueError("a network such as 10.0.0.0/8") from error


class ClusterSettings(Settings):
    """The machines: where Dask's scheduler is; and of ``local`` number, racks, links, memory."""

    # local: `paceline up` starts the nodes below on this machine; address: workers that their own
    # operators start register with the Dask scheduler at ``scheduler``; ssh: `paceline cluster`
    # starts that scheduler and a worker on each of ``hosts``; slurm: it does so on each node of one
    # allocation of ``nodes`` whole nodes; kubernetes: Dask's operator starts the scheduler and a
    # worker on each of ``nodes`` nodes, by what `paceline cluster --render` prints.
    # With slurm.per_job or kubernetes.queue each training job gets nodes of its own there.
    kind: Literal["local", "address", "ssh", "slurm", "kubernetes"] = "local"
    # tls://HOST:PORT of kind = "address"; "": none
    scheduler: Annotated[str, StringConstraints(pattern=r"^(tls://[^/]+:[0-9]+)?$")] = ""
    hosts: tuple[HostSettings, ...] = ()  # the machines of kind = "ssh"
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    nodes: int = Field(default=4, ge=1, le=10_000)  # of kinds local, slurm and kubernetes
    racks: int = Field(default=2, ge=1)  # that a local installation's nodes are divided into
    threads_per_node: int = Field(default=2, ge=1)  # tasks of Dask's that a node runs at once
    link_mbit: float = Field(default=80.0, gt=0)  # each agent's NIC, each direction
    paced: bool = False  # agents limit themselves to link_mbit; false: the NICs are the limit
    external_mbit: float | None = Field(default=None, gt=0)  # the origin's link; None: link_mbit
    oversubscription: float = Field(default=1.0, ge=1)  # of each rack's uplink
    node_memory_mb: int = Field(default=0, ge=0)  # 0: no limit

    @property
    def per_job(self) -> bool:
        """Return whether each training job gets its nodes from Slurm or Kubernetes by itself."""
        return bool(
            {"slurm": self.slurm.per_job, "kubernetes": self.kubernetes.queue}.get(self.kind)
        )
