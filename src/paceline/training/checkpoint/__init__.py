"""Checkpoints: sharded, asynchronous, atomic, verified before use, several generations.

``Checkpointer`` saves on every rank; ``resume_newest_healthy`` restores on any layout and any
number of ranks; ``export`` writes the whole model as safetensors; ``Generations`` reads and edits
a job's checkpoints in the store without torch. ``training.interval`` decides when to save.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
