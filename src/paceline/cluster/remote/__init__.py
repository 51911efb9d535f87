"""Workers that the control host starts on other machines: over SSH, or in a Slurm allocation.

Begin with ``workers``: it starts one host's worker through any command that runs a shell there.
"""

from paceline.cluster.remote.slurm import serve_allocation
from paceline.cluster.remote.ssh import serve_hosts

__all__ = ["serve_allocation", "serve_hosts"]
