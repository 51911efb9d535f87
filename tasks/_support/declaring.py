"""Declare the installation's flows: names of runs that say what they do, and forms for people.

Prefect makes the form of a run from the flow's signature. Parameters that only Paceline gives are
left out of the form; the others have a title, a description, an example and their limits where they
are annotated. Prefect's server checks what is given against the same schema.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args

from prefect import Flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.fields import FieldInfo

from paceline.config import CheckpointSettings
from paceline.schemas import (
    JOB_ID,
    MODEL_ID,
    NAME,
    RUN_ID,
    SHA256_HEX,
    Budget,
    Resources,
    SubmitJob,
)
from paceline.tasks._support.cancelling import Interrupted, cancellable
from paceline.tasks._support.stages import RUN_NAME_CHARS

P = ParamSpec("P")
R = TypeVar("R")

# What one part of Paceline gives another: the installation, the run, the deployment to drive, what
# a promotion waits with for a person.
INTERNAL = frozenset(
    {"state_dir", "run_id", "deployment_id", "stage_prefix", "job_id"}
    | {"flow", "parameters", "request"}
)


def about(title: str, description: str, *examples: object) -> Any:
    """Return what a form shows of a parameter."""
    return Field(title=title, description=description, examples=[*examples] or None)


# What one stage passes to the next: a digest that it returned, its job, or its whole run.
Reference = Annotated[
    str, StringConstraints(pattern=f"{SHA256_HEX}|{RUN_ID}|{JOB_ID}", strip_whitespace=True)
]
_Id = Annotated[str, StringConstraints(pattern=MODEL_ID, max_length=128)]
_Name = Annotated[str, StringConstraints(pattern=NAME)]
# One field of text in a form; of a union with "" Prefect's page makes two.
_NameOrEmpty = Annotated[str, StringConstraints(pattern=f"^$|{NAME}")]
_IdOrEmpty = Annotated[str, StringConstraints(pattern=f"^$|{MODEL_ID}", max_length=128)]

ModelId = Annotated[_Id, about("Model", "The model's id.", "pylm-bca6b8c7", "acme/tiny")]
Version = Annotated[_Name, about("Version", "A version of the model, as published.", "1")]
# Where the source names them
AnyModelId = Annotated[
    _IdOrEmpty, about("Model", "The model's id; empty: the source's.", "acme/tiny")
]
AnyVersion = Annotated[_NameOrEmpty, about("Version", "Its version; empty: the source's.", "1")]
SnapshotUrl = Annotated[
    str,
    StringConstraints(min_length=1),
    about(
        "Data snapshot",
        "The snapshot's URL, as build-snapshot returns it.",
        "s3://paceline/data/snapshots/5c1f…",
    ),
]
Team = Annotated[_NameOrEmpty, about("Team", "Whose quota and data purposes apply.", "nlp")]
Project = Annotated[
    _NameOrEmpty, about("Project", "Whose data and costs the jobs are.", "lr-study")
]
Purpose = Annotated[
    _NameOrEmpty,
    about("Purpose", "What the data are used for; default: the profile's.", "research"),
]
_OF_A_JOB = SubmitJob.model_fields  # over REST; with the same texts and limits here
JobName = Annotated[str, _OF_A_JOB["name"]]
Priority = Annotated[int, _OF_A_JOB["priority"]]
JobBudget = Annotated[Budget | None, _OF_A_JOB["budget"]]
SweepBudget = Annotated[
    Budget | None,
    about(
        "Budget",
        "The most that all trials together may cost, in the currency of the profile's prices; then "
        "no other trial starts. Empty or 0: no limit.",
        200,
    ),
]
CodeRef = Annotated[
    str,
    about(
        "Code",
        "A pinned function of the profile's security.code_sources that makes the model; default: "
        "the profile's.",
        "git+https://host/repository.git@COMMIT#task:make",
    ),
]
Seed = Annotated[int | None, _OF_A_JOB["seed"]]
GangResources = Annotated[Resources | None, _OF_A_JOB["resources"]]
CheckpointPolicy = Annotated[CheckpointSettings | None, _OF_A_JOB["checkpoint_policy"]]
Training = Annotated[
    Reference,
    about(
        "Training",
        "The training: its job's id, the id of its run, or its training_digest.",
        "job-4be1c2a09f3d",
        "run-20261120-153600-9f3a1c",
    ),
]
Report = Annotated[
    Reference,
    about(
        "Evaluation",
        "The evaluation: the id of its run or of the job that it judged (then the newest one), or "
        "its report_digest.",
        "run-20261120-153600-9f3a1c",
        "job-4be1c2a09f3d",
    ),
]
Data = Annotated[
    str | None,
    about(
        "Data",
        "The samples: a directory on the flows' machine, s3://bucket/prefix, or stdlib. Default: "
        "the profile's.",
        "s3://bucket/texts",
    ),
]
Base = Annotated[
    str | None,
    about(
        "Base model",
        "MODEL_ID/VERSION as published, hf://…, oci://…, or a directory on the flows' machine. "
        "Default: the profile's.",
        "acme/tiny/1",
        "hf://org/name@main",
    ),
]
Approver = Annotated[
    str | None,
    about(
        "Approver", "Who stands for the promotion, where the policy lets a name be given.", "ada"
    ),
]
JobSettings = Annotated[
    dict[str, Any] | None,
    about(
        "More settings",
        'Of this training, by their keys in a profile ("Profile keys" in the documentation).',
        {"training.lora.r": 8, "data.batching": "packed"},
    ),
]


class Chosen(BaseModel):
    """A group of settings of which a person gives some; the others stay the profile's."""

    model_config = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """Return what was given."""
        return self.model_dump(exclude_none=True)


def some(description: str, **limits: Any) -> Any:
    """Return a field that need not be given."""
    return Field(default=None, description=description, **limits)


class Reading(Chosen):
    """How the samples are read, where it is not as in the profile's [data]."""

    format: Literal["text", "jsonl", "parquet", "tar"] | None = some("Of the files.")
    text_field: str | None = some(
        "JSONL, Parquet: the column; tar: the member's extension.", examples=["text"]
    )
    key_field: str | None = some("What names a sample.", examples=["key"])
    slice_field: str | None = some("Whose values are slices of the evaluation.", examples=["lang"])
    slice_fields: list[str] | None = some("Or several columns.", examples=[["lang", "topic"]])
    features: list[str] | None = some(
        "Parquet files to join by the key field.", examples=[["s3://bucket/features.parquet"]]
    )
    token_features: list[str] | None = some(
        "Those with one value per token.", examples=[["importance"]]
    )
    missing_features: Literal["refuse", "skip"] | None = some("A sample without features.")
    tokenizer: str | None = some("bytes, or a tokenizer.json.", examples=["bytes"])
    max_tokens: int | None = some("Longer conversations are left out; 0: no limit.", ge=0)
    max_bytes: int | None = some("Of text, at the most.", ge=1024)
    shard_bytes: int | None = some("Of a shard.", ge=1024, examples=[1_048_576])
    held_out_share: float | None = some("Of the samples.", gt=0, lt=1, examples=[0.1])
    purpose: str | None = some("What the data may be used for.", examples=["research"])
    project: str | None = some("Whose data they are.", examples=["lr-study"])
    seed: int | None = some("Of the split.", ge=0)


class Mesh(Chosen):
    """How the ranks share the model; their product is the number of ranks."""

    dp: int | None = some("Replicas; 0: as many as the ranks allow.", ge=0)
    shard: int | None = some("Parts of parameters and optimizer state.", ge=1)
    tp: int | None = some("Parts of each matrix (tensor parallel).", ge=1)
    cp: int | None = some("Parts of each row (context parallel).", ge=1)
    pp: int | None = some("Groups of layers (pipeline stages).", ge=1)


class _Flow(Flow[P, R]):
    """A flow whose caller gets KeyboardInterrupt where Ctrl-C ended it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # type: ignore[override]
        try:
            return super().__call__(*args, **kwargs)
        except Interrupted as error:
            raise KeyboardInterrupt from error


def declared(name: str, run_name: str = "") -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Return the decorator of a flow ``name``, which ends as ``cancellable`` says.

    ``run_name`` is a format of the parameters: "train {model_id} {version}".
    """

    def decorate(body: Callable[P, R]) -> Flow[P, R]:
        def named() -> str:
            given: dict[str, Any] = defaultdict(str)
            given.update({key: value or "" for key, value in flow_run.get_parameters().items()})
            return " ".join((run_name or name).format_map(given).split())[:RUN_NAME_CHARS]

        made = _Flow(cancellable(body), name=name, flow_run_name=named)
        # What Prefect's deployments read; calls bind to the function's own signature.
        made.__signature__ = _form(inspect.signature(body, eval_str=True))  # type: ignore[attr-defined]
        return made

    return decorate


def _form(signature: inspect.Signature) -> inspect.Signature:
    """Return the parameters that a person may give, each with its field's texts.

    Prefect reads a default's description and ``json_schema_extra``, and titles by the name else.
    """
    shown = []
    for each in signature.parameters.values():
        if each.name in INTERNAL:
            continue
        # beside the one with its limits
        fields = (a for a in get_args(each.annotation) if isinstance(a, FieldInfo))
        described = next((field for field in fields if field.title), None)
        if described is not None:
            default = ... if each.default is each.empty else each.default
            extra: dict[str, Any] = {"title": described.title or each.name}
            description = str(described.description)
            if described.examples:
                extra["examples"] = described.examples
                description += f" Example: {described.examples[0]}"  # the page shows no examples
            field = Field(default, description=description, json_schema_extra=extra)
            each = each.replace(default=field)  # noqa: PLW2901
        shown.append(each)
    return signature.replace(parameters=shown)
