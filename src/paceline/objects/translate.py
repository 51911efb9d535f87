"""Botocore's errors in Paceline's words; knows error codes, does no I/O of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

_MISSING = {"NoSuchBucket", "NoSuchKey", "NotFound", "404", "NoSuchUpload", "NoSuchVersion"}
_DENIED = {
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "AuthorizationHeaderMalformed",
    "401",
    "403",
}
_CHANGED = {"PreconditionFailed", "412", "InvalidRange", "416"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "507"}
_BUSY = {
    *("SlowDown", "RequestTimeout", "Throttling", "TooManyRequests", "429", "InternalError"),
    "ConditionalRequestConflict",  # of two conditional writes at once: the next try decides
}
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}

_CHECK_SERVER = "Check that the S3 server runs and answers there, then try again."


@contextmanager
def translated(endpoint_url: str, url: str) -> Iterator[None]:
    """Raise whatever botocore or the socket raises inside as a PacelineError, chained."""
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


def from_client_error(response: dict[str, object], endpoint_url: str, url: str) -> PacelineError:
    """Return the error that an S3 error ``response`` means."""
    details = response.get("Error")
    code = str(details.get("Code", "")) if isinstance(details, dict) else ""
    meta = response.get("ResponseMetadata")
    status = int(meta.get("HTTPStatusCode", 0)) if isinstance(meta, dict) else 0
    known = {code, str(status)}
    got = f"HTTP {status}" if code in ("", str(status)) else f"{code} ({status})"
    where = f"{url} on {endpoint_url}"
    if known & _MISSING:
        what = "bucket does not exist" if code == "NoSuchBucket" else "object does not exist"
        return SourceMissing(what, got=got, where=where, do="Check the URL, or publish it first.")
    if known & _DENIED:
        return AccessDenied(
            "S3 refused the credentials",
            got=got,
            wanted="an access key that may do this",
            where=where,
            do="Check the access key and secret key of this installation.",
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
    if known & _BUSY or (status >= 500 and status != 501):  # 501: it never will
        return ServiceUnavailable("S3 cannot serve now", got=got, where=where, do=_CHECK_SERVER)
    return PermanentError("S3 refused the request", got=got, where=where)


def _from_botocore(error: Exception, endpoint_url: str, url: str) -> PacelineError:
    from botocore import exceptions

    where = f"{url} on {endpoint_url}"
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
        return AccessDenied("no S3 credentials", got=error, where=where, do="Start with `up`.")
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
