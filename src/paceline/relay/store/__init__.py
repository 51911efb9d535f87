"""The disk of one node: ``staging`` takes pieces, ``store`` publishes versions by rename.

``committer`` makes pieces durable behind the streams, ``reuse`` and ``library`` find what the disk
already holds, ``room`` and ``inspection`` say whether a model fits. Nothing here knows a network.
"""
