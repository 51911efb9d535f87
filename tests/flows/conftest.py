"""The one Prefect server and the one MLflow server of the session."""

from tests.support.mlflow_server import mlflow_url  # noqa: F401 - the fixture
from tests.support.prefect_server import prefect_server  # noqa: F401 - the fixture
