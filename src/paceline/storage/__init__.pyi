from .client import (
    from_client_error as from_client_error,
    translate_s3_errors as translate_s3_errors,
)
from .disk import DiskStore as DiskStore, open_store as open_store
from .remote import RemoteFile as RemoteFile, RemoteModel as RemoteModel
from .repositories import (
    is_remote as is_remote,
    remote_model as remote_model,
    remote_name as remote_name,
)
from .signing import Sign as Sign, Signed as Signed
from .store import ObjectStore as ObjectStore
from .url import (
    MAX_URL as MAX_URL,
    ObjectInfo as ObjectInfo,
    is_within as is_within,
    join_url as join_url,
    parse_url as parse_url,
)
