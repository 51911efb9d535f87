"""Calls to ``MlflowClient`` with timeouts and credentials; its errors become Paceline's.

Does not depend on runs, versions or gates. MLflow reads credentials, timeouts and switches only
from the environment, so this module writes MLflow's own variables there, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    PacelineError,
    ServiceUnavailable,
)

_DENIED = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}
_AWAY = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR", "DEADLINE_EXCEEDED"}


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of one call to MLflow; it takes at most about (retries + 1) × timeout_s."""

    timeout_s: int = 10
    retries: int = 2


class MlflowAdapter:
    """A client of one MLflow server that serves both tracking and registry."""

    def __init__(
        self,
        tracking_uri: str,
        auth: str = "",
        *,
        limits: RequestLimits | None = None,
        client: Any = None,
    ) -> None:
        if not tracking_uri:
            raise InvalidInput(
                "no MLflow server is known", got="an empty URL", wanted="http://host:port"
            )
        self.tracking_uri = tracking_uri.rstrip("/")
        self._auth = auth
        self._limits = limits or RequestLimits()
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
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(self._limits.timeout_s),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(self._limits.retries),
            "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a program reads our output
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        }
        if self._auth:
            user, _, password = self._auth.partition(":")
            settings["MLFLOW_TRACKING_USERNAME"] = user
            settings["MLFLOW_TRACKING_PASSWORD"] = password
        os.environ.update(settings)


def _connect(tracking_uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


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
        return NotFound("MLflow knows no such thing", got=first_line, where=where)
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
