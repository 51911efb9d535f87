"""Tasks of lm-eval's harness: what is data is scored as the harness scores it, code is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import EvaluationSettings
from paceline.errors import InvalidInput
from paceline.evaluation import TextModel, read_tasks, score_tasks, task_rows
from paceline.models import local_model_digest
from paceline.schemas import TaskScore
from tests.support.hugging_face import CHATML, write_model, write_tokenizer

CHOICE: dict[str, Any] = {
    "task": "next_number",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl", "train": "shots.jsonl"}},
    "test_split": "test",
    "fewshot_split": "train",
    "num_fewshot": 1,
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
COMPLETION = {
    **{key: CHOICE[key] for key in ("dataset_path", "dataset_kwargs", "test_split", "doc_to_text")},
    "task": "completion",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[label]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}
ROWS = 12
pytestmark = pytest.mark.xdist_group("harness")  # one worker imports lm_eval
SAID = [f"line {n} is {n * n}\nthen comes line {n + 1}\n" for n in range(60)]


def write_tasks(into: Path, *tasks: Mapping[str, Any]) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        (into / f"{task['task']}.yaml").write_text(yaml.safe_dump(dict(task)))
    rows = [
        {"text": f"line {n} is", "choices": [f"{n * n}", f"{n}", "thirteen"], "label": n % 3}
        for n in range(ROWS + 6)
    ]
    for name, some in (("rows", rows[:ROWS]), ("shots", rows[ROWS:])):
        (into / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some))
    return into


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with BOS ≠ EOS, as Llama 3 has them."""
    directory = write_model("llama", tmp_path_factory.mktemp("made") / "model", vocab_size=320)
    write_tokenizer(directory, SAID, begin="<s>")
    return directory


def scored(
    directory: Path, models: Mapping[str, Path], scratch: Path, *, as_chat: bool = False
) -> dict[str, TaskScore]:
    settings = EvaluationSettings(tasks_as_chat=as_chat)
    found = score_tasks(directory, models, settings, scratch=scratch, on_progress=lambda *_: None)
    return {f"{each.task}/{each.metric}": each for each in found}


def adapter_of_transformers(model: Path) -> Any:
    """Return the harness's own, as it is by default."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return HFLM(loaded, tokenizer=tokenizer, batch_size=1)


@pytest.mark.parametrize("template", [None, CHATML, "{{ bos_token }}" + CHATML])
def test_the_figures_are_those_of_the_harness_with_transformers(
    model: Path, tmp_path: Path, template: str | None
) -> None:
    """Beside the harness's own adapter of transformers, on the same tasks, example by example."""
    description = "" if template is None else "Count."  # the system message
    directory = write_tasks(tmp_path / "tasks", CHOICE | {"description": description}, COMPLETION)
    if template is not None:
        model = shutil.copytree(model, tmp_path / "model")
        write_tokenizer(model, SAID, begin="<s>", template=template, end="<|im_end|>")
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 128}
        (model / "config.json").write_text(json.dumps(config))  # a shot fits
    as_chat = template is not None
    ours = scored(directory, {"candidate": model, "base": model}, tmp_path, as_chat=as_chat)
    assert set(ours) == {"completion/exact_match", "next_number/acc", "next_number/acc_norm"}

    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    theirs = evaluator.simple_evaluate(
        adapter_of_transformers(model),
        tasks=[dict(each) for each in read_tasks(directory)],
        task_manager=TaskManager(include_defaults=False), bootstrap_iters=0,
        apply_chat_template=as_chat,
    )["results"]  # fmt: skip
    for name, score in ours.items():
        task, _, metric = name.partition("/")
        assert score.documents == ROWS
        assert score.scores["candidate"].value == pytest.approx(theirs[task][f"{metric},none"])
        assert score.difference_to["base"].value == 0
    assert 0 < ours["next_number/acc"].scores["candidate"].value < 1, "a figure that can differ"


def test_every_answer_is_that_of_the_harness_with_transformers(model: Path) -> None:
    """Row by row, also of an empty context, of one that ends with a space, and with a special token
    in it, as chat templates write."""
    from lm_eval.api.instance import Instance

    from paceline.evaluation.harness import HarnessModel

    pairs = [("line 7 is", " 49"), ("line 7 is ", "49"), ("", "line 1"), ("then\n", "comes line")]
    pairs.append(("line 6<|endoftext|>line 7", " is 49<|endoftext|>"))
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    ours, theirs = HarnessModel(TextModel.open(model)), adapter_of_transformers(model)
    wanted = theirs.loglikelihood(asked)
    for one, other in zip(ours.loglikelihood(asked), wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    prompts = [
        Instance("generate_until", {}, (text, options), number)
        for number, text in enumerate(("line 7", "then comes", "line 6 <|endoftext|>"))
    ]
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"process_docs": "x"}, "process_docs"),
        ({"include": "other.yaml"}, "include"),
        ({"dataset_path": "gsm8k"}, "gsm8k"),
        ({"dataset_kwargs": {"data_files": "../secret.jsonl"}}, "../secret.jsonl"),
        ({"dataset_kwargs": {"data_files": "/etc/passwd"}}, "/etc/passwd"),
        ({"dataset_kwargs": {"data_files": "https://host/x.jsonl"}}, "https://host/x.jsonl"),
        ({"dataset_kwargs": {"data_files": "gone.jsonl"}}, "gone.jsonl"),
        ({"dataset_kwargs": {"data_files": "rows.jsonl", "trust_remote_code": True}}, "data_files"),
        ({"metric_list": [{"metric": "bleu"}]}, "bleu"),
        ({"metric_list": []}, "acc"),
        ({"metric_list": 5}, "metric_list"),
        ({"output_type": "loglikelihood_rolling"}, "loglikelihood_rolling"),
        ({"generation_kwargs": {"do_sample": True}}, "do_sample"),
        ({"generation_kwargs": ["do_sample"]}, "generation_kwargs"),
        ({"task": 7}, "task"),
    ],
)
def test_what_is_not_data_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    directory = write_tasks(tmp_path / "tasks")
    (directory / "one.yaml").write_text(yaml.safe_dump(CHOICE | change))
    with pytest.raises(InvalidInput) as caught:
        read_tasks(directory)
    assert named in caught.value.one_line()
    assert "one.yaml" in caught.value.one_line()


def test_a_key_without_a_value_is_as_without_the_key(tmp_path: Path) -> None:
    directory = write_tasks(tmp_path / "tasks", COMPLETION | {"generation_kwargs": None})
    (read,) = read_tasks(directory)
    assert read["task"] == COMPLETION["task"]


def test_code_in_yaml_is_refused(tmp_path: Path) -> None:
    directory = write_tasks(tmp_path / "tasks", CHOICE)
    (directory / "code.yaml").write_text("task: !function os.system\n")
    with pytest.raises(InvalidInput, match="!function"):
        read_tasks(directory)


def test_a_directory_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no tasks here"):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ nothing_of_that_name }}", "nothing_of_that_name"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named(
    model: Path, tmp_path: Path, text: str, named: str
) -> None:
    directory = write_tasks(tmp_path / "tasks", CHOICE | {"doc_to_text": text})
    with pytest.raises(InvalidInput, match="a task cannot be scored") as caught:
        scored(directory, {"candidate": model}, tmp_path)
    assert named in caught.value.one_line()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("rows.jsonl", "", "no rows"),
        ("rows.jsonl", '{"text": "a"}\n{not json\n', "row 2: Expecting property name"),
        ("rows.jsonl", "[1, 2", "row 1"),
        ("rows.csv", "text,choices,label\n", "no rows"),
    ],
)
def test_a_data_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str, named: str
) -> None:
    files = {"data_files": {"test": ["shots.jsonl", name]}}
    kind = {"dataset_path": "csv" if name.endswith("csv") else "json"}
    directory = write_tasks(tmp_path / "tasks", CHOICE | kind | {"dataset_kwargs": files})
    (directory / name).write_text(content)
    with pytest.raises(InvalidInput, match="a data file of a task cannot be read") as caught:
        read_tasks(directory)
    for each in (named, name, "next_number.yaml"):
        assert each in caught.value.one_line()


def test_a_packed_data_file_is_left_to_the_harness(tmp_path: Path) -> None:
    files = {"dataset_kwargs": {"data_files": {"test": "rows.jsonl.gz"}}}
    directory = write_tasks(tmp_path / "tasks", CHOICE | files)
    (directory / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert [each["task"] for each in read_tasks(directory)] == ["next_number"]


def test_an_answer_longer_than_the_context_is_named(model: Path, tmp_path: Path) -> None:
    other = COMPLETION | {"task": "other"}
    directory = write_tasks(tmp_path / "tasks", CHOICE | {"num_fewshot": 0}, other)
    rows = (directory / "rows.jsonl").read_text().splitlines()
    rows[3] = json.dumps({"text": "line", "choices": ["a", "x " * 200, "b"], "label": 0})
    (directory / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(InvalidInput, match="longer than the model's context") as caught:
        scored(directory, {"candidate": model}, tmp_path)
    assert "row 3 of task next_number" in caught.value.one_line()


def test_the_rows_of_tasks_are_prompts_with_the_right_answer(tmp_path: Path) -> None:
    """Of what is scored, without shots and each once: what is looked for in training data."""
    swapped = CHOICE | {  # choices come before one ending
        "task": "swapped", "doc_to_text": "label", "doc_to_target": "text", "num_fewshot": 0
    }  # fmt: skip
    directory = write_tasks(tmp_path / "tasks", CHOICE, COMPLETION, swapped)
    rows = (directory / "rows.jsonl").read_text()
    (directory / "rows.jsonl").write_text(rows + rows)
    found = task_rows(directory, tmp_path)
    assert {name: len(each) for name, each in found.items()} == {
        "completion": ROWS, "next_number": ROWS, "swapped": ROWS,
    }  # fmt: skip
    for task in ("completion", "next_number"):
        assert found[task][:3] == [
            ("line 0 is", " 0"), ("line 1 is", " 1"), ("line 2 is", " thirteen"),
        ]  # fmt: skip
    assert found["swapped"][2] == ("thirteen", " line 2 is")


def test_a_model_is_scored_once_and_what_is_recorded_not_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tasks(tmp_path / "tasks", CHOICE)
    made: dict[str, Any] = {}
    models = {"candidate": model, "base": model, "champion": model}
    ways: dict[str, Any] = {"scratch": tmp_path, "on_progress": lambda *_: None}
    first = score_tasks(directory, models, EvaluationSettings(), on_scored=made.__setitem__, **ways)
    assert set(made) == {local_model_digest(model)}
    assert first[0].difference_to["champion"].value == 0
    monkeypatch.setattr(TextModel, "open", lambda *_, **__: pytest.fail("it has figures"))
    known = json.loads(json.dumps(made))  # as they are recorded
    again = score_tasks(directory, models, EvaluationSettings(), known=known, **ways)
    assert again == first
