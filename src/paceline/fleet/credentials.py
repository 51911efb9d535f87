"""The secrets of one installation: generated once, kept in its state directory, readable by its
owner.

Knows nothing of the servers that use them.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path

from paceline.errors import Conflict
from paceline.profile import RUNTIME_FILE, Secrets, write_private
from paceline.system.files import own_directory

SECRETS_FILE = "secrets.json"
_VALIDITY = datetime.timedelta(days=3650)


def ensure_secrets(state_dir: Path) -> Secrets:
    """Return the installation's secrets, made at the first call and the same ever after."""
    path = state_dir / SECRETS_FILE
    if path.is_file():
        return Secrets.model_validate_json(path.read_bytes())
    directory = state_dir / "tls"
    own_directory(directory)
    made = Secrets(
        s3_access_key="paceline" + secrets.token_hex(6),
        s3_secret_key=secrets.token_urlsafe(30),
        coordinator_token=secrets.token_urlsafe(32),
        prefect_auth=f"paceline:{secrets.token_urlsafe(24)}",
        mlflow_auth=f"paceline:{secrets.token_urlsafe(24)}",
        tls_ca=str(directory / "ca.pem"),
        tls_cert=str(directory / "node.pem"),
        tls_key=str(directory / "node-key.pem"),
    )
    _write_certificates(Path(made.tls_ca), Path(made.tls_cert), Path(made.tls_key))
    write_private(path, made.model_dump_json(indent=2).encode())  # last: it vouches for the rest
    return made


def require_ours(state_dir: Path) -> None:
    """Raise Conflict where `paceline init` or a join made ``state_dir``: its ``runtime.json`` is
    the only place of its secrets. That of `paceline up` is made again from ``secrets.json``.
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
    """Remove the ``runtime.json`` that `paceline up` wrote; raises Conflict as `require_ours`."""
    require_ours(state_dir)
    (state_dir / RUNTIME_FILE).unlink(missing_ok=True)


def _write_certificates(ca_path: Path, cert_path: Path, key_path: Path) -> None:
    # One certificate for scheduler, workers and clients: Dask asks each to present one of this CA.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)

    def builder(name: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + _VALIDITY)
        )

    ca_key = ec.generate_private_key(ec.SECP256R1())
    node_key = ec.generate_private_key(ec.SECP256R1())
    ca = (
        builder("paceline installation", "paceline installation", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    node = (
        builder("paceline node", "paceline installation", node_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    write_private(ca_path, ca.public_bytes(Encoding.PEM))  # the CA's key is not kept
    write_private(cert_path, node.public_bytes(Encoding.PEM))
    write_private(
        key_path, node_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
