"""A node joins over TLS with a one-time token, works with what it got, and renews it."""

import contextlib
import json
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509

from paceline.client import AccessClient, CoordinatorClient
from paceline.config import load_runtime
from paceline.errors import AccessDenied, Conflict, InvalidInput, ServiceUnavailable
from paceline.relay import Renewal, join
from paceline.relay.transport import (
    TcpTransport,
    TlsSettings,
    ensure_authority,
    fingerprint,
    new_request,
    peer_ids,
    tls_for,
)
from paceline.schemas import (
    CreateJoinToken,
    CreateToken,
    DeploymentStatus,
    Heartbeat,
    JoinWorker,
    RegisterWorker,
    Scope,
    WorkerStatus,
)
from tests.api.conftest import PATIENT, creation, make_model, make_runtime, running
from tests.support.command import paceline

DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A coordinator process that speaks TLS with a certificate of its own authority."""
    runtime = make_runtime(tmp_path_factory.mktemp("tls") / "state")
    given = {"rest_tls": "installation", "source_roots": (str(runtime.state_dir),), **PATIENT}
    security = runtime.profile.security.model_copy(update=given)
    runtime = runtime.model_copy(
        update={"profile": runtime.profile.model_copy(update={"security": security})}
    )
    with running(runtime) as server:
        yield server


@pytest.fixture
def admin(served):
    ca = served.runtime.state_dir / "authority" / "ca.pem"
    client = AccessClient(served.url, served.runtime.secrets.coordinator_token, ca=ca)
    yield client
    client.close()


def join_token(admin, worker_id, ttl_seconds=600.0):
    return admin.create_join_token(
        CreateJoinToken(worker_id=worker_id, ttl_seconds=ttl_seconds)
    ).token


def register(client, worker_id):
    call = RegisterWorker(worker_id=worker_id, hostname="h", rack="r", available_storage=1)
    return client.register(call)


def refused_rows(admin, what):
    end_s = time.monotonic() + DEADLINE_S
    while True:
        rows = admin.audit(names=["change.refused"], newest_first=True)
        found = [each for each in rows if each.data["what"] == what]
        if found:
            return found
        assert time.monotonic() < end_s, f"no row of {what}"
        time.sleep(0.05)


def test_the_port_speaks_tls_only_under_names_certified_by_the_authority(served, admin):
    assert served.url.startswith("https://127.0.0.1:")
    assert admin.tokens() is not None
    with pytest.raises(ServiceUnavailable):
        CoordinatorClient(served.url.replace("https", "http"), "t").workers()
    with pytest.raises(ServiceUnavailable) as caught:  # the system's authorities do not know it
        CoordinatorClient(served.url, served.runtime.secrets.coordinator_token).workers()
    assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.got)
    host, port = served.url.removeprefix("https://").split(":")
    context = ssl.create_default_context(
        cafile=str(served.runtime.state_dir / "authority" / "ca.pem")
    )
    with socket.create_connection((host, int(port)), 10) as plain:
        with pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(plain, server_hostname="elsewhere.example")
    old = ssl.create_default_context(cafile=str(served.runtime.state_dir / "authority" / "ca.pem"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((host, int(port)), 10) as plain:
        with pytest.raises(ssl.SSLError):
            old.wrap_socket(plain, server_hostname=host)


def test_a_node_joins_once_and_what_it_keeps_is_its_own(served, admin, tmp_path):
    token = join_token(admin, "node-1")
    node = tmp_path / "node"
    assert join(node, "node-1", served.url, token) is True
    runtime = load_runtime(node)
    # The identity is the worker's, of this authority, and the key lies on the node alone.
    tls = tls_for(runtime, "node-1")
    assert tls is not None
    certificate = x509.load_pem_x509_certificate(tls.cert.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert peer_ids(uris) == ["node-1"]
    authority = ensure_authority(served.runtime.state_dir / "authority")
    assert tls.ca.read_bytes() == authority.cert.read_bytes()
    TcpTransport(runtime.secrets.peers_token, tls)  # OpenSSL takes both
    assert runtime.secrets.peers_token == served.runtime.secrets.peers_token
    key = tls.key.read_bytes().split(b"-----END PRIVATE KEY-----")[0]
    for path in served.runtime.state_dir.rglob("*"):
        if path.is_file():
            assert key not in path.read_bytes(), path
    for path in [node / "runtime.json", *(node / "identity").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    # The token opens a worker's calls, for this worker only.
    client = CoordinatorClient.of(runtime, worker=True)
    assert register(client, "node-1").registered
    with pytest.raises(AccessDenied):
        register(client, "node-2")
    with pytest.raises(AccessDenied):
        client.deployments()
    assert runtime.secrets.coordinator_token == ""
    secret = served.runtime.secrets
    assert secret.coordinator_token not in (node / "runtime.json").read_text()
    # Starting again with the same arguments spends nothing and changes nothing.
    before = (node / "runtime.json").read_bytes()
    assert join(node, "node-1", served.url, token) is False
    assert (node / "runtime.json").read_bytes() == before
    with pytest.raises(Conflict):
        join(node, "node-2", served.url, token)


def test_who_is_taken_out_is_named_to_everybody_else_until_it_joins_again(served, admin, tmp_path):
    clients = {}
    for worker_id in ("node-8", "node-9"):
        home = tmp_path / worker_id
        join(home, worker_id, served.url, join_token(admin, worker_id))
        clients[worker_id] = CoordinatorClient.of(load_runtime(home), worker=True)
        register(clients[worker_id], worker_id)
    beat = Heartbeat(worker_id="node-9", status=WorkerStatus.IDLE, incarnation=1)
    assert "node-8" not in clients["node-9"].heartbeat(beat).barred
    mine = [each for each in admin.tokens() if each.worker_id == "node-8" and each.kind == "access"]
    admin.revoke_token(mine[-1].token_id)
    assert clients["node-9"].heartbeat(beat).barred == ("node-8",)
    with pytest.raises(AccessDenied):
        register(clients["node-8"], "node-8")
    join(tmp_path / "again", "node-8", served.url, join_token(admin, "node-8"))
    barred = clients["node-9"].heartbeat(beat).barred
    assert "node-8" not in barred
    assert len(barred) == 1, "the certificate of before, by its admission"


def test_a_join_token_works_once_and_the_second_use_is_recorded(served, admin, tmp_path):
    token = join_token(admin, "node-3")
    join(tmp_path / "first", "node-3", served.url, token)
    with pytest.raises(AccessDenied) as caught:
        join(tmp_path / "second", "node-3", served.url, token)
    assert "used already" in caught.value.what
    assert caught.value.do
    assert not (tmp_path / "second" / "runtime.json").exists()
    row = refused_rows(admin, "POST /workers/join")[0]
    assert row.data["outcome"] == "403 AccessDenied"
    assert row.data["address"] == "127.0.0.1"


def test_many_at_once_with_one_token_are_one_worker(served, admin):
    from concurrent.futures import ThreadPoolExecutor

    token = join_token(admin, "node-4")
    ca = served.runtime.state_dir / "authority" / "ca.pem"

    def once(_):
        request = new_request("node-4")[1].decode()  # of a key of its own
        client = AccessClient(served.url, token, ca=ca)
        try:
            return client.join(JoinWorker(worker_id="node-4", csr=request)).token
        except AccessDenied:
            return None
        finally:
            client.close()

    with ThreadPoolExecutor(8) as pool:
        got = [each for each in pool.map(once, range(8)) if each]
    assert len(got) == 1


@pytest.mark.parametrize(
    "case", ["other worker", "expired", "no token", "other authority", "plain"]
)
def test_joining_is_refused_before_anything_is_left_behind(served, admin, tmp_path, case):
    token, worker_id, url = join_token(admin, "node-5"), "node-5", served.url
    expected: type[Exception] = AccessDenied
    if case == "other worker":
        worker_id = "node-6"
    elif case == "expired":
        token = join_token(admin, "node-5", 0.001)
    elif case == "no token":
        token, expected = "pl_nonsense", InvalidInput
    elif case == "other authority":
        token = token[:-64] + "0" * 64
    else:
        url, expected = "http://192.0.2.1:1", InvalidInput
    with pytest.raises(expected) as caught:
        join(tmp_path / "node", worker_id, url, token)
    assert caught.value.do or caught.value.wanted
    if case == "other authority":  # noticed before the token was shown to whoever answers there
        assert "not the coordinator that the fingerprint is of" in caught.value.what
    assert not (tmp_path / "node" / "runtime.json").exists()
    assert not (tmp_path / "node" / "identity" / "identity.json").exists()


def rsa_request():
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(Encoding.PEM).decode()


def forged_request():
    import base64

    pem = new_request("node-7")[1].decode()
    body = bytearray(base64.b64decode("".join(pem.splitlines()[1:-1])))
    body[-1] ^= 1
    text = base64.encodebytes(bytes(body)).decode()
    head, tail = "-----BEGIN CERTIFICATE REQUEST-----", "-----END CERTIFICATE REQUEST-----"
    return f"{head}\n{text}{tail}\n"


@pytest.mark.parametrize("make", [rsa_request, forged_request, lambda: "x", lambda: "-" * 16384])
def test_a_bad_request_is_refused_and_spends_nothing(served, admin, make):
    token = join_token(admin, "node-7")
    ca = served.runtime.state_dir / "authority" / "ca.pem"
    client = AccessClient(served.url, token, ca=ca)
    with pytest.raises(InvalidInput):
        client.join(JoinWorker(worker_id="node-7", csr=make()))
    good = new_request("node-7")[1].decode()
    assert client.join(JoinWorker(worker_id="node-7", csr=good)).worker_id == "node-7"
    client.close()


def test_an_unbound_token_cannot_take_an_identity(served, admin):
    token = admin.create_token(CreateToken(name="loose", scopes=(Scope.WORKER,))).token
    ca = served.runtime.state_dir / "authority" / "ca.pem"
    request = new_request("node-8")[1].decode()
    for each in (token, served.runtime.secrets.agents_token):
        client = AccessClient(served.url, each, ca=ca)
        with pytest.raises(AccessDenied) as caught:
            client.renew(JoinWorker(worker_id="node-8", csr=request))
        assert caught.value.what == "the token is not that worker's"
        assert "paceline tokens join" in caught.value.do
        client.close()


def test_an_identity_is_renewed_in_time_and_the_previous_one_is_revoked(served, admin, tmp_path):
    node = tmp_path / "node"
    join(node, "node-14", served.url, join_token(admin, "node-14"))
    first = load_runtime(node)
    renewed = []
    ahead_s = 0.0
    renewal = Renewal(first, on_renewed=renewed.append, wall=lambda: time.time() + ahead_s)
    assert renewal.renew_if_due() is False, "a third of its life is left"
    about = json.loads((node / "identity" / "identity.json").read_text())
    assert about["renew_at"] < about["expires_at"]
    old_certificate = (node / "identity" / "node.pem").read_bytes()
    ahead_s = about["renew_at"] - time.time() + 1
    assert renewal.renew_if_due() is True
    second = load_runtime(node)
    assert renewed == [second]
    assert (node / "identity" / "node.pem").read_bytes() != old_certificate
    # Both work: the answer might have been lost. The next renewal ends the first.
    for each in (first, second):
        assert register(CoordinatorClient.of(each, worker=True), "node-14").registered
    ahead_s += about["renew_at"] - time.time() + 1
    assert renewal.renew_if_due() is True
    with pytest.raises(AccessDenied):
        register(CoordinatorClient.of(first, worker=True), "node-14")
    assert register(CoordinatorClient.of(load_runtime(node), worker=True), "node-14").registered


def test_a_second_host_under_the_name_of_a_living_worker_is_refused(served, admin, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    join(first, "node-15", served.url, join_token(admin, "node-15"))
    client = CoordinatorClient.of(load_runtime(first), worker=True)
    beat = Heartbeat(worker_id="node-15", status=WorkerStatus.IDLE, incarnation=1)
    register(client, "node-15")
    token = join_token(admin, "node-15")
    with pytest.raises(Conflict):
        join(second, "node-15", served.url, token)
    assert not second.exists()
    assert client.heartbeat(beat).go_on, "the first works on"
    admin.revoke_worker("node-15")
    assert join(second, "node-15", served.url, join_token(admin, "node-15"))


def test_a_running_server_takes_a_renewed_certificate(served, admin, tmp_path):
    """The TLS context that streams are accepted with shows the new certificate after reload."""
    node = tmp_path / "node"
    join(node, "node-11", served.url, join_token(admin, "node-11"))
    runtime = load_runtime(node)
    tls = tls_for(runtime, "node-11")
    transport = TcpTransport(runtime.secrets.peers_token, tls)

    def shown():
        left, right = socket.socketpair()
        import threading

        def accept():
            with contextlib.suppress(OSError):
                transport.server_tls.wrap_socket(left, server_side=True).close()

        thread = threading.Thread(target=accept)
        thread.start()
        with transport.client_tls.wrap_socket(right) as seen:
            raw = seen.getpeercert(binary_form=True)
        thread.join(10)
        left.close()
        return raw

    before = shown()
    renewal = Renewal(runtime, on_renewed=lambda _: transport.reload(), wall=lambda: 4e9)
    assert renewal.renew_if_due()
    after = shown()
    assert before != after
    kept = x509.load_pem_x509_certificate(tls.cert.read_bytes())
    assert x509.load_der_x509_certificate(after) == kept


def test_an_agent_without_its_token_file_leaves_nothing(tmp_path):
    url, node = "https://127.0.0.1:1", tmp_path / "node"
    words = ["--worker-id", "w", "--state", node, "--coordinator", url]
    done = paceline("agent", *words, "--join", f"@{tmp_path / 'token'}")
    assert done.returncode == 1
    assert "no such file with a join token" in done.stderr
    assert not node.exists()


def test_two_joined_nodes_relay_a_model_over_mutual_tls(served, admin, tmp_path):
    """Everything they have came with joining: the source's roots, the peers' protection, the CA."""
    source, _ = make_model(served.runtime.state_dir, version="v7")
    names, processes = ("relay-1", "relay-2"), []
    try:
        for name in names:
            secret = tmp_path / f"{name}.token"
            if name == "relay-1":  # joined before: it needs no token file any more
                join(tmp_path / name, name, served.url, join_token(admin, name))
                assert join(tmp_path / name, name, served.url, "") is False
            else:
                secret.write_text(join_token(admin, name) + "\n")
            argv = [sys.executable, "-m", "paceline.cli.main", "agent", "--worker-id", name]
            argv += ["--state", str(tmp_path / name), "--coordinator", served.url]
            argv += ["--join", f"@{secret}"]
            with (tmp_path / f"{name}.log").open("ab") as log:
                processes.append(subprocess.Popen(argv, stdout=log, stderr=log))
        call = creation(source, list(names), version="v7", topology="chain")
        deployment_id = admin.create(call, "relay-1").deployment_id
        end_s = time.monotonic() + DEADLINE_S
        while admin.deployment(deployment_id).status is not DeploymentStatus.COMPLETE:
            logs = "".join((tmp_path / f"{name}.log").read_text() for name in names)
            assert time.monotonic() < end_s, logs
            time.sleep(0.1)
        for name in names:
            settings = load_runtime(tmp_path / name).profile.security
            assert settings.peer_tls == "mtls"
            kept = tmp_path / name / "nodes" / name / "store" / "models" / "m" / "v7" / "model.bin"
            assert kept.read_bytes() == (Path(source) / "model.bin").read_bytes()
        received = [each.receipt for each in admin.workers_of(deployment_id)]
        assert sorted(each.origin_bytes > 0 for each in received) == [False, True], (
            "one from a peer"
        )
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert process.wait(20) == 0


def test_the_authority_is_made_once_however_many_ask(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: ensure_authority(tmp_path / "ca"), range(8)))
    assert len({fingerprint(each.cert.read_bytes()) for each in made}) == 1
    assert stat.S_IMODE(Path(made[0].key).stat().st_mode) == 0o600
    TlsSettings(ca=made[0].cert, cert=made[0].cert, key=made[0].key).read()
