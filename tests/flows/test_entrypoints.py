"""prefect.yaml: every entrypoint loads, and its defaults let a person press Run."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from prefect import Flow
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel

from paceline.cli.flows import OUTCOMES
from paceline.config import load_profile
from paceline.errors import Conflict, InvalidInput
from paceline.flows import train
from paceline.flows.train import train_model
from paceline.models import weights_digest
from paceline.schemas import SubmitJob

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())[
    "deployments"
]
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "maxLength")
each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])


def flow_of(deployment: dict[str, Any]) -> Any:
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(importlib.import_module(module), name)


@each_deployment
def test_every_entrypoint_in_prefect_yaml_is_a_flow_of_that_name(
    deployment: dict[str, Any],
) -> None:
    flow = flow_of(deployment)
    assert isinstance(flow, Flow)
    assert flow.name == deployment["name"]
    assert set(deployment.get("parameters", {})) <= set(flow.parameters.properties)


def test_every_flow_has_its_deployment() -> None:
    known = {each["entrypoint"] for each in DEPLOYMENTS}
    for path in (ROOT / "flows").glob("*.py"):
        name_of = f"paceline.flows.{path.stem}"
        module = importlib.import_module(name_of) if path.stem != "__init__" else None
        for name, value in vars(module).items() if module else ():
            if isinstance(value, Flow) and value.fn.__module__ == name_of:
                assert f"{name_of}.{name}" in known


def test_a_flow_starts_without_importing_torch() -> None:
    code = "import sys, paceline.flows.lifecycle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_lifecycle_needs_no_parameter() -> None:
    from paceline.flows.lifecycle import run_lifecycle

    assert not run_lifecycle.parameters.required


def test_a_flow_checks_what_it_is_given() -> None:
    given = {"model_id": "m", "version": "1", "snapshot_url": "s3://b/d/snapshots/0"}
    assert train_model.validate_parameters(given)["labels"] == "true"
    with pytest.raises(ParameterTypeError, match="labels"):
        train_model.validate_parameters(given | {"labels": "neither"})
    with pytest.raises(ParameterTypeError, match="learning_rate"):
        train_model.validate_parameters(given | {"learning_rate": 0})


def test_the_form_of_training_has_what_a_person_chooses() -> None:
    form = parameter_schema(train_model).properties
    assert form["labels"]["enum"] == ["true", "shuffled"]
    assert {"ranks", "steps", "learning_rate", "mesh", "settings"} <= form.keys()
    rate = form["learning_rate"]
    assert (rate["title"], rate["examples"]) == ("Learning rate", [3e-4])
    assert "0.0003" in rate["description"]


def limits(field: dict[str, Any]) -> set[tuple[str, object]]:
    kinds = (field, *field.get("anyOf", ()))
    return {item for each in kinds for item in each.items() if item[0] in LIMITS}


def test_the_form_of_training_has_every_field_of_a_job_over_rest() -> None:
    form, rest = parameter_schema(train_model).model_dump(), SubmitJob.model_json_schema()
    known = form["properties"]
    named = {"data_snapshot": "snapshot_url", "parameters": "settings", "sweep": "name"}
    assert {named.get(name, name) for name in SubmitJob.model_fields} <= known.keys()
    shared = {name: field for name, field in SubmitJob.model_fields.items() if field.title}
    assert len(shared) == 6
    for name, field in shared.items():
        assert known[name]["title"] == field.title
        assert known[name]["description"].startswith(str(field.description))
        assert limits(known[name]) == limits(rest["properties"][name]), name
    for record in ("Resources", "CheckpointSettings"):
        fields = form["definitions"][record]["properties"]
        assert fields.keys() == rest["$defs"][record]["properties"].keys()
        assert all(each["description"] for each in fields.values()), fields


CHOSEN: dict[str, Any] = {
    "name": "first", "priority": 7, "budget": 20.0, "seed": 5, "steps": 9,
    "resources": {"ranks": 2, "accelerator": "a100"}, "checkpoint_policy": {"every_steps": 3},
}  # fmt: skip


def test_what_a_person_gives_in_the_form_is_what_the_job_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[SubmitJob] = []

    def linked(_run: object, spec: SubmitJob, _job_id: object) -> None:
        asked.append(spec)
        raise Conflict("it goes no further")

    run = SimpleNamespace(runtime=SimpleNamespace(profile=load_profile("embedded")))
    monkeypatch.setattr(train, "Run", SimpleNamespace(open=lambda *_: run))
    monkeypatch.setattr(train, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(train, "linked", linked)
    given = {"model_id": "m", "version": "1", "snapshot_url": "s3://b/d/snapshots/0"}
    with pytest.raises(Conflict):
        train_model.fn(**train_model.validate_parameters(given | CHOSEN))
    (spec,) = asked
    made = spec.model_dump(mode="json", exclude_unset=True)
    assert {name: made[name] for name in CHOSEN if name != "steps"} == {
        name: value for name, value in CHOSEN.items() if name != "steps"
    }
    assert spec.settings == {
        "training.steps": 9,
        "training.ranks": 2,
        "training.seed": 5,
        "training.checkpoints.every_steps": 3,
    }
    with pytest.raises(InvalidInput, match=r"got ranks 4, resources\.ranks 2"):
        train_model.fn(**train_model.validate_parameters(given | CHOSEN | {"ranks": 4}))


@each_deployment
def test_forms_describe_each_parameter_and_leave_out_what_paceline_gives(
    deployment: dict[str, Any],
) -> None:
    flow = flow_of(deployment)
    form = parameter_schema(flow).properties
    assert not form.keys() & {"state_dir", "run_id", "deployment_id", "stage_prefix"}
    assert form.keys() < flow.parameters.properties.keys(), "calls may give them"
    for name, field in form.items():
        assert field["description"] not in ("", "None"), name
        assert field["title"][0].isupper(), name
    for record in parameter_schema(flow).definitions.values():
        for name, field in record.get("properties", {}).items():
            assert field.get("description"), (record["title"], name)


def test_a_flow_with_nothing_to_fill_in_says_who_starts_it() -> None:
    for each in DEPLOYMENTS:
        flow = flow_of(each)
        if set(flow.parameters.required) - parameter_schema(flow).properties.keys():
            assert "Only promotions start it" in each["description"], each["name"]


@each_deployment
def test_a_form_has_examples_of_texts_number_limits_and_no_raw_objects(
    deployment: dict[str, Any],
) -> None:
    schema = parameter_schema(flow_of(deployment))
    groups = [
        schema.properties,
        *(each.get("properties", {}) for each in schema.definitions.values()),
    ]
    for name, field in (item for each in groups for item in each.items()):
        kinds = [field, *field.get("anyOf", ()), field.get("items", {})]
        types = {each.get("type") for each in kinds if not each.keys() & {"enum", "const"}}
        maps = [each for each in kinds if each.get("additionalProperties") is True]
        assert not maps or name == "settings", name
        limits = {"minimum", "exclusiveMinimum"} & {key for each in kinds for key in each}
        assert "string" not in types or "examples" in field, name
        # a range's ends limit each other
        assert not types & {"integer", "number"} or limits or name in ("low", "high"), name


def test_the_model_of_the_example_is_the_demos() -> None:
    directory = ROOT / "profiles/models/pylm"
    example = parameter_schema(train_model).properties["model_id"]["examples"][0]
    assert example == f"{load_profile('embedded').model.model_id}-{weights_digest(directory)[:8]}"


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_result_of_a_flow_has_what_the_command_line_prints_of_it(name: str) -> None:
    wanted = {"staged": "distribute_model", "judged": "train_model"}.get(name, name)
    [flow] = [flow_of(e) for e in DEPLOYMENTS if e["entrypoint"].endswith(f".{wanted}")]
    result = get_type_hints(flow.fn)["return"]
    for template in OUTCOMES[name]:
        for _, field, _, _ in Formatter().parse(template):
            first, *rest = re.findall(r"\w+", field or "run_id")
            if first == "run_id" or (first in flow.parameters.properties and not rest):
                continue
            kind: Any = result
            for part in (first, *rest):
                (kind,) = [  # an optional record is the record
                    each
                    for each in (get_args(kind) or (kind,))
                    if isinstance(each, type) and issubclass(each, BaseModel)
                ]
                assert part in kind.model_fields, f"{name}: {template}"
                kind = kind.model_fields[part].annotation
