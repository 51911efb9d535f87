"""The one PostgreSQL of the session."""

from tests.support.postgres import postgres  # noqa: F401 - the fixture
