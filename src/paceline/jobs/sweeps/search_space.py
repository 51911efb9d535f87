"""What a sweep searches, and how: its settings, and their ranges and choices, from TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.config import Profile, with_job_settings
from paceline.errors import InvalidInput, InvalidProfile, SourceMissing, short_repr
from paceline.schemas import Budget, ModelId, Name, Record, Resources, Team, Text
from paceline.schemas.base import Url, is_empty

MAX_BYTES = 64 * 1024
WANTED = '[space."training.…"] with kind float or int (low, high, log) or categorical (choices)'
DO = 'See `paceline sweep run --help`, or "Sweep hyper-parameters" in the documentation.'


class _Range(Record):
    low: float = Field(description="The lowest value.")
    high: float = Field(description="The highest value.")
    log: bool = Field(default=False, description="Draw evenly by order of magnitude; low above 0.")

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

    kind: Literal["float"] = Field(description="A number between low and high.")

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_float(name, self.low, self.high, log=self.log)


class IntRange(_Range):
    """A whole number from ``low`` to ``high``."""

    kind: Literal["int"] = Field(description="A whole number from low to high.")
    low: int = Field(description="The lowest value.")
    high: int = Field(description="The highest value.")

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_int(name, self.low, self.high, log=self.log)


class Choices(Record):
    """One of several values."""

    kind: Literal["categorical"] = Field(description="One of the choices.")
    choices: tuple[str | int | float | bool, ...] = Field(
        min_length=1, description="The values to choose from.", examples=[["linear", "cosine"]]
    )

    @property
    def ends(self) -> tuple[object, ...]:
        """Return every choice."""
        return self.choices

    def suggest(self, trial: Any, name: str) -> object:
        """Return the value of Optuna's trial; the stored one, where there is one."""
        return trial.suggest_categorical(name, self.choices)


Dimension = Annotated[FloatRange | IntRange | Choices, Field(discriminator="kind")]
Space = Annotated[
    dict[str, Dimension],
    Field(
        min_length=1,
        max_length=32,
        description="Setting → its range (kind float or int: low, high, log) or choices.",
        examples=[{"training.learning_rate": {"kind": "float", "low": 1e-5, "high": 0.01}}],
    ),
]


class Search(Record):
    """What is searched, how, and for which metric."""

    space: Space
    trials: int = Field(default=16, ge=1, description="In all, those of earlier runs included.")
    parallel: int = Field(default=2, ge=1, le=256, description="Jobs at once, at most.")
    sampler: Literal["tpe", "cmaes", "random"] = Field(
        default="tpe", description="What draws the settings of a trial."
    )
    pruner: Literal["none", "asha", "hyperband", "median"] = Field(
        default="none", description="Cancels jobs of bad trials."
    )
    seed: int | None = Field(default=None, ge=0, description="The sampler's.")
    metric: str = Field(
        default="loss", max_length=200, description="Of the job's report.", examples=["loss"]
    )
    maximize: bool = Field(default=False, description="Search the highest; else the lowest.")


class Sweep(Search):
    """A search over trainings of one model on one snapshot, each a job of the queue."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    model_id: ModelId
    version: Name
    snapshot_url: Text = Field(min_length=1)
    resources: Resources = Resources()
    settings: dict[str, object] = {}
    team: Team | Literal[""] = ""
    project: Text = Field(default="", max_length=100)  # "": sweep-NAME
    # what the data are used for; "": the profile's data.purpose
    purpose: Name | Literal[""] = Field(default="", exclude_if=is_empty)
    priority: int = Field(default=0, ge=-100, le=100)
    # of each training, as SubmitJob's
    code_ref: Url = Field(default="", max_length=1000, exclude_if=is_empty)
    budget: Budget | None = None  # of all trials together; None and 0: none

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Return the sweep of ``given``, where None is not given; raises InvalidInput."""
        try:
            return cls.model_validate({k: v for k, v in given.items() if v is not None})
        except ValidationError as error:
            raise _refused(error, "not a sweep", "") from error

    def check(self, profile: Profile) -> None:
        """Raise InvalidInput unless each setting of the space may be a training's."""
        ranks = self.resources.model_dump(include={"ranks", "ranks_per_node"})
        fixed = {f"training.{key}": value for key, value in ranks.items() if value}
        fixed |= self.settings
        with_job_settings(profile, fixed)
        for key, dimension in self.space.items():
            where = f'[space."{key}"]'
            if key in fixed:
                raise InvalidInput("a setting is fixed and searched", got=key, where=where,
                                   wanted="one of both", do=DO)  # fmt: skip
            for value in dimension.ends:
                try:
                    with_job_settings(profile, {**fixed, key: value})
                except InvalidProfile as error:
                    got = f"{key} = {value!r}: {error.what}, {error.got}"
                    raise InvalidInput("no training has this setting", got=got, where=where,
                                       wanted=error.wanted, do=DO) from error  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must not change when the sweep goes on: else trials do not compare."""
        changing = {"name", "trials", "parallel", "sampler", "pruner", "seed", "budget"}
        made: dict[str, Any] = json.loads(self.model_dump_json(exclude=changing))
        return made


class _File(Record):
    space: Space


def read_space(path: Path) -> dict[str, Dimension]:
    """Return the search space of a TOML file; raises SourceMissing where there is none, and
    InvalidInput with the key that is wrong."""
    try:
        with path.open("rb") as file:
            raw = tomllib.loads(file.read(MAX_BYTES).decode())
        return _File.model_validate(raw).space
    except ValidationError as error:
        raise _refused(error, "not a search space", f"{path} ") from error
    except (OSError, ValueError) as error:
        kind = SourceMissing if isinstance(error, FileNotFoundError) else InvalidInput
        raise kind("the search space cannot be read", got=error, wanted=WANTED, where=path,
                   do=DO) from error  # fmt: skip


def _refused(error: ValidationError, what: str, where: str) -> InvalidInput:
    first = error.errors()[0]
    path = " ".join(map(str, first["loc"]))
    return InvalidInput(f"{what}: {first['msg']}", got=short_repr(first["input"], 200), do=DO,
                        wanted=WANTED if "space" in path else None, where=where + path)  # fmt: skip
