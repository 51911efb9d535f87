"""Models: our transformer, its configuration, and its files (config, safetensors weights, digests).

Training and evaluation use it. Does not depend on data, optimisers or parallelism. Imports torch
only when a model is requested.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
