"""Workers on other machines: over SSH, in a Slurm allocation, or in Kubernetes.

Begin with ``workers``: it starts one host's worker through any command that runs a shell there.
``commands`` runs Slurm's commands and
reads their answers. In Kubernetes the Dask operator starts them, by what ``kubernetes`` renders.
"""

from paceline.cluster.remote.commands import SlurmJob, run_command, sbatch, slurm_prefix, squeue
from paceline.cluster.remote.kubernetes import PARTS, pod_group, render
from paceline.cluster.remote.slurm import batch_argv, serve_allocation, serve_job_allocations
from paceline.cluster.remote.workers import serve_hosts

__all__ = [
    "PARTS",
    "SlurmJob",
    "batch_argv",
    "pod_group",
    "render",
    "run_command",
    "sbatch",
    "serve_allocation",
    "serve_hosts",
    "serve_job_allocations",
    "slurm_prefix",
    "squeue",
]
