"""Evaluation of candidate models: bits per byte on held-out documents, baselines, and the gate.

``python -m paceline.evaluation.run`` scores models in a separate process; ``decide`` is pure. Does
not depend on the registry or a scheduler; heavy libraries are imported where they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
