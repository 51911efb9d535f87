"""Training jobs: the queue, which gang is admitted where, sweeps of jobs, and what a
job's time costs.

Begin at ``scheduler``, which has one of the ``engines`` admit gangs: our own ``admission``, a pure
decision on hosts, waiting gangs and running ones, or Slurm or Kubernetes. Prefect runs a
job's flow and ``paceline.training`` its ranks; this package knows neither.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
