"""The data plane: nodes pull pieces from their lanes' sources, verify, store and forward them.

``protocol/`` decides which pieces to fetch (no I/O), ``transport/`` carries bytes between nodes,
``store/`` keeps them on disk and ``origin`` reads the source. ``deployments`` and
``active_deployment`` hold the state of the deployments on one node, ``node`` connects them to
threads and ``agent`` is the process; ``standalone`` runs a whole deployment without a server.
Nothing here depends on topologies, flows or training.
"""
