"""Who a worker is, as a certificate says it: a cluster's authority and the identities it issues.

A worker's certificate carries its id as the URI ``paceline://worker/<id>``. gRPC can only compare
host names, so the same id is there as a DNS name too (hashed, since ids are not host names). Keys
are P-256, files are readable by their owner only. Who may have which identity is not decided here.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput
from paceline.relay.wires.tls import TlsSettings, valid_name, worker_host_name, worker_uri

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 365
_SKEW = datetime.timedelta(hours=1)  # clocks of two nodes may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Paths of a cluster's CA: everybody needs ``cert``, only who issues needs ``key``."""

    cert: Path
    key: Path


def make_authority(directory: Path, name: str = "paceline cluster") -> Authority:
    """Make a CA in ``directory`` (``ca.pem``, ``ca-key.pem``, mode 0600) and return it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = _name(name)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(issues=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    made = Authority(cert=directory / "ca.pem", key=directory / "ca-key.pem")
    directory.mkdir(parents=True, exist_ok=True)
    _write_private(made.key, _key_pem(key))
    _write_private(made.cert, _certificate_pem(certificate))
    return made


def issue_identity(
    authority: Authority,
    worker_id: str,
    directory: Path,
    *,
    valid_from: datetime.datetime | None = None,
    valid_days: float = IDENTITY_DAYS,
) -> TlsSettings:
    """Make ``worker_id``'s certificate and key in ``directory`` and return the paths to run with.

    Raises InvalidInput where the id is not a name or the authority cannot be read.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if not valid_name(worker_id):
        raise InvalidInput("not a worker id", got=repr(worker_id), wanted="letters, digits, . _ -")
    try:
        issuer = x509.load_pem_x509_certificate(authority.cert.read_bytes())
        issuer_key = load_pem_private_key(authority.key.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "the authority cannot be read", got=error, where=authority.cert.parent
        ) from error
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise InvalidInput("not an authority's key", where=authority.key, wanted="a P-256 key")
    key = ec.generate_private_key(ec.SECP256R1())
    start = valid_from or datetime.datetime.now(datetime.UTC) - _SKEW
    names = [
        x509.UniformResourceIdentifier(worker_uri(worker_id)),
        x509.DNSName(worker_host_name(worker_id)),
    ]
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(worker_id[:64]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(issues=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    directory.mkdir(parents=True, exist_ok=True)
    made = TlsSettings(
        ca=authority.cert,
        cert=directory / f"{worker_id}.pem",
        key=directory / f"{worker_id}-key.pem",
    )
    _write_private(made.key, _key_pem(key))
    _write_private(made.cert, _certificate_pem(certificate))
    return made


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, issues: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not issues,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=issues,
        crl_sign=issues,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
