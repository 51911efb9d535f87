"""The data plane: nodes pull pieces from their lanes' sources, verify, store and forward them.

``protocol/`` decides which pieces to fetch (no I/O), ``transport/`` carries bytes between nodes,
``store/`` keeps them on disk and ``origin`` reads the source. ``deployments`` holds the state of
the deployments on one node, ``node`` connects it to threads and ``agent`` is the process;
``standalone`` runs a whole deployment without a server.
Nothing here depends on topologies, flows or training.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
