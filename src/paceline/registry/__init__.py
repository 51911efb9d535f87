"""Model registry and run log in MLflow; the only package that imports mlflow.

``Registry`` is the public interface. Weights are not stored in MLflow: a version has the object
store's URL and a small evidence bundle whose digest is bound to the version. MLflow is imported at
the first call, because the import takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
