"""A user's metric, in a process of its own: an evaluation passes it samples, it returns figures.

``python -m`` this module is that process, the child of ``paceline.data.ChildProcess``. Its first
request is JSON (see ``_start``), each further one a JSON list of ``MetricSample``, answered with a
JSON list of numbers, which the evaluation checks. It has no credentials in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.data import DONE, FAILED, serve
from paceline.errors import PacelineError, to_record
from paceline.schemas import MetricSample
from paceline.training.loop import leave_removed_directory
from paceline.training.user_code.loading import load_function, user_code_error
from paceline.training.user_code.reference import CodeRef


def _figures(ref: CodeRef, metric: Any, request: bytes) -> list[float]:
    samples = [MetricSample.model_validate(each) for each in json.loads(request)]
    try:
        return [float(each) for each in metric(samples)]
    except Exception as error:
        raise user_code_error("the metric's code raised", ref, error) from error


def _start(_argument: str) -> Callable[[bytes], tuple[bytes, bytes]]:
    loaded: tuple[CodeRef, Any] | None = None

    def answer(request: bytes) -> tuple[bytes, bytes]:
        nonlocal loaded
        try:
            if loaded is None:
                asked = json.loads(request)
                dial, cache = f"evaluation.metrics.{asked['name']}", Path(asked["cache"])
                loaded = load_function(asked["code_ref"], asked["sources"], cache, dial)
                return DONE, b""
            return DONE, json.dumps(_figures(*loaded, request)).encode()
        except PacelineError as error:
            return FAILED, json.dumps(to_record(error)).encode()

    return answer


if __name__ == "__main__":
    leave_removed_directory()
    serve(_start)
