"""Who decides when a job's gang gets nodes: our own admission, Slurm, or Kubernetes.

Begin at ``contract``: the port that all three implement. ``engine_of`` chooses by the profile.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
