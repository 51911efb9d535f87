"""A real PostgreSQL on loopback, with a password; a schema for each who asks."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from paceline.coordinator.stores import PostgresAudit
from tests.support.servers import Server, free_port, program

USER = "paceline"


@dataclass
class PostgresServer:
    """The process, and how to reach it."""

    server: Server
    port: int
    password: str

    def url(self, schema: str = "public") -> str:
        """Return the URL of a schema, without the password."""
        where = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"
        return f"{where}?options=-csearch_path%3D{schema}"

    def connect(self, schema: str = "public") -> psycopg.Connection:
        """Return a connection that commits each statement."""
        return psycopg.connect(self.url(schema), password=self.password, autocommit=True)

    def schema(self) -> str:
        """Create a schema, which is quicker than a database, and return its name."""
        name = f"t{secrets.token_hex(6)}"
        with self.connect() as db:
            db.execute(f"CREATE SCHEMA {name}")  # type: ignore[arg-type]
        return name

    def open(self, schema: str | None = None) -> PostgresAudit:
        """Return a store in a schema of its own, or in ``schema``."""
        return PostgresAudit(self.url(schema or self.schema()), password=self.password)

    def processes(self) -> list[int]:
        """Return the server's process and all its children."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        return [self.server.pid, *map(int, children.split())]

    def kill(self) -> None:
        """End every process of it at once."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.server.kill()

    def freeze(self) -> None:
        """Stop every process of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all of them go on."""
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Make a database cluster and start a server on it; as ``postgres`` where we are root."""
    initdb, binary = program("initdb"), program("postgres")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    user = "postgres" if os.geteuid() == 0 else None
    # Not below pytest's directory: that one is closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="paceline-postgres-"))
    password, port = secrets.token_hex(12), free_port()
    secret = directory / "password"
    secret.write_text(password)
    if user is not None:
        owner = pwd.getpwnam(user)
        for each in (directory, secret):
            os.chown(each, owner.pw_uid, owner.pw_gid)
    try:
        ran_as = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if user else []
        made = [initdb, "-D", str(directory / "data"), "-U", USER, "--pwfile", str(secret)]
        made += ["--auth", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale", "C"]
        subprocess.run([*ran_as, *made], check=True, capture_output=True, timeout=60, cwd=directory)
        argv = [binary, "-D", str(directory / "data"), "-p", str(port), "-k", str(directory)]
        argv += ["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=40", "-c", "fsync=off"]
        name = f"postgresql {version.stdout.split()[2]}"
        found = PostgresServer(
            Server(name, argv, directory, lambda: True, user=user), port, password
        )
        found.server._ready = lambda: _ready(found)
        found.server.start()
        try:
            yield found
        finally:
            found.server.stop(signal.SIGQUIT)  # at once: nobody needs the data any more
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _ready(server: PostgresServer) -> bool:
    try:
        server.connect().close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield this session's PostgreSQL; use a schema of your own and leave it running."""
    with postgres_server() as server:
        yield server
