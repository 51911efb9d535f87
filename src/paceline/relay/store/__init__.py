"""The disk of one node: ``staging`` receives pieces, ``store`` publishes versions by rename.

``piece_log`` makes pieces durable in the background, ``reuse`` and ``library`` find what the
disk already holds, ``disk_space`` and ``inspection`` check whether a model fits. Nothing here
depends on a network.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
