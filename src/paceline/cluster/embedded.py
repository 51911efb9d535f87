"""The servers of the embedded installation, as argv: S3, Prefect, MLflow, Dask, the coordinator.

Also creates the installation's secrets: generated once, stored in its state directory, readable by
its owner only. This module imports none of the servers and no flows; the service that registers
deployments comes from the caller.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.service import Ready, ServiceSpec
from paceline.config import RUNTIME_FILE, Profile, Runtime, Secrets
from paceline.errors import Conflict, InvalidInput, InvalidProfile, MissingTool
from paceline.relay.transport import issue_server, make_authority
from paceline.system import ensure_own_directory, is_loopback, write_private

WORK_POOL = "paceline"
PLAIN = ("s3", "prefect", "mlflow")  # servers without TLS
TLS_DIRECTORY = "dask-tls"  # apart from the coordinator's: it is copied to nodes
# Prefect's worker makes runner_storage/ in the directory of temporary files, which belongs to the
# user of the machine whose worker was first. Children keep theirs, for sockets have short paths.
_PREFECT_WORKER = (
    "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1); from prefect.cli import app; app()"
)
CLUSTER_FILE = "cluster.json"  # below <state>/dask; written once every node has joined


def embedded_services(runtime: Runtime) -> tuple[ServiceSpec, ...]:
    """Return the services of ``runtime``, whose endpoints are already decided."""
    return (
        *([_s3(runtime)] if runtime.secrets.s3_access_key else []),
        _prefect_server(runtime),
        _mlflow(runtime),
        _dask(runtime),
        *_coordinators(runtime),
        _prefect_worker(runtime),
    )


def require_protected(profile: Profile, only: Sequence[str] | None = None) -> None:
    """Raise InvalidProfile where servers would receive passwords unencrypted beyond loopback.

    The coordinator's port has the same rule; this applies it to the servers without TLS. Dask uses
    TLS of its own.
    """
    host, security = profile.services.host, profile.security
    plain = [each for each in PLAIN if only is None or each in only]
    if is_loopback(host) or security.rest_tls == "plaintext-anywhere" or not plain:
        return
    raise InvalidProfile(
        "the embedded servers may not listen there without TLS",
        got=f'[services] host = "{host}" for {", ".join(plain)}, '
        f'[security] rest_tls = "{security.rest_tls}"',
        wanted='[services] host = "127.0.0.1"',
        where=f"profile {profile.name}",
        do="For other machines run Prefect, MLflow and S3 behind TLS and use `paceline init`; or, "
        "where every user of that network may read passwords and models, set [security] "
        'rest_tls = "plaintext-anywhere".',
    )


def port_of(url: str) -> int:
    """Return the port that ``url`` names."""
    return int(url.split("://", 1)[1].split("/", 1)[0].rsplit(":", 1)[1])


def _s3(runtime: Runtime) -> ServiceSpec:
    root = _directory(runtime, "s3")
    _directory(runtime, f"s3/{runtime.profile.storage.bucket}")
    port = port_of(runtime.endpoints.s3_url)
    secrets = runtime.secrets
    return ServiceSpec(
        name="s3",
        argv=(
            _program("rclone"), "serve", "s3",
            "--config", "/dev/null",
            "--addr", f"{runtime.profile.services.host}:{port}",
            "--vfs-cache-mode", "off",
            # ETags identify content, so they must be a hash; this is the cheapest. rclone caches it
            # as long as the directory entry; with a short-lived entry it hashes the whole object
            # again for every range that is read (MD5: 1.6 s per GB).
            "--etag-hash", "XXH128",
            "--dir-cache-time", "24h",
            "--poll-interval", "0",
            "--log-level", "NOTICE",
            str(root),
        ),
        # Not on the command line, where every user of the machine could read it. rclone parses
        # this as a CSV list, hence the quotes around one pair.
        env={"RCLONE_AUTH_KEY": f'"{secrets.s3_access_key},{secrets.s3_secret_key}"'},
        ready=Ready(kind="port", port=port, host=runtime.profile.services.host),
        stop_phase=2,
    )  # fmt: skip


def _prefect_server(runtime: Runtime) -> ServiceSpec:
    home = _directory(runtime, "prefect")
    host = runtime.profile.services.host
    url = runtime.endpoints.prefect_api_url
    port = port_of(url)
    return ServiceSpec(
        name="prefect",
        argv=(_program("prefect"), "server", "start", "--host", host, "--port", str(port)),
        cwd=str(home),
        env={
            "PREFECT_HOME": str(home),
            "PREFECT_SERVER_API_AUTH_STRING": runtime.secrets.prefect_auth,
            "PREFECT_API_AUTH_STRING": runtime.secrets.prefect_auth,
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_API_HOST": host,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"http://{host}:{port}",
            "PREFECT_API_URL": url,
            "PREFECT_UI_API_URL": url,
            # Written at each start; by default beside Prefect's code, which may be read-only.
            "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
            "PREFECT_LOGGING_LEVEL": "WARNING",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        },
        ready=Ready(kind="http", url=f"{url}/health", port=port),
        stop_phase=2,
        stop_grace_s=8,
    )


def _prefect_worker(runtime: Runtime) -> ServiceSpec:
    home = _directory(runtime, "prefect-worker")
    shutil.rmtree(home / "tmp/runner_storage", ignore_errors=True)  # of workers that were killed
    return ServiceSpec(
        name="prefect-worker",
        argv=(
            sys.executable, "-c", _PREFECT_WORKER, str(_directory(runtime, "prefect-worker/tmp")),
            "worker", "start",
            "--pool", WORK_POOL, "--type", "process", "--name", "embedded",
            "--install-policy", "never",
        ),
        cwd=str(home),
        env={
            **runtime.prefect_environment(),
            "PREFECT_HOME": str(home),
            "PREFECT_LOGGING_LEVEL": "INFO",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "paceline",  # stages, for who follows a flow run
            "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
            "PACELINE_STATE": str(runtime.state_dir),
        },
        after=("prefect",),
        blocking=False,  # the demo runs nothing through it
        stop_grace_s=6,
    )  # fmt: skip


def _mlflow(runtime: Runtime) -> ServiceSpec:
    """Return the tracking server, run directly under uvicorn.

    The ``mlflow server`` command does the same in two processes: the imports of the first cost 5
    CPU-seconds and 210 MB. The variables are those that it sets for its worker (mlflow < 3.18,
    pinned).
    """
    home = _directory(runtime, "mlflow")
    host = runtime.profile.services.host
    url = runtime.endpoints.mlflow_url
    port = port_of(url)
    user, password = runtime.secrets.mlflow_auth.split(":", 1)
    settings = home / "auth.ini"
    write_private(
        settings,
        "[mlflow]\n"
        "default_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{home}/auth.db\n"
        f"admin_username = {user}\n"
        f"admin_password = {password}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        # without the cache, hashing the password costs each request tens of milliseconds
        "auth_cache_ttl_seconds = 300\n".encode(),
    )
    token = b"mlflow-flask:" + runtime.secrets.coordinator_token.encode()
    return ServiceSpec(
        name="mlflow",
        argv=(
            sys.executable, "-m", "uvicorn", "--host", host, "--port", str(port),
            "--log-level", "warning", "--factory", "mlflow.server.auth:create_app",
        ),
        cwd=str(home),
        env={
            "MLFLOW_AUTH_CONFIG_PATH": str(settings),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": hashlib.sha256(token).hexdigest(),
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"{host}:{port},localhost:{port}",
            "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"http://{host}:{port}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves 8 processes and 1.5 GB
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{home}/mlflow.db",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(home / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
            "PACELINE_STATE": str(runtime.state_dir),
        },
        # The first request that needs the store creates its tables. The readiness check sends that
        # request, so that two concurrent requests do not both create them.
        ready=Ready(
            kind="http",
            url=f"{url}/api/2.0/mlflow/experiments/search?max_results=1",
            authorization=runtime.secrets.mlflow_auth,
            port=port,
        ),
        stop_phase=1,
    )  # fmt: skip


def _dask(runtime: Runtime) -> ServiceSpec:
    home = _directory(runtime, "dask")
    return ServiceSpec(
        name="dask",
        argv=(
            sys.executable,
            "-m",
            "paceline.cluster.dask_service",
            "--state",
            str(runtime.state_dir),
        ),
        cwd=str(home),
        env={"PACELINE_STATE": str(runtime.state_dir)},
        ready=Ready(
            kind="file",
            path=str(home / CLUSTER_FILE),
            port=port_of(runtime.endpoints.scheduler_address),
        ),
        stop_phase=1,
        stop_grace_s=8,
    )


def _coordinators(runtime: Runtime) -> list[ServiceSpec]:
    """Return one service per coordinator replica; they decide which one leads."""
    urls = runtime.endpoints.coordinator_urls or (runtime.endpoints.coordinator_url,)
    home = str(_directory(runtime, "coordinator"))
    host = runtime.profile.services.host
    specs = []
    for number, url in enumerate(urls, start=1):
        name = "coordinator" if number == 1 else f"coordinator-{number}"
        argv = (
            sys.executable, "-m", "paceline.cli.main", "coordinator",
            "--state", str(runtime.state_dir),
            "--host", host, "--port", str(port_of(url)),
            "--replica-id", name, "--advertise", url,
        )  # fmt: skip
        specs.append(
            ServiceSpec(
                name=name,
                argv=argv,
                cwd=home,
                env={"PACELINE_STATE": str(runtime.state_dir)},
                ready=_answers(f"{url}/healthz", host),
                stop_phase=1,
            )
        )
    return specs


def _answers(url: str, host: str) -> Ready:
    if url.startswith("https:"):  # the check has no CA to verify with: it tests the port only
        return Ready(kind="port", port=port_of(url), host=host)
    return Ready(kind="http", url=url, port=port_of(url))


def _directory(runtime: Runtime, name: str) -> Path:
    path = runtime.state_dir / name
    if any(character in str(path) for character in "?#%\n"):
        raise InvalidInput(
            "state directory cannot be used in a database URL",
            got=str(path),
            wanted="a path without ?, # or %",
            do="Name another one with --state.",
        )
    ensure_own_directory(path)
    return path


def _program(name: str) -> str:
    """Return the path of program ``name`` in this Python's environment, or else on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    if beside.is_file():
        return str(beside)
    if found := shutil.which(name):
        return found
    raise MissingTool(
        "program not found",
        wanted=name,
        where=beside.parent,
        do="Install paceline with its dependencies into this environment.",
    )


SECRETS_FILE = "secrets.json"
VALID_DAYS = 3650


def ensure_secrets(state_dir: Path) -> Secrets:
    """Return the installation's secrets; the first call creates them, later calls read them."""
    path = state_dir / SECRETS_FILE
    if path.is_file():
        return Secrets.model_validate_json(path.read_bytes())
    authority, certificate, key = make_dask_tls(state_dir)
    made = Secrets(
        s3_access_key="paceline" + secrets.token_hex(6),
        s3_secret_key=secrets.token_urlsafe(30),
        coordinator_token=secrets.token_urlsafe(32),
        prefect_auth=f"paceline:{secrets.token_urlsafe(24)}",
        mlflow_auth=f"paceline:{secrets.token_urlsafe(24)}",
        tls_ca=str(authority),
        tls_cert=str(certificate),
        tls_key=str(key),
    )
    write_private(path, made.model_dump_json(indent=2).encode())  # last: the certificates exist
    return made


def make_dask_tls(state_dir: Path) -> tuple[Path, Path, Path]:
    """Make Dask's TLS files in ``<state>/dask-tls`` and return them: CA, certificate, key.

    One certificate for scheduler, workers and clients: each must present one of this CA to Dask.
    Its owner can run code on every node.
    """
    directory = state_dir / TLS_DIRECTORY
    ensure_own_directory(directory)
    authority = make_authority(directory, "paceline installation")
    certificate, key = issue_server(
        authority, ("localhost", "127.0.0.1"), directory, valid_days=VALID_DAYS
    )
    authority.key.unlink()  # it signs nothing more
    return authority.cert, certificate, key


def require_ours(state_dir: Path) -> None:
    """Raise Conflict where `paceline init` or a join created ``state_dir``.

    Its ``runtime.json`` is then the only copy of its secrets. `paceline up` regenerates its own
    ``runtime.json`` from ``secrets.json``.
    """
    if (state_dir / RUNTIME_FILE).exists() and not (state_dir / SECRETS_FILE).exists():
        raise Conflict(
            "the directory was not made by `paceline up`",
            got=f"{RUNTIME_FILE} without {SECRETS_FILE}",
            wanted=f"a directory of `paceline up`; the secrets in {RUNTIME_FILE} are nowhere else",
            where=state_dir,
            do="Name another with --state. End a coordinator or agent of this directory by SIGTERM"
            " (systemctl stop).",
        )


def remove_runtime(state_dir: Path) -> None:
    """Remove the ``runtime.json`` that `paceline up` wrote; Conflict as in `require_ours`."""
    require_ours(state_dir)
    (state_dir / RUNTIME_FILE).unlink(missing_ok=True)
