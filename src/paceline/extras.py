"""The extras of the distribution: which one installs a library that is missing.

``pip install paceline`` installs what a node needs: agent, coordinator, plans, the command line.
Everything else is an extra (pyproject.toml). ``report_missing_extras`` makes every import in this
package that fails for want of an extra raise ``MissingExtra``, in commands, tasks and Python alike.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

from paceline.errors import MissingExtra

# Extra → the modules of it that paceline imports. A module that several extras install belongs to
# the one that is named like the importing package, else to the first.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("numpy", "pyarrow", "safetensors", "tokenizers", "torch"),
    "simulation": ("numpy",),
    "flows": (
        "prefect", "dask", "distributed", "mlflow", "great_expectations", "matplotlib", "pandas",
        "requests",
    ),
    "stores": ("psycopg", "redis"),
    "control": ("prefect_redis",),
    "grpc": ("grpc",),
    "hf": ("transformers",),
    "lora": ("peft",),
    "eval": ("lm_eval",),
    "sweeps": ("optuna", "cmaes"),
    "gpu": ("pynvml",),
}  # fmt: skip


class _MissingExtraFinder:
    """The last finder of ``sys.meta_path``: it receives only modules that no other one found.

    Imports by other packages, which may try a library and do without, are left alone.
    """

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise MissingExtra where paceline imports a module of an extra; else return nothing."""
        extras = [extra for extra, modules in EXTRAS.items() if name in modules]
        importer = _importer(sys._getframe(1)) if extras else ""
        if not importer.startswith("paceline.") or importer == __name__:
            return None
        own = importer.split(".")[1]
        extra = own if own in extras else extras[0]
        raise missing([extra], got=f"no module {name}", where=importer)


def report_missing_extras() -> None:
    """Make failing imports of extras' modules raise MissingExtra in this process."""
    if not any(isinstance(each, _MissingExtraFinder) for each in sys.meta_path):
        sys.meta_path.append(_MissingExtraFinder())


def is_installed(module: str) -> bool:
    """Return whether a module of an extra can be imported.

    ``importlib.util.find_spec`` called elsewhere in this package raises MissingExtra instead.
    """
    return importlib.util.find_spec(module) is not None


def require_extras(*names: str) -> None:
    """Raise MissingExtra unless these extras are installed; call it before processes need them."""
    absent = {
        extra: [module for module in EXTRAS[extra] if not is_installed(module)] for extra in names
    }
    if lacking := [extra for extra in names if absent[extra]]:
        raise missing(lacking, got=f"no module {absent[lacking[0]][0]}")


def installed_extras() -> list[str]:
    """Return the extras whose libraries are all installed."""
    return [
        extra for extra, modules in EXTRAS.items() if all(is_installed(each) for each in modules)
    ]


def missing(extras: list[str], *, got: str, where: str | None = None) -> MissingExtra:
    """Return the error that names the extras to install."""
    needed = ", ".join(extras)
    plural = "s" if len(extras) > 1 else ""
    return MissingExtra(
        f"this needs the extra{plural} {needed}",
        got=got,
        where=where,
        # no index: Paceline is on none, and there the name may be another's
        do=f'Run: pip install "$(ls dist/paceline-*.whl)[{",".join(extras)}]"',
    )


def _importer(frame: FrameType | None) -> str:
    """Return the name of the module whose import reached the finder."""
    while frame is not None:
        spec = frame.f_globals.get("__spec__")  # of a module that runs as __main__, too
        name = spec.name if spec is not None else str(frame.f_globals.get("__name__"))
        if not name.startswith(("importlib", "_frozen_importlib")):
            return name
        frame = frame.f_back
    return ""
