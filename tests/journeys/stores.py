"""The state stores of a fleet as an operator runs them: etcd, Redis and PostgreSQL with TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.journeys.hosts import Host, until

PASSWORD = "operatorspassword"
POSTGRES = "/usr/lib/postgresql/15/bin"
AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


class Authority:
    """A private certificate authority, made with openssl."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=operator"),
        )

    def issue(self, host: Host) -> None:
        """Write ``pki/{ca,cert,key}.pem`` on ``host``, with its address as its name."""
        name = f"host-{host.index}"
        (self._directory / "ext").write_text(f"subjectAltName=IP:{host.address},DNS:{name}\n")
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", f"{name}.pem"),
        )
        for name_there, here in (("ca", "ca.pem"), ("cert", f"{name}.pem"), ("key", f"{name}.key")):
            host.write(f"pki/{name_there}.pem", (self._directory / here).read_text())

    def _openssl(self, *argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=self._directory, check=True, capture_output=True)


def start_etcd(members: Sequence[Host], logs: Path) -> list[str]:
    """Start one member a host; return the endpoints."""
    peers = ",".join(f"e{each.index}=https://{each.address}:2380" for each in members)
    for each in members:
        client, peer = f"https://{each.address}:2379", f"https://{each.address}:2380"
        pair = ("cert-file=pki/cert.pem", "key-file=pki/key.pem", "trusted-ca-file=pki/ca.pem")
        each.start(
            *("etcd", "--name", f"e{each.index}", "--data-dir", "etcd", "--pre-vote"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", peers, "--initial-cluster-state", "new"),
            *("--client-cert-auth", "--peer-client-cert-auth", "--log-level", "warn"),
            *(f"--{option}" for option in pair),
            *(f"--peer-{option}" for option in pair),
            log=logs / f"etcd-{each.index}",
        )
    endpoints = [f"https://{each.address}:2379" for each in members]
    until(lambda: etcdctl(members[0], endpoints, "endpoint", "health").code == 0, "etcd is healthy")
    return endpoints


def etcdctl(host: Host, endpoints: Sequence[str], *argv: str):  # type: ignore[no-untyped-def]
    return host.run(
        *("etcdctl", "--endpoints", ",".join(endpoints), "--cacert", "pki/ca.pem"),
        *("--cert", "pki/cert.pem", "--key", "pki/key.pem", *argv),
        env={"ETCDCTL_API": "3"},
    )


def start_redis(host: Host, logs: Path) -> str:
    """Start Redis with TLS and a password; return its URL."""
    host.start(
        *("redis-server", "--port", "0", "--tls-port", "6379", "--bind", host.address),
        *("--tls-cert-file", "pki/cert.pem", "--tls-key-file", "pki/key.pem"),
        *("--tls-ca-cert-file", "pki/ca.pem", "--tls-auth-clients", "no"),
        *("--requirepass", PASSWORD, "--save", "", "--appendonly", "no"),
        log=logs / "redis",
    )
    return f"rediss://{host.address}:6379/0"


def start_postgres(host: Host, logs: Path) -> str:
    """Make and start PostgreSQL with TLS, a user and a database; return its URL."""
    prepare_postgres(host)
    host.run(
        *AS_POSTGRES,
        *(f"{POSTGRES}/initdb", "-D", "/srv/postgres/data", "-U", "paceline", "-A"),
        *("scram-sha-256", "--pwfile", "/srv/postgres/password"),
        root=True,
        at="/srv/postgres",
    ).ok()
    host.run(
        *("sh", "-ec"),
        "for each in all replication; do echo hostssl $each all 0.0.0.0/0 scram-sha-256; done"
        " >> /srv/postgres/data/pg_hba.conf",
        root=True,
    ).ok()
    return run_postgres(host, logs, "CREATE DATABASE fleet")


def prepare_postgres(host: Host) -> None:
    """Make the home of PostgreSQL on ``host``."""
    host.run(
        *("sh", "-ec"),
        "install -d -o postgres /srv/postgres; cp pki/*.pem /srv/postgres;"
        " chown -R postgres /srv/postgres; chmod 600 /srv/postgres/key.pem;"
        f" echo {PASSWORD} > /srv/postgres/password",
        root=True,
        at="/home/user",
    ).ok()


def run_postgres(host: Host, logs: Path, statement: str) -> str:
    """Start PostgreSQL, wait until it answers ``statement``; return the URL of the database."""
    options = {
        "listen_addresses": host.address,
        "unix_socket_directories": "/srv/postgres",
        "ssl": "on",
        "ssl_cert_file": "/srv/postgres/cert.pem",
        "ssl_key_file": "/srv/postgres/key.pem",
    }
    host.start(
        *(*AS_POSTGRES, f"{POSTGRES}/postgres", "-D", "/srv/postgres/data"),
        *(word for key, value in options.items() for word in ("-c", f"{key}={value}")),
        log=logs / f"postgres-{host.index}",
        root=True,
        at="/srv/postgres",
    )
    url = f"postgresql://paceline@{host.address}/postgres?sslmode=verify-full"
    psql = ("psql", f"{url}&sslrootcert=/home/user/pki/ca.pem", "-c", statement)
    until(lambda: host.run(*psql, env={"PGPASSWORD": PASSWORD}).code == 0, "PostgreSQL answers")
    return url.replace("/postgres?", "/fleet?") + "&sslrootcert=/home/user/pki/ca.pem"


def start_three_stores(
    replicas: Sequence[Host], host: Host, directory: Path, logs: Path
) -> dict[str, str]:
    """Start etcd on ``replicas``, Redis and PostgreSQL on ``host``, with certificates of an
    authority in ``directory``; return REDIS and POSTGRES of the page."""
    authority = Authority(directory)
    for each in (*replicas, host):
        authority.issue(each)
    start_etcd(replicas, logs)
    start_redis(host, logs)
    start_postgres(host, logs)
    return {"REDIS": host.address, "POSTGRES": host.address}
