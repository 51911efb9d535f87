"""Running processes on nodes, and the embedded installation's supervisor.

``start``, ``stop`` and ``status`` run the servers of one state directory; ``Fleet``
starts agents and processes on nodes, and holds nodes for a job. This is the one package that
imports dask, and only when a Fleet connects. It does not import training, the relay or flows: it
runs an argv.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
