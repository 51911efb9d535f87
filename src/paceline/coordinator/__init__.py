"""The control plane: the deployment state machine, its stores, leadership and its driver.

It tracks workers, deployments and plans. It transfers no model bytes and starts no processes;
the REST routes are in ``paceline.api``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
