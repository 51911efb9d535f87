"""Declare the installation's flows: names of runs that say what they do, and forms for people.

Prefect makes the form of a run from the flow's signature. Parameters that only Paceline gives are
left out of the form; the others are described where they are annotated.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from prefect import Flow, flow
from prefect.runtime import flow_run
from pydantic import Field
from pydantic.fields import FieldInfo

from paceline.tasks.cancelling import cancellable

P = ParamSpec("P")
R = TypeVar("R")

# What one part of Paceline gives another: the installation, the run, the deployment to drive.
INTERNAL = frozenset({"state_dir", "run_id", "deployment_id", "stage_prefix"})
NAME_CHARS = 120

ModelId = Annotated[str, Field(description="The model's id, such as org/name.")]
Version = Annotated[str, Field(description="A version of it, as published.")]
SnapshotUrl = Annotated[
    str, Field(description="The snapshot: s3://…, as build-snapshot returns it.")
]
Training = Annotated[
    str,
    Field(description="The training: its run's id, or training_digest as train-model returns it."),
]
Data = Annotated[
    str | None,
    Field(
        description="The samples: a directory on the flows' machine, s3://bucket/prefix, or stdlib."
    ),
]
Base = Annotated[
    str | None,
    Field(
        description="The base: MODEL_ID/VERSION as published, hf://…, oci://…, or a directory on "
        "the flows' machine. Default: the profile's."
    ),
]
Approver = Annotated[
    str | None,
    Field(description="Who stands for the promotion, where the policy lets a name be given."),
]
JobSettings = Annotated[
    dict[str, Any] | None,
    Field(
        description="More settings of this training, by their keys in a profile: "
        '{"training.lora.r": 8, "training.mesh.shard": 2, "data.batching": "packed"}.'
    ),
]


def declared(name: str, run_name: str = "") -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Return the decorator of a flow ``name``, which ends as ``cancellable`` says.

    ``run_name`` is a format of the parameters: "train {model_id} {version}".
    """

    def decorate(body: Callable[P, R]) -> Flow[P, R]:
        def named() -> str:
            given: dict[str, Any] = defaultdict(str)
            given.update({key: value or "" for key, value in flow_run.get_parameters().items()})
            return " ".join((run_name or name).format_map(given).split())[:NAME_CHARS]

        made: Flow[P, R] = flow(name=name, flow_run_name=named)(cancellable(body))
        # What Prefect's deployments read; calls bind to the function's own signature.
        made.__signature__ = _form(inspect.signature(body, eval_str=True))  # type: ignore[attr-defined]
        return made

    return decorate


def _form(signature: inspect.Signature) -> inspect.Signature:
    """Return the parameters that a person may give, each with its description as its field's."""
    shown = []
    for each in signature.parameters.values():
        if each.name in INTERNAL:
            continue
        described = next((a for a in get_args(each.annotation) if isinstance(a, FieldInfo)), None)
        if described is not None:
            default = ... if each.default is each.empty else each.default
            each = each.replace(default=Field(default, description=described.description))  # noqa: PLW2901
        shown.append(each)
    return signature.replace(parameters=shown)
