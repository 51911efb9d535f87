"""Paceline: fetch, relay, verify, train, evaluate and promote large models as Prefect flows.

This package does not import Prefect; ``tasks`` and ``flows`` wrap it as Prefect tasks and flows.
"""

from importlib.metadata import PackageNotFoundError, version

from paceline.extras import report_missing_extras

report_missing_extras()
try:
    __version__ = version("paceline")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
