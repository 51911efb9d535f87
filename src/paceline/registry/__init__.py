"""The model registry and the run log, kept in MLflow: the one package that imports it.

``Registry`` is everything other packages see. Weights never pass through MLflow: versions carry
the object store's URL, and a small evidence bundle whose digest is bound to the version. MLflow
itself is imported at the first call, because it takes seconds.
"""

from paceline.registry.adapter import RequestLimits
from paceline.registry.lineage import MetricPoint, Promotion, RegisteredVersion
from paceline.registry.registry import Registry

__all__ = ["MetricPoint", "Promotion", "RegisteredVersion", "Registry", "RequestLimits"]
