"""Object storage: the one package that talks to S3; models, data and checkpoints go through it.

``DiskStore`` has the same methods for directories of a local or shared disk. The package works on
buckets, keys and ranges, and does not depend on models, pieces or checkpoints.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
