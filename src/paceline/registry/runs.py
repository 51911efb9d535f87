"""Calls to ``MlflowClient``, and the run log: one MLflow run per Paceline run.

Methods take the MLflow run's id explicitly (no active run, so threads and processes may share one)
and may be repeated. MLflow reads credentials, timeouts, switches and proxies only from the
environment, so this module writes MLflow's own variables there, and ``NO_PROXY`` with loopback in
it. Does not depend on versions, aliases or gates.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.config import mlflow_headers, mlflow_server
from paceline.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
)
from paceline.registry.lineage import (
    EXPERIMENT_TAGS,
    LOSS,
    LOSS_BEFORE,
    TAG_JOB,
    TAG_RUN_ID,
    MetricPoint,
    training_usage,
)
from paceline.schemas import TrainingUsage
from paceline.system import without_proxy_to_loopback

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

MAX_ARTIFACT_BYTES = 16 * 1024 * 1024
_PARAMS_PER_CALL = 100  # MLflow's own limits
_METRICS_PER_CALL = 1000
_DATASET_DIGEST_CHARACTERS = 36
_DENIED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
_AWAY = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR", "DEADLINE_EXCEEDED"}


class RunLog:
    """Writes one installation's runs into MLflow, one server for tracking and registry.

    One call takes at most about (``retries`` + 1) × ``timeout_s``.
    """

    def __init__(
        self,
        tracking_uri: str,
        auth: str = "",
        *,
        timeout_s: int = 10,
        retries: int = 2,
        client: Any = None,
    ) -> None:
        if not tracking_uri:
            raise InvalidInput(
                "no MLflow server is known", got="an empty URL", wanted="http://host:port"
            )
        self.tracking_uri = tracking_uri.rstrip("/")
        self._auth = auth
        self._timeout_s, self._retries = timeout_s, retries
        self._client = client

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what ``MlflowClient.method`` returns.

        Raises ServiceUnavailable, AccessDenied, NotFound, Conflict or InvalidInput.
        """
        with _translated(self.tracking_uri, method):
            if self._client is None:
                self._prepare_environment()
                self._client = _connect(self.tracking_uri)
            elif self._auth:
                self._prepare_environment()  # another Registry of this process may have changed it
            return getattr(self._client, method)(*args, **kwargs)

    def _prepare_environment(self) -> None:
        # MlflowClient takes no credentials and no timeouts: it reads these variables at each
        # request. A password in the URL instead would show up in MLflow's own error messages.
        settings = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(self._timeout_s),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(self._retries),
            "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a program reads our output
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
            **without_proxy_to_loopback(),
        }
        if self._auth:
            user, _, password = self._auth.partition(":")
            settings["MLFLOW_TRACKING_USERNAME"] = user
            settings["MLFLOW_TRACKING_PASSWORD"] = password
        os.environ.update(settings)

    def ensure_run(
        self,
        run_id: str,
        *,
        experiment: str,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Return the MLflow run id of Paceline's ``run_id``; create the run if there is none.

        If a retried request created two, every caller uses the older one.
        """
        experiment_id = self._ensure_experiment(experiment)
        found = self._find_run(run_id, experiment_id)
        if found is None:
            marked = {**(tags or {}), TAG_RUN_ID: run_id}
            created = self.call("create_run", experiment_id, tags=marked, run_name=name or run_id)
            found = self._find_run(run_id, experiment_id) or str(created.info.run_id)
        return found

    def find_run(self, run_id: str) -> str:
        """Return the MLflow run id of Paceline's ``run_id``, searched in all experiments.

        Raises NotFound if there is no such run; creates nothing.
        """
        if "'" in run_id:
            raise InvalidInput("not a run id", got=run_id[:100])
        token: str | None = None
        while True:
            page = self.call("search_experiments", page_token=token)
            for experiment in page:
                if found := self._find_run(run_id, str(experiment.experiment_id)):
                    return found
            token = page.token
            if not token:
                raise NotFound(
                    "no such run",
                    got=run_id,
                    where=self.tracking_uri,
                    do="`paceline where` names the pages that list the runs there are.",
                )

    def pages_of_runs(self, prefix: str) -> dict[str, str]:
        """Return run id → page in MLflow of each run whose id begins so; imports no MLflow.

        Raises ServiceUnavailable, AccessDenied or NotFound.
        """
        require_run_prefix(prefix)
        found: dict[str, str] = {}
        for each in self._runs(f"tags.`{TAG_RUN_ID}` LIKE '{prefix}%'"):
            tags = {tag["key"]: tag["value"] for tag in each["data"]["tags"]}
            info = each["info"]  # of two with one id, the older one counts
            found[tags[TAG_RUN_ID]] = self._page(info["experiment_id"], info["run_id"])
        return found

    def trainings(self) -> tuple[list[TrainingUsage], list[str]]:
        """Return what each training with a result used, newest first, and the run ids of those that
        have none (they run, or failed); imports no MLflow.

        A result that several runs logged is of the oldest. Raises as ``pages_of_runs``.
        """
        runs = self._runs(f"tags.`{TAG_JOB}` LIKE 'job-%'")
        once: dict[tuple[str, float], TrainingUsage] = {}
        without = []
        for run in runs:
            if (found := training_usage(run)) is not None:
                once[found.job_id, found.seconds] = found
            else:
                tags = {each["key"]: each["value"] for each in run["data"].get("tags", ())}
                without.append(tags.get(TAG_RUN_ID, ""))
        return list(once.values()), without

    def _runs(self, which: str) -> list[dict[str, Any]]:
        """Return the runs of all experiments that the filter selects, newest first."""
        experiments = self._listed("experiments", {"max_results": 1000})
        if not experiments:
            return []
        asked = {
            "experiment_ids": [each["experiment_id"] for each in experiments],
            "filter": which,
            "order_by": ["attributes.start_time DESC", "attributes.run_id DESC"],
            "max_results": 1000,
        }
        return self._listed("runs", asked)

    def _listed(self, what: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while True:
            page = self.rest("POST", f"/{what}/search", asked)
            rows += page.get(what, [])
            if not (token := page.get("next_page_token")):
                return rows
            asked = asked | {"page_token": token}

    def rest(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of one call of MLflow's REST API, without its Python package, whose
        import takes seconds. Raises ServiceUnavailable, AccessDenied or NotFound."""
        headers = {"Content-Type": "application/json", **mlflow_headers(self._auth)}
        answer = mlflow_server(self.tracking_uri).call(
            method,
            f"/api/2.0/mlflow{path}",
            None if body is None else json.dumps(body).encode(),
            headers,
            timeout_s=self._timeout_s,
        )
        try:
            content = json.loads(answer.body)
        except ValueError:
            content = {}
        if answer.status == 200 and isinstance(content, dict):
            return content
        got = content.get("message") if isinstance(content, dict) else None
        got = str(got or f"HTTP {answer.status}").splitlines()[0][:300]
        kind = {401: AccessDenied, 403: AccessDenied, 404: NotFound}.get(
            answer.status, ServiceUnavailable
        )
        raise kind("MLflow did not answer the call", got=got, where=self.tracking_uri)

    def log_tags(self, mlflow_run_id: str, tags: Mapping[str, str]) -> None:
        """Set ``tags`` on the run."""
        for key, value in tags.items():
            self.call("set_tag", mlflow_run_id, key, value)

    def read_artifact(self, mlflow_run_id: str, path: str) -> bytes:
        """Return the run's small artifact ``path``; raises NotFound if there is none."""
        with tempfile.TemporaryDirectory(prefix="paceline-artifact-") as directory:
            try:
                file = Path(self.call("download_artifacts", mlflow_run_id, path, directory))
            except OSError as error:  # MLflow's error for a missing local artifact
                raise NotFound("run has no such artifact", got=path, where=mlflow_run_id) from error
            if file.stat().st_size > MAX_ARTIFACT_BYTES:
                raise CorruptData(
                    "artifact is too large", got=file.stat().st_size, wanted=MAX_ARTIFACT_BYTES
                )
            return file.read_bytes()

    def history(self, mlflow_run_id: str, key: str) -> dict[int, float]:
        """Return a metric's value by step; of a step that was logged twice, the last."""
        points = self.call("get_metric_history", mlflow_run_id, key)
        ordered = sorted(points, key=lambda each: each.timestamp)  # stable: ties stay in order
        return {int(each.step): float(each.value) for each in ordered}

    def losses(self, mlflow_run_id: str) -> dict[int, float]:
        """Return the loss by step, also of a run of an older version."""
        return self.history(mlflow_run_id, LOSS) or self.history(mlflow_run_id, LOSS_BEFORE)

    def log_params(self, mlflow_run_id: str, params: Mapping[str, object]) -> None:
        """Log ``params``; a repeated value is accepted.

        MLflow never changes a param. A run that is resumed with newer code or another setting keeps
        the first value as its param, and has the newest as the tag ``now.KEY``.
        """
        from mlflow.entities import Param

        known = self.call("get_run", mlflow_run_id).data.params
        for key, value in params.items():
            if known.get(key, str(value)) != str(value):
                self.call("set_tag", mlflow_run_id, f"now.{key}", str(value))
        fresh = {key: value for key, value in params.items() if key not in known}
        for group in _groups(fresh.items(), _PARAMS_PER_CALL):
            batch = [Param(key, str(value)) for key, value in group]
            self.call("log_batch", mlflow_run_id, params=batch)

    def log_metrics(self, mlflow_run_id: str, points: Iterable[MetricPoint]) -> None:
        """Log ``points`` in as few requests as MLflow allows."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        for group in _groups(points, _METRICS_PER_CALL):
            batch = [
                Metric(point.key, float(point.value), point.at_ms or now_ms, point.step)
                for point in group
            ]
            self.call("log_batch", mlflow_run_id, metrics=batch)

    def log_artifact_text(self, mlflow_run_id: str, text: str, path: str) -> None:
        """Store ``text`` as the run's artifact ``path``; a later text replaces an earlier one."""
        self.call("log_text", mlflow_run_id, text, path)

    def log_artifact_file(self, mlflow_run_id: str, file: Path, directory: str = "") -> None:
        """Store a small local file (a plot, a report) in the run's artifact ``directory``."""
        self.call("log_artifact", mlflow_run_id, str(file), directory or None)

    def log_dataset(
        self, mlflow_run_id: str, *, name: str, url: str, digest: str, context: str = "training"
    ) -> None:
        """Record the data snapshot that the run read; its full digest goes into a tag."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:_DATASET_DIGEST_CHARACTERS],
            source_type="s3",
            source=json.dumps({"uri": url}),  # as MLflow's own datasets; its page shows it
        )
        tags = [InputTag("mlflow.data.context", context), InputTag("paceline.digest", digest)]
        self.call("log_inputs", mlflow_run_id, [DatasetInput(dataset, tags)])

    def finish_run(self, mlflow_run_id: str, status: RunStatus = "FINISHED") -> None:
        """Mark the run as ended with ``status``."""
        self.call("set_terminated", mlflow_run_id, status=status)

    def resume_run(self, mlflow_run_id: str) -> None:
        """Mark the run as running, also if it had ended."""
        self.call("update_run", mlflow_run_id, status="RUNNING")

    def run_url(self, mlflow_run_id: str, artifact: str = "") -> str:
        """Return the URL of the run's page in MLflow, or of one of its artifacts."""
        experiment_id = self.call("get_run", mlflow_run_id).info.experiment_id
        page = self._page(experiment_id, mlflow_run_id)
        return f"{page}/artifacts/{artifact}" if artifact else page

    def _page(self, experiment_id: str, mlflow_run_id: str) -> str:
        return f"{self.tracking_uri}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"

    def _ensure_experiment(self, name: str) -> str:
        experiment = self.call("get_experiment_by_name", name)
        if experiment is None:
            try:
                return str(self.call("create_experiment", name, tags=EXPERIMENT_TAGS))
            except Conflict:  # another process was faster
                experiment = self.call("get_experiment_by_name", name)
        return str(experiment.experiment_id)

    def _find_run(self, run_id: str, experiment_id: str) -> str | None:
        found = self.call(
            "search_runs",
            [experiment_id],
            filter_string=f"tags.`{TAG_RUN_ID}` = '{run_id}'",
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
            max_results=1,
        )
        return str(found[0].info.run_id) if found else None


def _connect(tracking_uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def require_run_prefix(given: str) -> None:
    """Raise InvalidInput for what no run id begins with."""
    if not re.fullmatch(r"run-[0-9a-f-]{0,22}", given):
        raise InvalidInput(
            "not a run id",
            got=repr(given[:100]),
            wanted="one such as run-20261120-153600-9f3a1c, or its first characters",
        )


@contextmanager
def _translated(where: str, method: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        yield
    except (MlflowException, RequestException) as error:
        raise _explain(error, where, method) from error


def _explain(error: Exception, where: str, method: str) -> PacelineError:
    code = str(getattr(error, "error_code", "") or "")
    text = str(error)
    first_line = text.splitlines()[0][:300] if text else type(error).__name__
    status = _http_status(error, text)
    if code in _DENIED or status in (401, 403):
        return AccessDenied(
            f"MLflow refused {method}",
            got=f"HTTP {status}" if status else code,
            where=where,
            do="Check the MLflow user and password of this installation.",
        )
    if (
        code == "RESOURCE_DOES_NOT_EXIST"
        or status == 404
        or ("alias" in text and "not found" in text)  # MLflow's code: INVALID_PARAMETER_VALUE
    ):
        return NotFound("MLflow has no such run, model or version", got=first_line, where=where)
    if code == "RESOURCE_ALREADY_EXISTS":
        return Conflict("MLflow has it already", got=first_line, where=where)
    if code in _AWAY or not code or (status or 0) >= 500:
        return ServiceUnavailable(
            f"MLflow does not answer {method}",
            got=first_line,
            wanted="a running MLflow server",
            where=where,
            do="Check that it runs (`paceline status`), then try again.",
        )
    return InvalidInput(f"MLflow did not accept {method}", got=first_line, where=where)


def _http_status(error: Exception, text: str) -> int | None:
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    marker = "failed with error code "  # MLflow's text for a refusal that is not its own JSON
    if marker in text:
        digits = text.split(marker, 1)[1][:3]
        return int(digits) if digits.isdecimal() else None
    return None


_T = TypeVar("_T")


def _groups(items: Iterable[_T], size: int) -> Iterable[list[_T]]:
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group
