"""The one Prefect server of the session."""

from tests.support.prefect_server import prefect_server  # noqa: F401 - the fixture
