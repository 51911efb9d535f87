"""The data plane: pull pieces from lanes' sources, verify them, keep them, pass them on at once.

``session/`` decides (no I/O), ``wires/`` carries bytes between nodes, ``disk/`` keeps them,
``origin`` reads the source. ``share`` is one model moving, ``deployments`` what a node does about
one deployment, ``driver`` ties these to threads and ``agent`` is the process; ``onecall`` needs no
server, ``memory`` runs the same sessions under a virtual clock. Nothing here knows topologies,
flows or training.
"""
