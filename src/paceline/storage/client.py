"""boto3 clients with explicit configuration, translation of their errors, and the retry budget.

Importing boto3 takes about half a second, so it happens at the first call, never at import.
"""

from __future__ import annotations

import base64
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.config import ObjectAccess, aws_variables, named_secret
from paceline.errors import (
    AccessDenied,
    CorruptData,
    InvalidInput,
    PacelineError,
    PermanentError,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
    StorageFull,
)
from paceline.storage.signing import Sign, SignedRequests
from paceline.system import is_loopback

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0  # twice within the retry budget
# Both timeouts of a first try that is repeated: a healthy server answers sooner.
QUICK_TIMEOUT_S = 4.0
MAX_ATTEMPTS = 3  # the first try included; botocore's standard mode jitters its backoff
POOL = 32
CUSTOMER_KEY_BYTES = 32  # AES-256, the only cipher of SSE-C

_creating = threading.Lock()  # creating botocore sessions is not thread-safe
# One for the same profile and variables: another client of a session takes 5 ms and 0.4 MB.
_sessions: dict[tuple[str | None, ...], Any] = {}


@functools.cache
def import_boto3() -> None:
    """Import boto3 whole, in one thread: two that import parts of it at once may see it half."""
    with _creating:
        import boto3
        import boto3.exceptions
        import boto3.session
        import botocore.config
        import botocore.exceptions
        import botocore.parsers
        import botocore.session

        del boto3, botocore


def make_client(access: ObjectAccess, *, hasty: bool = False, sign: Sign | None = None) -> Any:
    """Return a thread-safe S3 client for ``access``. With ``sign`` it has no credentials, and can
    only read.

    Without keys in ``access`` the credentials come from boto3's default chain. Roles and web
    identities are refreshed by boto3; credentials in a file are read again when the server calls
    them expired. A ``hasty`` client tries once, and waits ``QUICK_TIMEOUT_S`` for each answer and
    each read. Raises InvalidInput for a profile that AWS's files do not have.
    """
    import_boto3()
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import ProfileNotFound

    style = access.addressing or ("path" if access.endpoint_url else "")
    config = Config(
        signature_version="s3v4" if sign is None else UNSIGNED,
        s3={"addressing_style": style} if style else None,  # None: as AWS's file says
        retries={"mode": "standard", "total_max_attempts": 1 if hasty else MAX_ATTEMPTS},
        connect_timeout=min(CONNECT_TIMEOUT_S, QUICK_TIMEOUT_S) if hasty else CONNECT_TIMEOUT_S,
        read_timeout=QUICK_TIMEOUT_S if hasty else READ_TIMEOUT_S,
        max_pool_connections=POOL,
        tcp_keepalive=True,
        # Servers differ in what they do with the newer checksums; our digests are the check.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _creating:
        key = (access.profile, *aws_variables())
        try:
            if key not in _sessions:
                _sessions[key] = Session(profile_name=access.profile or None)
        except ProfileNotFound as error:
            raise InvalidInput(
                "AWS's configuration has no such profile",
                got=access.profile,
                where="[objects] profile",
                do="Add it to ~/.aws/config or ~/.aws/credentials of this user.",
            ) from error
        session = _sessions[key]
        make = functools.partial(
            session.client,
            "s3",
            endpoint_url=access.endpoint_url or None,
            aws_access_key_id=access.access_key or None,
            aws_secret_access_key=access.secret_key or None,
            # Amazon redirects to a bucket's own region; other servers accept any.
            region_name=access.region or session.region_name or "us-east-1",
            verify=_certificate_file(access.ca),
        )
        client = make(config=config)
        # A proxy variable must not catch loopback; AWS's settings may name the endpoint, too.
        if is_loopback(urlsplit(client.meta.endpoint_url).hostname or ""):
            client = make(config=config.merge(Config(proxies={})))
    if parameters := access.parameters | _customer_key(access.customer_key_env):
        client.meta.events.register("provide-client-params.s3.*", _adding(parameters))
    if sign is not None:
        SignedRequests(client, sign)
    elif not access.access_key:
        renewal = _CredentialRenewal(client, access.profile)
        client.meta.events.register("before-send.s3.*", renewal.remember_token)
        client.meta.events.register_first("needs-retry.s3.*", renewal)
    return client


@functools.cache
def _certificate_file(ca: str) -> str | None:
    """Return the path of ``ca`` (a path, or PEM itself), None for the machine's authorities.

    botocore takes a path only; a file in memory leaves nothing behind when the process is killed.
    """
    if not ca.startswith("-----BEGIN "):
        return ca or None
    descriptor = os.memfd_create("s3-ca")
    os.write(descriptor, ca.encode())
    return f"/proc/self/fd/{descriptor}"


def _customer_key(variable: str) -> dict[str, Any]:
    """Return SSE-C's parameters with the key in the environment ``variable``; none for ""."""
    if not variable:
        return {}
    try:
        key = base64.b64decode(named_secret(variable, "objects.customer_key_env"), validate=True)
    except ValueError:
        key = b""
    if len(key) != CUSTOMER_KEY_BYTES:
        raise InvalidInput(
            "not a key of SSE-C",
            got=f"${variable} of {len(key)} bytes" if key else f"${variable} that is no base64",
            wanted=f"{CUSTOMER_KEY_BYTES} bytes in base64",
            do="Make one with: openssl rand -base64 32",
        )
    return {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}


def _adding(parameters: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the handler that adds a profile's parameters to each request that takes them."""

    def add(params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
        takes = model.input_shape.members if model.input_shape is not None else {}
        return {key: v for key, v in parameters.items() if key in takes} | params

    return add


class _CredentialRenewal:
    """Reloads temporary credentials that a server refuses, and repeats the request if they changed.

    For credentials that another program renews in a file (a login, a sidecar): botocore itself
    reads such a file only once. Only the status is tested, because a refused HEAD has no body.
    """

    def __init__(self, client: Any, profile: str) -> None:
        self._signer, self._profile = client._request_signer, profile
        self._lock = threading.Lock()
        self._thread = threading.local()

    def remember_token(self, request: Any, **_: Any) -> None:
        """Record the token of this thread's request: another thread may renew it meanwhile."""
        token = request.headers.get("X-Amz-Security-Token", b"")
        self._thread.token = token.decode() if isinstance(token, bytes) else token

    def __call__(self, response: Any, attempts: int, **_: Any) -> float | None:
        refused = getattr(self._thread, "token", None)
        if response is None or response[0].status_code not in (400, 401, 403):
            return None
        if not refused or attempts >= MAX_ATTEMPTS:
            return None
        from botocore.session import Session

        with self._lock:
            if self._signer._credentials.token == refused:
                renewed = Session(profile=self._profile or None).get_credentials()
                if renewed is None or renewed.token == refused:
                    return None
                self._signer._credentials = renewed
        return 0.0


def head_object(client: Any, bucket: str, key: str, *, may_list: bool) -> dict[str, Any]:
    """Return the answer to HEAD; botocore's errors are left to the caller.

    A refused HEAD has no body. Where the status says no more than 400, a GET receives the reason,
    and from it botocore learns the bucket's region, in which the second HEAD is signed. A key that
    may list below a prefix only is told 403 of an object that does not exist: with ``may_list``
    the listing decides, and the error is that of a missing object.
    """
    from botocore.exceptions import ClientError

    asked = {"Bucket": bucket, "Key": key}
    try:
        answer: dict[str, Any] = client.head_object(**asked)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code == "403" and may_list and not _is_listed(client, bucket, key):
            missing = error.response | {"Error": {"Code": "404"}}
            raise ClientError(missing, "HeadObject") from None
        if code != "400":
            raise
        client.get_object(**asked)["Body"].close()
        answer = client.head_object(**asked)
    return answer


def _is_listed(client: Any, bucket: str, key: str) -> bool:
    """Return whether the bucket's listing has ``key``, or may not be read."""
    from botocore.exceptions import ClientError

    try:
        renewed = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
    except ClientError:
        return True
    return any(each["Key"] == key for each in renewed.get("Contents", ()))


# Translation of botocore's errors into PacelineErrors.

_MISSING = {"NoSuchBucket", "NoSuchKey", "NotFound", "404", "NoSuchUpload", "NoSuchVersion"}
_DENIED = {
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "401",
    "403",
}
MAX_CLOCK_S = 900.0  # S3 refuses what was signed longer ago, or later than now
_CLOCK = {"RequestTimeTooSkewed"}
_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "301",
}
_CHANGED = {"PreconditionFailed", "412", "InvalidRange", "416"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "507"}
_BUSY = {
    *("SlowDown", "RequestTimeout", "Throttling", "TooManyRequests", "429", "InternalError"),
    "ConditionalRequestConflict",  # two conditional writes at once: the next try decides
}
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}

_CHECK_SERVER = "Check that the S3 server runs and answers there, then try again."


@contextmanager
def translate_s3_errors(endpoint_url: str, url: str) -> Iterator[None]:
    """Translate errors of botocore and sockets inside the context, chained."""
    import_boto3()
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except PacelineError:
        raise
    except ClientError as error:
        raise from_client_error(error.response, endpoint_url, url) from error
    except Boto3Error as error:  # an upload that failed wraps the error of its part
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ClientError):
            raise from_client_error(cause.response, endpoint_url, url) from error
        raise _unavailable(cause or error, endpoint_url, url) from error
    except BotoCoreError as error:
        raise _from_botocore(error, endpoint_url, url) from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise _unavailable(error, endpoint_url, url) from error
    except (ResponseParserError, ValueError) as error:
        raise PermanentError(
            "S3 sent an answer that cannot be read",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            where=f"{url} on {endpoint_url}",
            do="Check that an S3 server answers there.",
        ) from error


def _clock_ahead_s(meta: dict[str, Any]) -> float:
    """Return how far this machine's clock is ahead of the server's, 0 where it names no time.

    An answer to HEAD has no other sign of it: S3 refuses it like a wrong key.
    """
    try:
        date = parsedate_to_datetime(str(meta.get("HTTPHeaders", {}).get("date")))
    except ValueError:
        return 0.0
    return time.time() - date.timestamp()


def from_client_error(response: dict[str, Any], endpoint_url: str, url: str) -> PacelineError:
    """Return the PacelineError for an S3 error ``response``."""
    details, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    known = {code, str(status)}
    bare = code in ("", str(status))  # of a HEAD: without a body there is no reason
    got = f"HTTP {status}" if bare else f"{code} ({status})"
    where = f"{url} on {endpoint_url}"
    if known & _MISSING:
        what = "bucket does not exist" if code == "NoSuchBucket" else "object does not exist"
        return SourceMissing(what, got=got, where=where, do="Check the URL, or publish it first.")
    ahead_s = _clock_ahead_s(meta)
    if known & _CLOCK or (known & _DENIED and abs(ahead_s) > MAX_CLOCK_S):
        return AccessDenied(
            "S3 refuses this machine's clock",
            got=f"{got}, the clock here is {ahead_s / 60:+.0f} min from the server's",
            wanted=f"at most {MAX_CLOCK_S / 60:.0f} min",
            where=where,
            do="Set the clock (NTP) on this machine, or on the S3 server.",
        )
    message = str(details.get("Message") or "")[:200]
    reason = f"{got}: {message}" if message and not bare else got
    if known & _REGION:
        region = details.get("Region")
        return AccessDenied(
            "the bucket is in another region",
            got=reason,
            wanted=f"region {region}" if region else "the bucket's region and endpoint",
            where=where,
            do="Set [objects] region in the profile (and endpoint_url, where it names a region); "
            "without them AWS_DEFAULT_REGION or AWS's file.",
        )
    if known & _DENIED:
        do = "Check the access key that boto3 finds on this machine, and what it may do."
        if bare:
            do += " Without s3:ListBucket it is told this of a missing object, too."
        return AccessDenied(
            "S3 refused the credentials",
            got=reason,  # Amazon's names the action that is not allowed
            wanted="an access key that may do this",
            where=where,
            do=do,
        )
    if known & _CHANGED:
        return SourceChanged(
            "object was replaced while it was read",
            got=got,
            wanted="the pinned ETag and size",
            where=where,
            do="Read its head again and start over, or publish under a new version.",
        )
    if known & _FULL:
        return StorageFull("S3 has no room", got=got, where=where, do="Free space or raise quota.")
    if code in _CORRUPT:
        return CorruptData("S3 received other bytes than were sent", got=got, where=where)
    if known & _BUSY or (status >= 500 and status != 501):  # 501: not implemented, permanent
        return ServiceUnavailable("S3 cannot serve now", got=got, where=where, do=_CHECK_SERVER)
    expired = bare and status == 400
    do = "Renew the credentials: an expired token looks like this." if expired else ""
    return PermanentError("S3 refused the request", got=reason, where=where, do=do)


def _from_botocore(error: Exception, endpoint_url: str, url: str) -> PacelineError:
    from botocore import exceptions

    where = f"{url} on {endpoint_url}"
    if isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return AccessDenied(
            "the certificate of the S3 server is not trusted here",
            got=str(error).partition("CERTIFICATE_VERIFY_FAILED] ")[2],
            wanted="a certificate for this address, of an authority that this machine trusts",
            where=where,
            do="Name the authority's file in [objects] ca of the profile, or in AWS_CA_BUNDLE.",
        )
    if isinstance(
        error,
        (
            exceptions.ConnectionError,  # no connection at all
            exceptions.HTTPClientError,  # read timeout, closed, proxy, TLS
            exceptions.ResponseStreamingError,
            exceptions.IncompleteReadError,
        ),
    ):
        return _unavailable(error, endpoint_url, url)
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return AccessDenied(
            "no S3 credentials",
            got=error,
            wanted="credentials that boto3 finds for this user",
            where=where,
            do="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, or give the machine "
            "a role.",
        )
    if isinstance(error, exceptions.CredentialRetrievalError):
        return AccessDenied("S3 credentials cannot be renewed", got=error, where=where)
    if isinstance(error, (exceptions.ParamValidationError, ValueError)):
        return InvalidInput("S3 request is malformed", got=error, where=where)
    return PermanentError("S3 client failed", got=f"{type(error).__name__}: {error}", where=where)


def _unavailable(error: BaseException, endpoint_url: str, url: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        "S3 does not answer",
        got=f"{type(error).__name__}: {error}",
        where=f"{url} on {endpoint_url}",
        do=_CHECK_SERVER,
    )


# The retry budget of a failing S3 server: jittered waits within a time budget, then the error.
#
# Botocore retries each request a few times by itself; this is the longer loop around it, for bodies
# that break off and servers that answer "slow down". Progress resets the budget.

MAX_RETRIES = 8
RETRY_BUDGET_S = 45.0  # below the relay's deadline for an origin, so that this error is reported
BACKOFF_S = 0.1  # doubles with each attempt, times a jitter of 0.5 to 1.5
BACKOFF_MAX_S = 5.0


class RetryBudget:
    """Counts the failures of one transfer since its last progress."""

    def __init__(self) -> None:
        self.progressed()

    def progressed(self) -> None:
        """Reset the budget: bytes arrived."""
        self._failures = 0
        self._since = time.monotonic()

    def repeat(self, call: Callable[[], Answer]) -> Answer:
        """Return what ``call`` returns, repeated within the budget while the server is busy."""
        while True:
            try:
                return call()
            except ServiceUnavailable as error:
                self.failed(error)

    def failed(self, error: ServiceUnavailable) -> None:
        """Wait before the next attempt; raises ``error`` when attempts or budget are used up."""
        self._failures += 1
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** (self._failures - 1))
        wait_s *= random.uniform(0.5, 1.5)
        waited_s = time.monotonic() - self._since
        if self._failures >= MAX_RETRIES or waited_s + wait_s > RETRY_BUDGET_S:
            got = f"{error.got}, {self._failures} times in {waited_s:.0f} s"
            raise error.as_kind(ServiceUnavailable, got=got) from error
        time.sleep(wait_s)
