"""How a node becomes a worker, and stays one: ``join`` with a join token, ``Renewal`` after.

The node creates its private key, which never leaves it; the coordinator answers the certificate
request with a certificate, a token for this worker, and the part of the profile that an agent
needs. All of it is stored in the node's state directory, readable by its owner only: ``identity/``
and ``runtime.json``, from which the agent starts.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.client import AccessClient, error_of
from paceline.config import (
    DEFAULT_S3,
    Endpoints,
    Profile,
    Runtime,
    Secrets,
    one_certificate,
    other_file,
    read_certificate,
    read_other,
    require_unused,
    save_runtime,
)
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    PacelineError,
    PermanentError,
)
from paceline.relay.rotation import require_trusted
from paceline.relay.transport import fingerprint, new_request
from paceline.schemas import SHA256_HEX, JoinWorker, WorkerIdentity
from paceline.system import Endpoint, ensure_own_directory, fetch, restrict_directory, write_private

log = logging.getLogger(__name__)

DIRECTORY = "identity"
NODE_FILE = "node.pem"  # the key and its certificate in one file, so that they change together
CA_FILE = "ca.pem"
REST_CA_FILE = "rest-ca.pem"
IDENTITY_FILE = "identity.json"
JOINING_FILE = "joining.pem"  # the key of a request whose answer has not arrived yet
MAX_CA_BYTES = 64 * 1024
TIMEOUT_S = 10.0
RENEWAL_CHECK_S = 60.0  # between two checks of the clock; after a failure too
SPREAD_S = 5.0  # over which the nodes of a fleet renew when its authorities change
STATE_DIR_MODE = 0o755  # of a node: servers of other users load models from it


def join(
    state_dir: Path, worker_id: str, coordinator_url: str, token: str, *, ca: Path | None = None
) -> bool:
    """Make this node ``worker_id``; return False where it is that already, without using the token.

    A node that joined with another token before, and was taken out since, joins anew with this one,
    unless that is a group token, which is for new names; "" stands for the token that it joined
    with.
    ``ca`` is the authority that the coordinator's certificate is checked against; without one, the
    authority whose fingerprint is in the token. Raises AccessDenied (the token was used for another
    node, is expired, or belongs to another worker), Conflict (the directory belongs to another
    worker, or to an installation), InvalidInput; nothing is left behind then. Raises
    ServiceUnavailable where no answer arrives: the key stays here, and a second call with the same
    token is answered for it.
    """
    if (about := _joined_as(state_dir)) is not None:
        _require_same(state_dir, worker_id)
        if not token or about.get("joined_with") in (None, _id_of(token)):
            return False
    require_unused(state_dir)
    endpoint = Endpoint.of(coordinator_url)
    if not endpoint.secure and not endpoint.on_loopback:
        raise InvalidInput(
            "a join token does not cross a network in the clear",
            got=coordinator_url,
            wanted="an https:// URL",
            do='Set [security] rest_tls = "installation" where the coordinator runs.',
        )
    pinned = _pin_of(token)
    trusted: Path | bytes | None = ca
    if endpoint.secure and trusted is None:
        trusted = fetch_authority(endpoint, pinned)
    directory = state_dir / DIRECTORY
    kept = directory / JOINING_FILE
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        restrict_directory(state_dir, STATE_DIR_MODE)
        ensure_own_directory(directory)
        key = kept.read_bytes() if kept.exists() else None
        key, request = new_request(worker_id, key)
        write_private(kept, key)
        client = AccessClient(endpoint.url, token, TIMEOUT_S, ca=trusted or "", follows=True)
        try:
            identity = client.join(JoinWorker(worker_id=worker_id, csr=request.decode()))
        finally:
            client.close()
        require_trusted(identity, {pinned})
        runtime = _runtime_of(state_dir, endpoint.url, identity)
        _store_identity(state_dir, identity, key, runtime, joined_with=_id_of(token))
    except PermanentError as error:
        kept.unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # something else is in it by now
                each.rmdir()
        if about is not None and isinstance(error, Conflict):
            # The worker's identity is in use, by this node: it got a new group token, for others.
            log.warning("keeps the identity that it has: %s", error)
            return False
        raise
    kept.unlink()
    log.info("joined worker=%s coordinator=%s", worker_id, endpoint.url)
    return True


class Renewal:
    """Renews a joined node's identity before it expires, on a thread of its own."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        on_renewed: Callable[[Runtime], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``on_renewed`` is called with the renewed runtime, on that thread."""
        self._runtime, self._on_renewed, self._wall = runtime, on_renewed, wall
        self._stopping, self._hastened = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="renewal", daemon=True)

    @classmethod
    def of(cls, runtime: Runtime, *, on_renewed: Callable[[Runtime], None]) -> Renewal | None:
        """Return the renewal of a node that joined, None for any other."""
        return cls(runtime, on_renewed=on_renewed) if _joined_as(runtime.state_dir) else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; a renewal in progress is not awaited."""
        self._stopping.set()
        self._hastened.set()

    def hasten(self) -> None:
        """Renew now, within ``SPREAD_S``: the authorities have changed."""
        self._hastened.set()

    def renew_if_due(self, *, now: bool = False) -> bool:
        """Renew when due (or ``now``) and return whether it was; raises the coordinator's error."""
        about = _joined_as(self._runtime.state_dir)
        if about is None or not (now or self._wall() >= about["renew_at"]):
            return False
        worker_id = str(about["worker_id"])
        key, request = new_request(worker_id)
        client = AccessClient.of(self._runtime, TIMEOUT_S, patience_s=0.0, worker=True)
        try:
            identity = client.renew(JoinWorker(worker_id=worker_id, csr=request.decode()))
        finally:
            client.close()
        held = self._runtime.state_dir / DIRECTORY / CA_FILE
        trusted = filter(None, (read_certificate(held), read_other(held)))
        require_trusted(identity, {fingerprint(each) for each in trusted})
        base_url = self._runtime.endpoints.coordinator_url
        renewed = _runtime_of(self._runtime.state_dir, base_url, identity)
        joined_with = about.get("joined_with")
        _store_identity(self._runtime.state_dir, identity, key, renewed, joined_with=joined_with)
        self._runtime = renewed
        log.info("renewed worker=%s until=%d", worker_id, identity.certificate_expires_at)
        self._on_renewed(renewed)
        return True

    def _work(self) -> None:
        while True:
            now = self._hastened.wait(RENEWAL_CHECK_S * random.uniform(0.5, 1.0))
            if self._stopping.wait(random.uniform(0.0, SPREAD_S) if now else 0.0):
                return
            self._hastened.clear()
            try:
                self.renew_if_due(now=now)
            except PacelineError as error:
                log.warning("the identity was not renewed (trying again): %s", error)
            except OSError as error:
                log.warning("the renewed identity cannot be kept (trying again): %s", error)


def _pin_of(token: str) -> str:
    """Return the fingerprint of the authority in a join token; raises InvalidInput."""
    pinned = token.rpartition("_")[2]
    if not re.fullmatch(SHA256_HEX, pinned):
        raise InvalidInput(
            "the join token names no authority",
            wanted="the whole line that `paceline tokens join` printed",
        )
    return pinned


def _id_of(token: str) -> str:
    """Return the public id in a token."""
    return token.split("_")[1] if token.count("_") > 1 else ""


def fetch_authority(endpoint: Endpoint, wanted: str) -> bytes:
    """Return the coordinator's CA certificate, if its fingerprint is ``wanted``.

    No secret is sent and nothing else is trusted on this connection: only the fingerprint makes the
    answer good, and it must hold exactly one certificate.
    """
    where = f"{endpoint.url}/ca.pem"
    answer = fetch(
        where, name="the coordinator", timeout_s=TIMEOUT_S, max_bytes=MAX_CA_BYTES, verify=False
    )
    if answer.status != HTTPStatus.OK:
        raise error_of(answer.status, answer.body, where)
    trusted = one_certificate(answer.body, where)
    got = fingerprint(trusted)
    if got != wanted:
        raise AccessDenied(
            "this is not the coordinator that the fingerprint is of",
            got=f"authority {got}",
            wanted=f"authority {wanted}",
            where=where,
            do="Check the URL: somebody else answers there.",
        )
    return trusted


def _runtime_of(state_dir: Path, asked_url: str, identity: WorkerIdentity) -> Runtime:
    try:
        profile = Profile.model_validate(identity.profile)
    except ValidationError as error:
        raise InvalidInput(
            "the coordinator's profile cannot be read here",
            got=str(error).splitlines()[0],
            do="Run the same version of Paceline on every node.",
        ) from error
    security = profile.security
    if security.peer_tls != "plaintext-anywhere":
        node = f"{DIRECTORY}/{NODE_FILE}"
        security = security.model_copy(
            update={
                "peer_tls": "mtls",
                "peer_ca": f"{DIRECTORY}/{CA_FILE}",
                "peer_cert": node,
                "peer_key": node,
            }
        )
    urls = _reachable_urls(identity.coordinator_urls, asked_url)
    return Runtime(
        profile=profile.model_copy(update={"security": security}),
        state_dir=state_dir,
        endpoints=Endpoints(
            coordinator_url=urls[0],
            coordinator_urls=urls if len(urls) > 1 else (),
            coordinator_ca=f"{DIRECTORY}/{REST_CA_FILE}" if identity.rest_ca else "",
            s3_url=profile.objects.endpoint_url or DEFAULT_S3,
        ),
        secrets=Secrets(worker_token=identity.token, peer_token=identity.peer_token),
    )


def _reachable_urls(urls: tuple[str, ...], asked_url: str) -> tuple[str, ...]:
    """Return the replicas' URLs without another machine's loopback."""
    if Endpoint.of(asked_url).on_loopback:
        return urls or (asked_url,)
    others = tuple(url for url in urls if not Endpoint.of(url).on_loopback)
    return others or (asked_url,)


def _store_identity(
    state_dir: Path,
    identity: WorkerIdentity,
    key: bytes,
    runtime: Runtime,
    *,
    joined_with: str | None,
) -> None:
    """Store the identity; the file with the renewal time, which vouches for the rest, is last."""
    directory = state_dir / DIRECTORY
    own_port = identity.rest_ca == identity.ca  # the port's certificate is of the same authority
    authorities = {
        directory / CA_FILE: identity.ca,
        other_file(directory / CA_FILE): identity.other_ca,
        directory / REST_CA_FILE: identity.rest_ca,
        other_file(directory / REST_CA_FILE): identity.other_ca if own_port else None,
    }
    trusted = {path: one_certificate(pem.encode()) for path, pem in authorities.items() if pem}
    for path, certificate in trusted.items():
        write_private(path, certificate)
    save_runtime(runtime)
    write_private(directory / NODE_FILE, key + identity.certificate.encode())
    about = {
        "worker_id": identity.worker_id,
        "renew_at": identity.renew_at,
        "expires_at": identity.certificate_expires_at,
        "joined_with": joined_with,
    }
    write_private(directory / IDENTITY_FILE, json.dumps(about).encode())
    for path in authorities.keys() - trusted.keys():  # retired, now that nothing of it is in use
        path.unlink(missing_ok=True)


def _joined_as(state_dir: Path) -> dict[str, Any] | None:
    try:
        about = json.loads((state_dir / DIRECTORY / IDENTITY_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "this node's identity cannot be read",
            got=error,
            where=state_dir / DIRECTORY / IDENTITY_FILE,
            do="Delete the directory and join again with a new token.",
        ) from error
    assert isinstance(about, dict)
    return about


def has_joined(state_dir: Path) -> bool:
    """Return whether the node of ``state_dir`` has an identity of a fleet."""
    return _joined_as(state_dir) is not None


def joined_worker_id(state_dir: Path, worker_id: str = "") -> str:
    """Return the name that the node of ``state_dir`` joined under, or else ``worker_id``.

    Raises Conflict where they differ, InvalidInput where there is none.
    """
    about = _joined_as(state_dir) or {}
    if worker_id:
        _require_same(state_dir, worker_id)
    elif not about:
        raise InvalidInput(
            "this node has no name",
            wanted="a directory of a node that joined, or --worker-id",
            where=state_dir,
            do="Let it join: `paceline agent --join`.",
        )
    return worker_id or str(about["worker_id"])


def _require_same(state_dir: Path, worker_id: str) -> None:
    about = _joined_as(state_dir)
    if about is not None and about["worker_id"] != worker_id:
        raise Conflict(
            "this node joined as another worker",
            got=worker_id,
            wanted=about["worker_id"],
            where=state_dir,
            do="Use another --state, or delete this one to join again.",
        )
