"""Paceline: fetch, relay, verify, train, evaluate and promote large models as Prefect flows.

Ten lines of Python do what the command line does: ``python_api`` has the functions, imported at
their first use. Nothing imports Prefect but ``tasks`` and ``flows``.
"""

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

from paceline.extras import report_missing_extras

report_missing_extras()
try:
    __version__ = version("paceline")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = ["__version__", *__all__]  # noqa: PLE0604 (names)
