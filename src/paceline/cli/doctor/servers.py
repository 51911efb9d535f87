"""The checks of `paceline doctor --servers`: what Prefect's and MLflow's servers here are given.

They read the variables that those servers read, before these start: a server that cannot use its
database ends with a page of Python, a check with one line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.cli.doctor.checks import TIMEOUT_S, failed, guarded, ok
from paceline.config import ObjectAccess
from paceline.errors import MissingExtra
from paceline.schemas import Check

DATABASE = "PREFECT_SERVER_DATABASE_"
REDIS = "PREFECT_REDIS_MESSAGING_URL"
MLFLOW = "MLFLOW_BACKEND_STORE_URI"
ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
UPGRADE = (
    "Make a backup, stop every MLflow server, then `mlflow db upgrade $MLFLOW_BACKEND_STORE_URI`."
)


def server_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the databases, Redis and the bucket that ``environment`` names."""
    named = [each for each in (f"{DATABASE}HOST", MLFLOW) if environment.get(each)]
    if not named:
        do = "Load prefect.env or mlflow.env first: `set -a; . FILE; set +a`."
        yield failed("servers", f"neither {DATABASE}HOST nor {MLFLOW} is set", do)
    if environment.get(f"{DATABASE}HOST"):
        yield from _prefect(environment)
    if environment.get(REDIS):
        yield from _redis(environment[REDIS])
    if environment.get(MLFLOW):
        yield from _mlflow(environment[MLFLOW])
    if environment.get(ARTIFACTS, "").startswith("s3://"):
        yield from _artifacts(environment)


@guarded("prefect-database")
def _prefect(environment: Mapping[str, str]) -> Iterator[Check]:
    def get(name: str, default: str = "") -> str:
        return environment.get(f"{DATABASE}{name}", default)

    tls = "SQLALCHEMY_CONNECT_ARGS_TLS_"
    given = {
        "host": get("HOST"),
        "port": get("PORT", "5432"),
        "dbname": get("NAME"),
        "user": get("USER"),
        "password": get("PASSWORD"),
    }
    if get(f"{tls}ENABLED").lower() in ("true", "1"):
        given |= {"sslmode": "verify-full", "sslrootcert": get(f"{tls}CA_FILE") or "system"}
    found = _query(given, "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_trgm'")
    at = f"{given['user']}@{given['host']}/{given['dbname']}"
    if isinstance(found, str):
        do = f"Check PostgreSQL, and {DATABASE}PASSWORD and {tls}* in prefect.env."
        yield failed("prefect-database", f"{at}: {found}", do)
    elif found == [(0,)]:
        do = "Install PostgreSQL's contrib package on its server."
        yield failed("prefect-database", f"{at}: the extension pg_trgm is missing", do)
    else:
        yield ok("prefect-database", f"{at} answers")


@guarded("prefect-redis")
def _redis(url: str) -> Iterator[Check]:
    import redis

    at = urlsplit(url).hostname
    try:
        redis.from_url(url, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S).ping()
    except (redis.RedisError, OSError) as error:
        yield failed("prefect-redis", f"{at}: {_first(error)}", f"Check Redis, and {REDIS}.")
    else:
        yield ok("prefect-redis", f"{at} answers")


@guarded("mlflow-database")
def _mlflow(url: str) -> Iterator[Check]:
    scheme, _, rest = url.partition("://")
    if not scheme.startswith("postgresql"):
        yield ok("mlflow-database", f"{scheme} is not checked")
        return
    parts = urlsplit(url)
    at = f"{parts.username or ''}@{parts.hostname}{parts.path}"
    present = "SELECT to_regclass('alembic_version')"
    found = _query({"conninfo": f"postgresql://{rest}"}, present)
    if isinstance(found, str):
        do = f"Check PostgreSQL, {MLFLOW} and PGPASSWORD in mlflow.env."
        yield failed("mlflow-database", f"{at}: {found}", do)
        return
    yield ok("mlflow-database", f"{at} answers")
    if found == [(None,)]:
        yield ok("mlflow-schema", "none yet: MLflow makes its tables when it starts")
        return
    known, newest = _mlflow_revisions()
    revisions = _query(
        {"conninfo": f"postgresql://{rest}"}, "SELECT version_num FROM alembic_version"
    )
    version = revisions if isinstance(revisions, str) else str(revisions[0][0])
    if version == newest:
        yield ok("mlflow-schema", version)
    elif version in known:
        yield failed(
            "mlflow-schema", f"{version}, one of an older MLflow; wanted {newest}", UPGRADE
        )
    else:
        do = "Install the MLflow that made it; an older one must not write there."
        yield failed("mlflow-schema", f"{version} is not known here; wanted {newest}", do)


@guarded("mlflow-artifacts")
def _artifacts(environment: Mapping[str, str]) -> Iterator[Check]:
    from paceline.storage import ObjectStore

    place = environment[ARTIFACTS].rstrip("/")
    store = ObjectStore(ObjectAccess(endpoint_url=environment.get("MLFLOW_S3_ENDPOINT_URL", "")))
    store.directories(place)
    yield ok("mlflow-artifacts", f"{place} answers")


def _query(given: Mapping[str, str], query: str) -> list[tuple[Any, ...]] | str:
    """Return the rows of ``query``, or one line on why there are none."""
    import psycopg

    try:
        with psycopg.connect(**given, connect_timeout=int(TIMEOUT_S)) as database:  # type: ignore[arg-type]
            return database.execute(query).fetchall()
    except (psycopg.Error, OSError) as error:
        return _first(error)


def _first(error: Exception) -> str:
    """Return the last line that says something: libpq puts the addresses that it tried first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "FATAL" in line), lines[0] if lines else repr(error))


def _mlflow_revisions() -> tuple[set[str], str]:
    """Return the schema's revisions that the installed MLflow knows, and the newest of them."""
    found = importlib.util.find_spec("mlflow")  # its migrations only: importing it takes seconds
    if found is None or found.origin is None:
        raise MissingExtra("MLflow is not installed here", do="Install the wheel's extra control.")
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(found.origin).parent / "store" / "db_migrations"))
    return {each.revision for each in scripts.walk_revisions()}, str(scripts.get_current_head())
