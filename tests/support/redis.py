"""A real Redis on loopback, with a password."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.coordinator.stores import RedisProgress
from tests.support.servers import Server, answers, free_port, program


@dataclass
class RedisServer:
    """The process, and how to reach it."""

    server: Server
    port: int
    password: str

    def open(self, prefix: str | None = None) -> RedisProgress:
        """Return a store of its own, or on ``prefix``."""
        return RedisProgress(
            f"redis://127.0.0.1:{self.port}/0",
            prefix=prefix or f"tests:{secrets.token_hex(6)}",
            password=self.password,
        )

    def wipe(self) -> None:
        """Have it forget everything."""
        import redis

        with redis.Redis(port=self.port, password=self.password) as client:
            client.flushall()


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """Start a Redis that keeps nothing on disk."""
    binary = program("redis-server")
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    version = said.stdout.split("v=")[1].split()[0]
    port, password = free_port(), secrets.token_hex(12)
    argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--requirepass", password]
    argv += ["--save", "", "--appendonly", "no", "--dir", str(directory)]
    server = Server(f"redis {version}", argv, directory, lambda: answers(port))
    server.start()
    try:
        yield RedisServer(server, port, password)
    finally:
        server.kill()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield this session's Redis; use a prefix of your own and leave it running."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
