"""The data plane: pull pieces from lanes' sources, verify them, keep them, pass them on at once.

``session`` decides (no I/O), ``store`` and ``staging`` keep bytes, ``frames``, ``server`` and
``client`` carry them, ``origin`` reads the source, ``driver`` ties these to threads, ``agent`` is
the process. Nothing here knows topologies, flows or training.
"""
