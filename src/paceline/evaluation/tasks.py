"""Tasks of EleutherAI's lm-eval harness, from files: read, checked, and scored through its API.

A task is data: a YAML file in the harness's own format, whose dataset is a file beside it. Code
(``!function``, a ``transform`` of documents, …), datasets and metrics of a hub are refused, and
templates run in Jinja's sandbox. A metric is the mean of one figure a document, so that two models
are compared document by document.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.config import EvaluationSettings
from paceline.errors import InvalidInput, PacelineError
from paceline.evaluation.scoring import compared_means
from paceline.evaluation.text_model import AllowedCode, TextModel
from paceline.extras import require_extras
from paceline.models import local_model_digest
from paceline.schemas import TaskScore

MAX_FILE_BYTES = 1024 * 1024  # of a task's YAML
FORMATS = ("json", "csv", "parquet", "text")  # of datasets
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")  # which the harness unpacks
METRICS = ("acc", "acc_norm", "acc_bytes", "exact_match")
KINDS = ("multiple_choice", "loglikelihood", "generate_until")
PLAIN = {
    "task", "tag", "dataset_name", "test_split", "validation_split", "training_split",
    "fewshot_split", "doc_to_text", "doc_to_target", "doc_to_choice", "target_delimiter",
    "fewshot_delimiter", "description", "num_fewshot", "fewshot_config", "repeats",
    "generation_kwargs", "filter_list", "metadata",
}  # fmt: skip
CHECKED = {"dataset_path", "dataset_kwargs", "output_type", "metric_list"}

Progress = Callable[[float, str], None]
# task → metric → one figure a document, in the order of the documents
Figures = Mapping[str, Mapping[str, Sequence[float]]]


def read_tasks(directory: Path) -> list[dict[str, Any]]:
    """Return the harness's configuration of each ``*.yaml`` in ``directory``, by name.

    Paths of datasets are made absolute. Raises InvalidInput for a directory without tasks, for a
    task that is not data alone, and for a data file without rows.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*.yaml")):
        config = _read(path)
        if config["task"] in found:
            raise InvalidInput("two tasks of one name", got=config["task"], where=path)
        found[config["task"]] = config
    if not found:
        raise InvalidInput("no tasks here", wanted="*.yaml, as lm-eval has them", where=directory)
    return [found[name] for name in sorted(found)]


def _read(path: Path) -> dict[str, Any]:
    import yaml

    def wrong(what: str, got: object, wanted: str) -> InvalidInput:
        return InvalidInput(f"{what} is not allowed in a task", got=got, wanted=wanted, where=path)

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise wrong("a file of this size", path.stat().st_size, f"at most {MAX_FILE_BYTES}")
        config = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        said = getattr(error, "problem", None) or error  # a tag that names code is one of them
        raise wrong("this", said, "plain YAML, without !function") from error
    if not isinstance(config, dict) or not isinstance(config.get("task"), str):
        raise wrong("this", type(config).__name__, "a mapping with the key task")
    if unknown := sorted(str(key) for key in config if key not in PLAIN | CHECKED):
        raise wrong(f"the key {unknown[0]!r}", unknown[0], ", ".join(sorted(PLAIN | CHECKED)))
    if config.get("output_type") not in KINDS:
        raise wrong("this output_type", config.get("output_type"), f"one of {', '.join(KINDS)}")
    for key, kind in {"metric_list": list, "generation_kwargs": dict}.items():
        if not isinstance(config.get(key) or kind(), kind):
            raise wrong(f"this {key}", config[key], f"a {kind.__name__}")
    named = [
        each if isinstance(each, dict) else {"metric": each}
        for each in config.get("metric_list") or []
    ]
    metrics = [each.get("metric") for each in named]
    if not metrics or any(each not in METRICS for each in metrics):
        raise wrong("this metric_list", metrics, f"some of {', '.join(METRICS)}")
    if odd := [each for each in named if each.get("aggregation", "mean") != "mean"]:
        raise wrong("this aggregation", odd[0]["aggregation"], "mean")
    if (config.get("generation_kwargs") or {}).get("do_sample"):
        raise wrong("sampling", "do_sample", "the most likely token each time")
    return config | {
        "dataset_kwargs": _files(config, path, wrong),
        "metric_list": [each | {"aggregation": "mean", "higher_is_better": True} for each in named],
    }


def _files(
    config: Mapping[str, Any], path: Path, wrong: Callable[[str, object, str], InvalidInput]
) -> dict[str, Any]:
    """Return ``dataset_kwargs`` with the paths of files beside the task's own."""
    if config.get("dataset_path") not in FORMATS:
        raise wrong("this dataset_path", config.get("dataset_path"), f"one of {FORMATS}")
    given = config.get("dataset_kwargs")
    if not isinstance(given, dict) or set(given) != {"data_files"}:
        raise wrong("dataset_kwargs", given, "data_files alone")

    def local(name: object) -> str:
        if not isinstance(name, str) or "/" in name or not (path.parent / name).is_file():
            raise wrong("this data file", name, "a file beside the task")
        _require_rows(path.parent / name, config["dataset_path"], path)
        return str((path.parent / name).absolute())

    files = given["data_files"]
    by_split = files if isinstance(files, dict) else {"train": files}
    return {
        "data_files": {
            str(split): [local(name) for name in (names if isinstance(names, list) else [names])]
            for split, names in by_split.items()
        }
    }


def _require_rows(file: Path, kind: str, task: Path) -> None:
    """Raise InvalidInput for a ``file`` that is empty, or of JSON that cannot be read; the harness
    names neither."""
    if file.suffix in PACKED:
        return
    data, at = file.read_bytes(), 0
    lines = [each for each in data.splitlines() if each.strip()]
    problem = "" if len(lines) > (kind == "csv") else "no rows"
    try:
        if kind == "json":
            for row in [data] if data.lstrip()[:1] == b"[" else lines:
                at += 1
                json.loads(row)
    except (ValueError, RecursionError) as error:
        problem = f"row {at}: {error}"[:200]
    if problem:
        raise InvalidInput(
            "a data file of a task cannot be read",
            got=problem,
            wanted=f"rows of {kind}",
            where=f"{file}, of {task}",
        )


def score_tasks(
    directory: Path,
    models: Mapping[str, Path],
    settings: EvaluationSettings,
    *,
    scratch: Path,
    on_progress: Progress,
    allowed: AllowedCode | None = None,
    known: Mapping[str, Figures] = MappingProxyType({}),
    on_scored: Callable[[str, Figures], None] = lambda _subject, _figures: None,
) -> tuple[TaskScore, ...]:
    """Return each metric of each task in ``directory``, of every one of ``models``.

    ``known`` figures, by the digest of a model's files, are not computed again; each new one is
    passed to ``on_scored``. Figures have bootstrap intervals over documents; the candidate's
    differences to the others are paired. Raises MissingExtra without lm-eval, InvalidInput for a
    task that cannot be scored, and with ``tasks_as_chat`` for a model without a chat template.
    """
    require_extras("eval")
    configs = read_tasks(directory)
    values: dict[tuple[str, str], dict[str, Sequence[float]]] = {}
    done = dict(known)
    for number, (name, where) in enumerate(models.items()):
        if (subject := local_model_digest(where)) not in done:  # base and champion are often one
            on_progress(number / len(models), f"{name}: {len(configs)} tasks")
            model = TextModel.open(where, allowed=allowed, context=settings.context)
            done[subject] = _figures(configs, model, scratch, as_chat=settings.tasks_as_chat)
            on_scored(subject, done[subject])
        for task, by_metric in done[subject].items():
            for metric, figures in by_metric.items():
                values.setdefault((task, metric), {})[name] = figures
    return tuple(
        TaskScore(task=task, metric=metric, **compared_means(by_model, settings))
        for (task, metric), by_model in sorted(values.items())
    )


def task_rows(directory: Path, scratch: Path) -> dict[str, list[tuple[str, str]]]:
    """Return each row that a task in ``directory`` is scored on, once: the prompt, and the right
    answer as it follows, without shots. Raises as ``score_tasks``."""
    require_extras("eval")
    configs = read_tasks(directory)
    with _harness(configs, scratch) as manager:
        found = manager.load([dict(each) for each in configs])["tasks"]
        return {
            name: list(dict.fromkeys(_row(task, row) for row in task.eval_docs))
            for name, task in sorted(found.items())
        }


def _row(task: Any, row: Mapping[str, Any]) -> tuple[str, str]:
    prompt, target = task.doc_to_text(row), task.doc_to_target(row)
    choices = task.doc_to_choice(row) if task.config.doc_to_choice is not None else []
    right = target[0] if isinstance(target, list) and target else target  # of several

    def said(each: object) -> str:
        return str(choices[each] if isinstance(each, int) and each < len(choices) else each)

    return said(prompt), f"{task.config.target_delimiter}{said(right)}"


@contextlib.contextmanager
def _harness(configs: Sequence[Mapping[str, Any]], scratch: Path) -> Iterator[Any]:
    """Yield the harness's TaskManager, offline and with Jinja's sandbox; what it raises about
    ``configs`` is raised as InvalidInput."""
    os.environ |= {  # before the harness is imported
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(scratch),
        "HF_DATASETS_CACHE": str(scratch), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }  # fmt: skip
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils
    from lm_eval.tasks import TaskManager

    sandbox = ImmutableSandboxedEnvironment(
        undefined=utils.env.undefined, keep_trailing_newline=utils.env.keep_trailing_newline
    )
    sandbox.filters = utils.env.filters
    utils.env = sandbox
    try:
        yield TaskManager(include_defaults=False)
    except PacelineError:
        raise
    except Exception as error:  # of a template, a column that is not there, …
        raise InvalidInput(
            "a task cannot be scored",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300],
            where=", ".join(each["task"] for each in configs),
        ) from error


def _figures(
    configs: Sequence[Mapping[str, Any]], model: TextModel, scratch: Path, *, as_chat: bool
) -> Figures:
    with _harness(configs, scratch) as manager:
        from lm_eval import evaluator

        from paceline.evaluation.harness import HarnessModel

        # For results that nothing here reads it would run git, pip and a compiler: 2 s of CPU.
        evaluator.get_git_commit_hash = evaluator.add_env_info = lambda *_: None
        found = evaluator.simple_evaluate(
            HarnessModel(model, as_chat=as_chat),
            apply_chat_template=as_chat,
            tasks=[dict(each) for each in configs],
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
        )
    figures: dict[str, dict[str, list[float]]] = {}
    for task, samples in found["samples"].items():
        for each in sorted(samples, key=lambda sample: sample["doc_id"]):
            suffix = "" if each["filter"] == "none" else f",{each['filter']}"
            for metric in each["metrics"]:
                of_task = figures.setdefault(task, {})
                of_task.setdefault(metric + suffix, []).append(float(each[metric]))
    return figures
