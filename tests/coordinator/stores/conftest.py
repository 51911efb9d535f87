"""Every backend of each contract, real: a file, a three-member etcd, a Redis, a PostgreSQL."""

from __future__ import annotations

import itertools
import time

import pytest

from paceline.coordinator.stores import Candidate, MemoryProgress, SqliteAudit, SqliteCoordination
from tests.support.etcd import etcd  # noqa: F401
from tests.support.postgres import postgres  # noqa: F401
from tests.support.redis import redis  # noqa: F401

REAL = pytest.mark.services


class Handles:
    """One store, opened as often as somebody wants; all of it is closed in the end."""

    def __init__(self, opened, address=""):
        self._open, self.address = opened, address
        self._all = []
        self._numbers = itertools.count()

    def open(self):
        self._all.append(self._open())
        return self._all[-1]

    def candidate(self):
        number = next(self._numbers)
        return Candidate(f"r{number}", f"http://127.0.0.1:{9000 + number}")

    def led(self):
        """A store and the term that it leads for."""
        store = self.open()
        term = store.campaign(self.candidate(), lambda: False)
        assert term is not None
        return store, term

    def close(self):
        for each in self._all:
            each.close()


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=REAL)])
def coordination(request, tmp_path):
    """Handles of one coordination store."""
    if request.param == "sqlite":
        path = tmp_path / "c.sqlite"
        made = Handles(lambda: SqliteCoordination(path), f"sqlite {path}")
    else:
        cluster = request.getfixturevalue("etcd")
        prefix = f"/tests/{tmp_path.name}"
        endpoints = " ".join(cluster.access.endpoints)
        made = Handles(lambda: cluster.open(prefix), f"etcd {prefix} {endpoints}")
    yield made
    made.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=REAL)])
def progress(request):
    """One progress store."""
    made = (
        MemoryProgress() if request.param == "memory" else request.getfixturevalue("redis").open()
    )
    yield made
    made.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=REAL)])
def audit(request, tmp_path):
    """Handles of one audit store."""
    if request.param == "sqlite":
        made = Handles(lambda: SqliteAudit(tmp_path / "audit.sqlite"))
    else:
        server = request.getfixturevalue("postgres")
        schema = server.schema()
        made = Handles(lambda: server.open(schema))
    yield made
    made.close()


def until(condition, what, within_s=30.0):
    """Return once ``condition()`` holds; fails after ``within_s``, which nothing should need."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)
