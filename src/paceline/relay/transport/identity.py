"""Issues X.509 certificates: a cluster's certificate authority (CA), worker and server identities.

A worker's certificate carries its id as the URI ``paceline://worker/<id>``. gRPC compares only host
names, so the id is also a DNS name in it (hashed, since ids are not host names). A server's
certificate carries its host names and no worker id, so neither is accepted as the other. Keys are
P-256, files are readable by their owner only. This module does not decide which worker may have
which identity.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import one_certificate, other_file, read_certificate
from paceline.errors import InvalidInput, StorageFailed
from paceline.relay.transport.tls import (
    ADMISSION_URI,
    WORKER_URI,
    TlsSettings,
    valid_name,
    worker_host_name,
)
from paceline.system import PRIVATE_DIRECTORY, ensure_private, make_directories, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 365
SIGNING_FILE = "signing"  # fingerprint of the authority that signs; absent before a second one
_SKEW = datetime.timedelta(hours=1)  # clocks of two nodes may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Paths of a cluster's CA: every process needs ``cert``, only an issuer needs ``key``."""

    cert: Path
    key: Path


def make_authority(directory: Path, name: str = "paceline cluster") -> Authority:
    """Create a CA in ``directory`` (``ca.pem``, ``ca-key.pem``, mode 0600) and return it.

    An existing key is kept and gets a new certificate.
    """
    return _make(_first(directory), name)


def make_other_authority(directory: Path) -> Authority:
    """Create a second CA in ``directory``, beside the one that signs, and return it."""
    made = _second(directory)
    made.key.unlink(missing_ok=True)  # of an earlier replacement
    return _make(made, f"paceline cluster {datetime.datetime.now(datetime.UTC):%Y-%m-%d}")


def _make(made: Authority, name: str) -> Authority:
    from cryptography.hazmat.primitives.asymmetric import ec

    found = made.key.exists()
    key = authority_key(made) if found else ec.generate_private_key(ec.SECP256R1())
    start = datetime.datetime.now(datetime.UTC) - _SKEW
    builder = _certificate(name, _name(name), key.public_key(), start, AUTHORITY_DAYS, issues=True)
    make_directories(made.cert.parent, PRIVATE_DIRECTORY)
    if not found:
        write_private(made.key, _key_pem(key))
    write_private(made.cert, _signed_pem(builder, key))
    return made


def _first(directory: Path) -> Authority:
    return Authority(cert=directory / "ca.pem", key=directory / "ca-key.pem")


def _second(directory: Path) -> Authority:
    return Authority(cert=other_file(directory / "ca.pem"), key=directory / "ca-key.other.pem")


def authorities(directory: Path) -> tuple[Authority, Authority | None]:
    """Return the CA of ``directory`` that signs, and the one that is trusted beside it, if any.

    The directory may be copied to replicas while they read it: raises InvalidInput where what is
    there does not belong together.
    """
    pairs = [each for each in (_first(directory), _second(directory)) if each.cert.is_file()]
    if len(pairs) == 1:
        return pairs[0], None
    prints = [fingerprint(each.cert.read_bytes()) for each in pairs]
    marked = directory / SIGNING_FILE
    signs = marked.read_text().strip() if marked.is_file() else prints[0]
    for pair, known in zip(pairs, prints, strict=True):
        if known == signs and _belong_together(pair):
            beside = [e for e, its in zip(pairs, prints, strict=True) if its != signs]
            return pair, beside[0] if beside else None
    raise InvalidInput(
        "the authority's files do not belong together",
        got=f"{SIGNING_FILE} names {signs}",
        wanted="ca.pem or ca.other.pem with this fingerprint, and its key",
        where=directory,
        do="Copy the whole directory again.",
    )


def _belong_together(pair: Authority) -> bool:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(read_certificate(pair.cert))
    return certificate.public_key() == authority_key(pair).public_key()


def ensure_authority(directory: Path) -> Authority:
    """Return the CA in ``directory`` that signs; the first process that calls this creates it.

    An existing CA is only read. Raises StorageFailed if there is none and none can be created.
    """
    known = _first(directory)
    # The certificate is written last: if it exists, so does the key.
    if known.cert.is_file():
        return authorities(directory)[0]
    try:
        make_directories(directory, PRIVATE_DIRECTORY)
        ensure_private(directory / "lock")
        with (directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return known if known.cert.is_file() else make_authority(directory)
    except OSError as error:
        raise StorageFailed(
            "there is no authority, and none can be made here",
            got=error.strerror,
            wanted="ca.pem and ca-key.pem, or a directory that may be written",
            where=directory,
            do="Provide the two files of this installation's authority.",
        ) from error


def authority_key(authority: Authority) -> ec.EllipticCurvePrivateKey:
    """Return the private key of ``authority``; raises InvalidInput."""
    try:
        return _private_key(authority.key.read_bytes())
    except (OSError, InvalidInput) as error:
        raise InvalidInput(
            "the authority's key cannot be read", got=error, where=authority.key
        ) from error


def fingerprint(certificate_pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER; raises InvalidInput unless it is exactly one."""
    text = one_certificate(certificate_pem).decode()
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()


def issue_identity(
    authority: Authority,
    worker_id: str,
    directory: Path,
    *,
    valid_from: datetime.datetime | None = None,
    valid_days: float = IDENTITY_DAYS,
) -> TlsSettings:
    """Create ``worker_id``'s certificate and key in ``directory`` and return their paths.

    Raises InvalidInput if the id is not a name or the authority cannot be read.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _issue(
        authority, worker_id, key.public_key(), _worker_names(worker_id), valid_from, valid_days
    )
    made = TlsSettings(
        ca=authority.cert,
        cert=directory / f"{worker_id}.pem",
        key=directory / f"{worker_id}-key.pem",
    )
    make_directories(directory, PRIVATE_DIRECTORY)
    write_private(made.key, _key_pem(key))
    write_private(made.cert, certificate)
    return made


def issue_for_key(
    authority: Authority,
    worker_id: str,
    key: ec.EllipticCurvePublicKey,
    *,
    valid_days: float = IDENTITY_DAYS,
    admission: str = "",
) -> bytes:
    """Return ``worker_id``'s certificate (PEM) for ``key``, with ``admission`` as a further URI.

    Raises InvalidInput if the id is not a name or the authority cannot be read.
    """
    return _issue(authority, worker_id, key, _worker_names(worker_id, admission), None, valid_days)


def key_sha256(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key's fingerprint: the SHA-256 of its DER in hex."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    info = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(info).hexdigest()


def requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a PKCS #10 request (PEM); the rest of the request is ignored.

    Raises InvalidInput if it is no such request, is not signed with its own key, or its key is not
    P-256.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    wanted = "a PKCS #10 request (PEM) signed with its own P-256 key"
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        signed = request.is_signature_valid
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        InvalidSignature,
        x509.InvalidVersion,
    ) as error:
        raise InvalidInput("not a certificate request", got=error, wanted=wanted) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput("the request's key is of another kind", wanted=wanted)
    if not signed:
        raise InvalidInput("the request is not signed with its own key", wanted=wanted)
    return key


def issue_server(
    authority: Authority, hosts: Iterable[str], directory: Path, *, valid_days: float
) -> tuple[Path, Path]:
    """Create a server's certificate for ``hosts`` (names and addresses) and its key.

    Returns the paths of both.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
        except ValueError:
            names.append(x509.DNSName(host))
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _issue(
        authority, "paceline coordinator", key.public_key(), names, None, valid_days
    )
    make_directories(directory, PRIVATE_DIRECTORY)
    made = directory / "server.pem", directory / "server-key.pem"
    write_private(made[1], _key_pem(key))
    write_private(made[0], certificate)
    return made


def new_request(worker_id: str, key_pem: bytes | None = None) -> tuple[bytes, bytes]:
    """Return a private key, new unless given, and a certificate request for it, both as PEM.

    Raises InvalidInput if ``key_pem`` is no P-256 key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key = ec.generate_private_key(ec.SECP256R1()) if key_pem is None else _private_key(key_pem)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(worker_id[:64]))
    return _key_pem(key), builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    wanted = "a P-256 key, as PEM"
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput("not a private key", got=error, wanted=wanted) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput("a private key of another kind", wanted=wanted)
    return key


def _worker_names(worker_id: str, admission: str = "") -> list[x509.GeneralName]:
    from cryptography import x509

    if not valid_name(worker_id):
        raise InvalidInput("not a worker id", got=repr(worker_id), wanted="letters, digits, . _ -")
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(WORKER_URI + worker_id),
        x509.DNSName(worker_host_name(worker_id)),
    ]
    if admission:
        names.append(x509.UniformResourceIdentifier(ADMISSION_URI + admission))
    return names


def _issue(
    authority: Authority,
    common_name: str,
    public_key: ec.EllipticCurvePublicKey,
    names: list[x509.GeneralName],
    valid_from: datetime.datetime | None,
    valid_days: float,
) -> bytes:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer = x509.load_pem_x509_certificate(read_certificate(authority.cert)).subject
    issuer_key = authority_key(authority)
    start = valid_from or datetime.datetime.now(datetime.UTC) - _SKEW
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        _certificate(common_name[:64], issuer, public_key, start, valid_days, issues=False)
        .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer_id, critical=False)
    )
    return _signed_pem(builder, issuer_key)


def _certificate(
    common_name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    valid_days: float,
    *,
    issues: bool,
) -> x509.CertificateBuilder:
    from cryptography import x509

    constraints = x509.BasicConstraints(ca=issues, path_length=0 if issues else None)
    usage = x509.KeyUsage(
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
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=valid_days))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _signed_pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
