"""Sweeps: a search space, the study that Optuna keeps, trials as training jobs, and the report.

Begin at ``sweep.run_sweep``. Imports Optuna where a study is opened (extra ``sweeps``).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
