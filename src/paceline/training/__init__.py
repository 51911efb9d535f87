"""Distributed training: a gang of ranks, the loop, checkpoints, and a driver with restarts.

``run_job`` drives a job through a launcher that the caller passes in (a port: this package imports
neither Dask nor Prefect). ``python -m paceline.training.loop.rank`` runs one rank.
The ranks import torch, this package does not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
