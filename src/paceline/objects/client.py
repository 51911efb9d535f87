"""boto3 clients, configured once: timeouts, bounded retries, no silent environment.

Importing boto3 takes about half a second, so it happens at the first call, never at import.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0  # twice within the budget of objects.patience
HASTE_S = 4.0  # the same for a first try that another one follows: a healthy server answers sooner
MAX_ATTEMPTS = 3  # the first try included; botocore's standard mode jitters its backoff
POOL = 32

_creating = threading.Lock()  # creating botocore sessions is not thread-safe
_sessions: list[Any] = []  # one for all: another client of it takes 5 ms and 0.4 MB


def make_client(
    endpoint_url: str, access_key: str, secret_key: str, region: str, *, hasty: bool = False
) -> Any:
    """Return a thread-safe S3 client for ``endpoint_url`` with exactly these credentials.

    A ``hasty`` one tries once, and waits HASTE_S for each answer and each read.
    """
    import boto3
    from botocore.config import Config

    host = urlsplit(endpoint_url).hostname or ""
    local = host in ("localhost", "::1") or host.startswith("127.")
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path"},
        retries={"mode": "standard", "total_max_attempts": 1 if hasty else MAX_ATTEMPTS},
        connect_timeout=min(CONNECT_TIMEOUT_S, HASTE_S) if hasty else CONNECT_TIMEOUT_S,
        read_timeout=HASTE_S if hasty else READ_TIMEOUT_S,
        max_pool_connections=POOL,
        tcp_keepalive=True,
        # Servers differ in what they do with the newer checksums; our digests are the check.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={} if local else None,  # a proxy variable must not catch loopback
    )
    with _creating:
        if not _sessions:
            _sessions.append(boto3.session.Session())
        return _sessions[0].client(
            "s3",
            endpoint_url=endpoint_url,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name=region,
            config=config,
        )
