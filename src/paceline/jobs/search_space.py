"""The search space of a sweep: settings of a training, each with a range or choices, from TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.errors import InvalidInput, short_repr
from paceline.schemas import Record

MAX_BYTES = 64 * 1024
WANTED = '[space."training.…"] with kind float or int (low, high, log) or categorical (choices)'
DO = "See docs/how-to/sweep-hyper-parameters.md."


class _Range(Record):
    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _holds_values(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, not {self.low}")
        return self

    @property
    def ends(self) -> tuple[object, ...]:
        """Return its lowest and its highest value."""
        return self.low, self.high


class FloatRange(_Range):
    """A number between two bounds."""

    kind: Literal["float"]

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_float(name, self.low, self.high, log=self.log)


class IntRange(_Range):
    """A whole number from ``low`` to ``high``."""

    kind: Literal["int"]
    low: int
    high: int

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_int(name, self.low, self.high, log=self.log)


class Choices(Record):
    """One of several values."""

    kind: Literal["categorical"]
    choices: tuple[str | int | float | bool, ...] = Field(min_length=1)

    @property
    def ends(self) -> tuple[object, ...]:
        """Return every choice."""
        return self.choices

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_categorical(name, self.choices)


Dimension = Annotated[FloatRange | IntRange | Choices, Field(discriminator="kind")]


class _File(Record):
    space: dict[str, Dimension] = Field(min_length=1)


def read_space(path: Path) -> dict[str, Dimension]:
    """Return the search space of a TOML file; raises InvalidInput with the key that is wrong."""
    try:
        with path.open("rb") as file:
            raw = tomllib.loads(file.read(MAX_BYTES).decode())
        return _File.model_validate(raw).space
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{path} {' '.join(map(str, first['loc']))}"
        got = short_repr(first["input"], 200)
        raise InvalidInput(f"not a search space: {first['msg']}", got=got, wanted=WANTED,
                           where=where, do=DO) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise InvalidInput("the search space cannot be read", got=error, wanted=WANTED, where=path,
                           do=DO) from error  # fmt: skip
