"""The disk of one node: ``staging`` receives pieces, ``store`` publishes versions by rename.

``group_commit`` makes pieces durable in the background, ``reuse`` and ``library`` find what the
disk already holds, ``disk_space`` and ``inspection`` check whether a model fits. Nothing here
depends on a network.
"""
