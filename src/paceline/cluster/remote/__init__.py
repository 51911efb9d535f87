"""Workers on other machines: over SSH, in a Slurm allocation, or in Kubernetes.

Begin with ``workers``: it starts one host's worker through any command that runs a shell there.
In Kubernetes the Dask operator starts them, by what ``kubernetes`` renders.
"""

from paceline.cluster.remote.kubernetes import PARTS, render
from paceline.cluster.remote.slurm import serve_allocation
from paceline.cluster.remote.ssh import serve_hosts

__all__ = ["PARTS", "render", "serve_allocation", "serve_hosts"]
