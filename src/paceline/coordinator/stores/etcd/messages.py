"""The messages of etcd's v3 API that are used here, made when this module is imported.

Only names, numbers and types of fields matter on the wire. They are written down in one table, of
which protobuf makes classes at import: no generated file, no compiler, and a pool of descriptors of
its own, so that another etcd client in the same process does not collide with it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "paceline.etcd"
_TABLE = """
Header: cluster_id=1:uint64 member_id=2:uint64 revision=3:int64 raft_term=4:uint64
KeyValue: key=1:bytes create_revision=2:int64 mod_revision=3:int64 version=4:int64 value=5:bytes lease=6:int64
RangeRequest: key=1:bytes range_end=2:bytes limit=3:int64 revision=4:int64 keys_only=8:bool count_only=9:bool
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
WatchCreateRequest: key=1:bytes range_end=2:bytes start_revision=3:int64
WatchRequest: create_request=1:WatchCreateRequest
WatchEvent: type=1:int32 kv=2:KeyValue
WatchResponse: header=1:Header watch_id=2:int64 created=3:bool canceled=4:bool compact_revision=5:int64 cancel_reason=6:string events=11:*WatchEvent
AuthenticateRequest: name=1:string password=2:string
AuthenticateResponse: header=1:Header token=2:string
StatusRequest:
StatusResponse: header=1:Header version=2:string
"""  # noqa: E501 (a table: one message a line)

_SCALARS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
}
COMPARE_CREATE, COMPARE_MOD = 1, 2  # what of a key is compared
EQUAL, GREATER = 0, 1
DELETED = 1  # a watch event's type


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
            field_name, _, rest = each.partition("=")
            number, _, kind = rest.partition(":")
            field = message.field.add(name=field_name, number=int(number))
            repeated = kind.startswith("*")
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind.removeprefix('*')}"
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
        ("Watch.Watch", "Watch"),
        ("Auth.Authenticate", "Authenticate"),
        ("Maintenance.Status", "Status"),
    )
}


def request(name: str, **fields: Any) -> Any:
    """Return the message ``name`` (of the table) with ``fields``."""
    return _CLASSES[name](**fields)


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    """Return the operation that puts a key."""
    return request(
        "RequestOp", request_put=request("PutRequest", key=key, value=value, lease=lease)
    )


def delete(start: bytes, end: bytes) -> Any:
    """Return the operation that deletes the keys in [start, end)."""
    ranged = request("DeleteRangeRequest", key=start, range_end=end)
    return request("RequestOp", request_delete_range=ranged)


def get(key: bytes, revision: int = 0) -> Any:
    """Return the operation that reads one key."""
    return request("RequestOp", request_range=request("RangeRequest", key=key, revision=revision))


def created_at(key: bytes, revision: int) -> Any:
    """Return the condition that a key was created at ``revision``; 0: that there is none."""
    return request(
        "Compare", result=EQUAL, target=COMPARE_CREATE, key=key, create_revision=revision
    )


def changed_at(key: bytes, revision: int) -> Any:
    """Return the condition that a key was last changed at ``revision``."""
    return request("Compare", result=EQUAL, target=COMPARE_MOD, key=key, mod_revision=revision)


def exists(key: bytes) -> Any:
    """Return the condition that there is such a key."""
    return request("Compare", result=GREATER, target=COMPARE_CREATE, key=key, create_revision=0)


def after_prefix(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
