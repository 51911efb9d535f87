"""Calls to an etcd cluster, each with a deadline and failover to another member.

It does not depend on what is stored. A repeated call may have taken effect the first time;
``coordination`` writes its transactions so that this does no harm.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from paceline.errors import AccessDenied, InvalidProfile, PacelineError, ServiceUnavailable

# The messages of etcd's v3 API that are used here. Only names, numbers and types of fields matter
# on the wire. One table lists them, and protobuf builds the classes at import: no generated file,
# no compiler, and a separate descriptor pool, so that another etcd client in the same process does
# not collide with it.

_PACKAGE = "paceline.etcd"
_TABLE = """
Header: cluster_id=1:uint64 member_id=2:uint64 revision=3:int64 raft_term=4:uint64
KeyValue: key=1:bytes create_revision=2:int64 mod_revision=3:int64 version=4:int64 value=5:bytes lease=6:int64
RangeRequest: key=1:bytes range_end=2:bytes limit=3:int64 revision=4:int64 keys_only=8:bool count_only=9:bool min_mod_revision=10:int64
RangeResponse: header=1:Header kvs=2:*KeyValue more=3:bool count=4:int64
PutRequest: key=1:bytes value=2:bytes lease=3:int64
PutResponse: header=1:Header
DeleteRangeRequest: key=1:bytes range_end=2:bytes
DeleteRangeResponse: header=1:Header deleted=2:int64
RequestOp: request_range=1:RangeRequest request_put=2:PutRequest request_delete_range=3:DeleteRangeRequest
ResponseOp: response_range=1:RangeResponse response_put=2:PutResponse response_delete_range=3:DeleteRangeResponse
Compare: result=1:int32 target=2:int32 key=3:bytes create_revision=5:int64 mod_revision=6:int64
TxnRequest: compare=1:*Compare success=2:*RequestOp failure=3:*RequestOp
TxnResponse: header=1:Header succeeded=2:bool responses=3:*ResponseOp
LeaseGrantRequest: TTL=1:int64 ID=2:int64
LeaseGrantResponse: header=1:Header ID=2:int64 TTL=3:int64 error=4:string
LeaseRevokeRequest: ID=1:int64
LeaseRevokeResponse: header=1:Header
LeaseKeepAliveRequest: ID=1:int64
LeaseKeepAliveResponse: header=1:Header ID=2:int64 TTL=3:int64
AuthenticateRequest: name=1:string password=2:string
AuthenticateResponse: header=1:Header token=2:string
StatusRequest:
StatusResponse: header=1:Header version=2:string
"""  # noqa: E501 (a table: one message a line)

EQUAL = 0
COMPARE_CREATE, COMPARE_MOD = 1, 2  # what the comparison uses


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="paceline/etcd.proto", package=_PACKAGE, syntax="proto3"
    )
    names = []
    for line in _TABLE.strip().splitlines():
        name, _, fields = line.partition(":")
        names.append(name)
        message = file.message_type.add(name=name)
        for each in fields.split():
            field_name, number, kind = re.split("[=:]", each)
            made = message.field.add(name=field_name, number=int(number))
            made.label = made.LABEL_REPEATED if kind[0] == "*" else made.LABEL_OPTIONAL
            if kind[0].islower():  # a scalar
                made.type = getattr(made, f"TYPE_{kind.upper()}")
            else:
                made.type, made.type_name = made.TYPE_MESSAGE, f".{_PACKAGE}.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in names
    }


_CLASSES = _make()
# name of the call: (path, class of the request, class of the answer)
CALLS: dict[str, tuple[str, Any, Any]] = {
    name.partition(".")[2]: (
        f"/etcdserverpb.{name.replace('.', '/')}",
        _CLASSES[f"{request}Request"],
        _CLASSES[f"{request}Response"],
    )
    for name, request in (
        ("KV.Range", "Range"),
        ("KV.Txn", "Txn"),
        ("Lease.LeaseGrant", "LeaseGrant"),
        ("Lease.LeaseRevoke", "LeaseRevoke"),
        ("Lease.LeaseKeepAlive", "LeaseKeepAlive"),
        ("Auth.Authenticate", "Authenticate"),
        ("Maintenance.Status", "Status"),
    )
}


def request(name: str, /, **fields: Any) -> Any:
    return _CLASSES[name](**fields)


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    return request(
        "RequestOp", request_put=request("PutRequest", key=key, value=value, lease=lease)
    )


def delete(start: bytes, end: bytes) -> Any:
    ranged = request("DeleteRangeRequest", key=start, range_end=end)
    return request("RequestOp", request_delete_range=ranged)


def get(key: bytes, revision: int = 0) -> Any:
    return request("RequestOp", request_range=request("RangeRequest", key=key, revision=revision))


def if_created_at(key: bytes, revision: int) -> Any:
    """Return the condition that a key was created at ``revision``; 0: that it does not exist."""
    return request(
        "Compare", result=EQUAL, target=COMPARE_CREATE, key=key, create_revision=revision
    )


def if_changed_at(key: bytes, revision: int) -> Any:
    """Return the condition that a key was last changed at ``revision``."""
    return request("Compare", result=EQUAL, target=COMPARE_MOD, key=key, mod_revision=revision)


log = logging.getLogger(__name__)

ATTEMPT_S = 1.0  # one member's time to answer, before the next one is tried
CALL_S = 3.0  # all attempts of one call
PAUSE_S = 0.1  # after every member failed in turn
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),  # this module decides about retries
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections that ping every 5 s or less
    ("grpc.keepalive_timeout_ms", 3_000),
)
_Code = grpc.StatusCode
_ELSEWHERE = (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.UNKNOWN, _Code.CANCELLED)
_OLD_TOKEN = ("invalid auth token", "auth store is old", "user name is empty")


class Compacted(Exception):
    """A read asked for a revision that etcd has compacted; read again at the newest."""


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """Endpoints and credentials of a cluster; certificates and keys as PEM bytes."""

    endpoints: tuple[str, ...]
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    user: str = ""
    password: str = field(default="", repr=False)


class EtcdClient:
    """Connections to all members; safe to use from many threads."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self.where = ", ".join(access.endpoints)
        self._lock = threading.Lock()
        self._token: str | None = None
        self._current = 0  # the member that is tried first
        self.is_closed = False
        targets = [_target(each) for each in access.endpoints]
        if not targets or len({secure for _, secure in targets}) > 1:
            raise InvalidProfile(
                "etcd's endpoints cannot be used",
                got=self.where or "none",
                wanted='control.etcd_endpoints = ["http://HOST:PORT", …], or all with https',
            )
        self._channels = [self._connect(target, secure) for target, secure in targets]

    def _connect(self, target: str, secure: bool) -> grpc.Channel:
        if not secure:
            return grpc.insecure_channel(target, options=_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            self._access.ca, self._access.key, self._access.cert
        )
        return grpc.secure_channel(target, credentials, options=_OPTIONS)

    def close(self) -> None:
        self.is_closed = True
        for each in self._channels:
            each.close()

    def call(self, name: str, message: Any, *, within_s: float = CALL_S) -> Any:
        """Return the answer of the first member that gives one.

        Raises ServiceUnavailable where none answers in time: whether the call took effect is then
        unknown. Raises AccessDenied, and Compacted.
        """
        return self.send(name, message, within_s=within_s)[0]

    def send(self, name: str, message: Any, *, within_s: float = CALL_S) -> tuple[Any, bool]:
        """Do as ``call``, and also return whether the message was sent only once."""
        until_s = time.monotonic() + within_s
        for tried in itertools.count(1):
            with self._lock:
                channel = self._channels[self._current]
            timeout_s = max(0.05, min(ATTEMPT_S, until_s - time.monotonic()))
            try:
                return self._once(channel, name, message, timeout_s), tried == 1
            except grpc.RpcError as error:
                left_s = until_s - time.monotonic()
                if self._may_try_again(error, channel) and left_s > 0 and not self.is_closed:
                    if tried % len(self._channels) == 0:
                        time.sleep(min(PAUSE_S, left_s))
                    continue
                raise self._translated(error) from error
            except ValueError as error:  # gRPC's error for a closed channel
                raise self._away(f"closed: {error}") from error
        raise AssertionError

    def _once(self, channel: grpc.Channel, name: str, message: Any, timeout_s: float) -> Any:
        path, _, answer = CALLS[name]
        stream = name == "LeaseKeepAlive"  # one request and one answer of a stream are used
        call = (channel.unary_stream if stream else channel.unary_unary)(
            path,
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        metadata: tuple[tuple[str, str], ...] = ()
        if self._access.user and name != "Authenticate":
            self._token = self._token or self._authenticated(channel)
            metadata = (("token", self._token),)
        found = call(message, timeout=timeout_s, metadata=metadata)
        return next(found, answer()) if stream else found

    def _authenticated(self, channel: grpc.Channel) -> str:
        fields = {"name": self._access.user, "password": self._access.password}
        message = request("AuthenticateRequest", **fields)
        return str(self._once(channel, "Authenticate", message, ATTEMPT_S).token)

    def version(self) -> str:
        return str(self.call("Status", request("StatusRequest")).version)

    def _may_try_again(self, error: Any, channel: grpc.Channel) -> bool:
        """Return whether the same call may work at another member, or with a new token."""
        if error.code() in _ELSEWHERE:
            with self._lock:
                if self._channels[self._current] is channel:
                    self._current = (self._current + 1) % len(self._channels)
            return True
        if self._access.user and any(each in (error.details() or "") for each in _OLD_TOKEN):
            is_old, self._token = self._token is not None, None
            return is_old
        return False

    def _translated(self, error: Any) -> PacelineError | Compacted:
        code, details = error.code(), str(error.details())
        if code is _Code.OUT_OF_RANGE:
            return Compacted(details)
        refused = code in (_Code.PERMISSION_DENIED, _Code.UNAUTHENTICATED)
        if refused or "authentication failed" in details:
            return AccessDenied(
                "etcd refuses this user",
                got=details,
                where=self.where,
                do="Check etcd_user, the variable named by etcd_password_env, and its role.",
            )
        if code is _Code.RESOURCE_EXHAUSTED and "space" in details:
            return ServiceUnavailable(
                "etcd is full",
                got=details,
                where=self.where,
                do="Compact and defragment it, raise its quota, then `etcdctl alarm disarm`.",
            )
        return self._away(f"{code.name} {details}")

    def _away(self, got: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            "etcd does not answer",
            got=got[:500],
            where=self.where,
            do="Bring a majority of its members back, and look at their logs.",
        )


def _target(endpoint: str) -> tuple[str, bool]:
    parts = urlsplit(endpoint)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        usable = False
    if not usable:
        raise InvalidProfile(
            "no endpoint of etcd",
            got=endpoint,
            wanted="http://HOST:PORT or https://HOST:PORT",
            where="control.etcd_endpoints",
        )
    return parts.netloc.rpartition("@")[2], parts.scheme == "https"
