"""Prefect's and MLflow's servers as they are called without their libraries: who we are, and which
certificates count.

Where an installation has no secret of its own for a server, the environment is read as Prefect's
and MLflow's own clients read it, so that one setting reaches both.
"""

from __future__ import annotations

import os
import ssl

from paceline.system import Endpoint, HttpServer, basic_authorization


def prefect_server(url: str) -> HttpServer:
    """Return the server at ``url``. Raises InvalidInput for what is no URL."""
    return _server(url, "Prefect's server", "PREFECT_API_SSL_CERT_FILE")


def prefect_headers(own: str = "") -> dict[str, str]:
    """Return the header that says who calls Prefect: ``own`` ("user:password"), else
    $PREFECT_API_AUTH_STRING, else the token $PREFECT_API_KEY (Prefect Cloud); none without any.
    """
    named = own or os.environ.get("PREFECT_API_AUTH_STRING", "")
    return basic_authorization(named) or _bearer("PREFECT_API_KEY")


def mlflow_server(url: str) -> HttpServer:
    """Return the server at ``url``. Raises InvalidInput for what is no URL."""
    return _server(url, "MLflow", "MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE")


def mlflow_headers(own: str = "") -> dict[str, str]:
    """Return the header that says who calls MLflow: ``own`` ("user:password"), else
    $MLFLOW_TRACKING_USERNAME with its password, else the token $MLFLOW_TRACKING_TOKEN; none
    without any.
    """
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{x}", "") for x in ("USERNAME", "PASSWORD"))
    named = own or (f"{user}:{password}" if user and password else "")
    return basic_authorization(named) or _bearer("MLFLOW_TRACKING_TOKEN")


def _server(url: str, name: str, *authorities: str) -> HttpServer:
    endpoint = Endpoint.of(url)
    file = next((os.environ[each] for each in authorities if os.environ.get(each)), None)
    tls = ssl.create_default_context(cafile=file) if endpoint.secure else None
    return HttpServer(endpoint, name=name, do="Check that it runs.", tls=tls)


def _bearer(variable: str) -> dict[str, str]:
    token = os.environ.get(variable, "")
    return {"Authorization": f"Bearer {token}"} if token else {}
