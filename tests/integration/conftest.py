"""State stores for integration tests; the installation is in tests/support/shared.py."""

from tests.support.etcd import etcd  # noqa: F401
from tests.support.postgres import postgres  # noqa: F401
from tests.support.redis import redis  # noqa: F401
