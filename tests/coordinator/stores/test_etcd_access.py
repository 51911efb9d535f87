"""etcd behind TLS with client certificates, users and passwords."""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster import ensure_secrets
from paceline.coordinator.stores import Candidate
from paceline.coordinator.stores.etcd import EtcdAccess, EtcdCoordination
from paceline.errors import AccessDenied, ServiceUnavailable
from tests.coordinator.stores.conftest import REAL, until
from tests.coordinator.stores.effects import expected, told, worker
from tests.support.etcd import etcd_cluster
from tests.support.servers import program

pytestmark = REAL
CANDIDATE = Candidate("r0", "u")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """One member that wants a client's certificate, and a user who may use /allowed/ only."""
    where = tmp_path_factory.mktemp("etcd-guarded")
    made = ensure_secrets(where)
    ca, cert, key = Path(made.tls_ca), Path(made.tls_cert), Path(made.tls_key)
    files = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth"]
    access = EtcdAccess(
        endpoints=(),
        ca=ca.read_bytes(),
        cert=cert.read_bytes(),
        key=key.read_bytes(),
        user="paceline",
        password=secrets.token_hex(8),
    )
    with etcd_cluster(where, 1, access=access, extra=tuple(map(str, files))) as cluster:
        etcdctl = [program("etcdctl"), "--endpoints", cluster.access.endpoints[0]]
        etcdctl += ["--cacert", str(ca), "--cert", str(cert), "--key", str(key)]
        for command in (
            "user add root:root",
            "user grant-role root root",
            f"user add paceline:{access.password}",
            "role add paceline",
            "role grant-permission paceline --prefix=true readwrite /allowed/",
            "user grant-role paceline paceline",
            "auth enable",
        ):
            subprocess.run(
                [*etcdctl, *command.split()], check=True, capture_output=True, timeout=30
            )
        yield cluster


def test_a_store_behind_tls_and_a_password_works(guarded):
    store = guarded.open("/allowed/one")
    term = store.campaign(CANDIDATE, lambda: False)
    effects = [worker(f"w{number}") for number in range(300)]
    store.commit(term, [*effects, told(1)])
    assert store.load(0.0) == expected(effects)
    seen = store.revision()
    store.commit(term, [worker("w0")])
    assert store.revision() > seen
    store.close()


def test_a_token_that_etcd_forgot_is_replaced(guarded):
    store = guarded.open("/allowed/two")
    term = store.campaign(CANDIDATE, lambda: False)
    guarded.members[0].kill()  # tokens are in its memory
    guarded.members[0].start()

    def kept():
        try:
            store.load(0.0)
            return store.commit(term, [told(1)])
        except ServiceUnavailable:
            return None

    until(kept, "a commit with a new token")
    store.close()


def test_a_wrong_password_and_a_foreign_prefix_are_refused(guarded):
    for store in (
        EtcdCoordination(replace(guarded.access, password="wrong"), "/allowed/x", lease_s=2.0),
        guarded.open("/foreign"),
    ):
        with pytest.raises(AccessDenied, match="etcd"):
            store.load(0.0)
        tries = iter(range(3))
        assert store.campaign(CANDIDATE, lambda tries=tries: next(tries, None) is None) is None
        store.close()


def test_without_a_certificate_or_with_another_authority_nothing_is_said(guarded, tmp_path):
    other = Path(ensure_secrets(tmp_path).tls_ca).read_bytes()
    for access in (
        replace(guarded.access, cert=None, key=None),
        replace(guarded.access, ca=other),
    ):
        store = EtcdCoordination(access, "/allowed/x", lease_s=2.0)
        with pytest.raises(ServiceUnavailable):
            store.check()
        store.close()


def test_after_a_restore_an_operator_sets_the_epoch(etcd):
    store = etcd.open("/tests/restored")
    first = store.campaign(CANDIDATE, lambda: False)
    store.resign(first)
    etcdctl = [program("etcdctl"), "--endpoints", ",".join(etcd.access.endpoints)]
    put = [*etcdctl, "put", "/tests/restored/meta/epoch", "1000"]
    subprocess.run(put, check=True, capture_output=True, timeout=30)
    assert store.campaign(CANDIDATE, lambda: False).epoch == 1001
    store.close()
