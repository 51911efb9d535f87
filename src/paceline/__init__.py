"""Paceline: fetch, relay, verify, train, evaluate and promote large models as Prefect flows.

The engine lives here and knows nothing of Prefect; ``tasks`` and ``flows`` are its Prefect face.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("paceline")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
