"""Model registry and run log in MLflow; the only package that imports mlflow.

``Registry`` is the public interface. Weights are not stored in MLflow: a version has the object
store's URL and a small evidence bundle whose digest is bound to the version. MLflow is imported at
the first call, because the import takes seconds.
"""

from paceline.registry.adapter import RequestLimits
from paceline.registry.lineage import MetricPoint, Promotion, RegisteredVersion
from paceline.registry.registry import Registry

__all__ = ["MetricPoint", "Promotion", "RegisteredVersion", "Registry", "RequestLimits"]
