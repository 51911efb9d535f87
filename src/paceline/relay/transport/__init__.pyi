from .contract import (
    PullSpec as PullSpec,
    PullStream as PullStream,
    RevokedWorkers as RevokedWorkers,
    ServeSpec as ServeSpec,
    TransferCounters as TransferCounters,
    Transport as Transport,
)
from .frames import (
    HEADER as HEADER,
    MAX_DATA as MAX_DATA,
    MAX_PAYLOAD as MAX_PAYLOAD,
    MAX_PIECES as MAX_PIECES,
    MAX_REQUEST as MAX_REQUEST,
    METHOD as METHOD,
    NONCE_BYTES as NONCE_BYTES,
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    WAITING as WAITING,
    ChunkData as ChunkData,
    ChunkRequest as ChunkRequest,
    Hello as Hello,
    Kind as Kind,
    decode as decode,
    decode_data as decode_data,
    decode_hello as decode_hello,
    decode_request as decode_request,
    encode as encode,
    encode_challenge as encode_challenge,
    encode_data as encode_data,
    encode_hello as encode_hello,
    encode_payload as encode_payload,
    encode_request as encode_request,
    proof as proof,
)
from .grpc_client import GrpcPullStream as GrpcPullStream
from .grpc_server import GrpcTransport as GrpcTransport
from .identity import (
    SIGNING_FILE as SIGNING_FILE,
    Authority as Authority,
    authorities as authorities,
    authority_key as authority_key,
    ensure_authority as ensure_authority,
    fingerprint as fingerprint,
    issue_for_key as issue_for_key,
    issue_identity as issue_identity,
    issue_server as issue_server,
    key_sha256 as key_sha256,
    make_authority as make_authority,
    make_other_authority as make_other_authority,
    new_request as new_request,
    requested_key as requested_key,
)
from .pacing import (
    HOLD_S as HOLD_S,
    LEAST_BYTES as LEAST_BYTES,
    MOST_BYTES as MOST_BYTES,
    Pacer as Pacer,
    RateMeter as RateMeter,
    ReceiveWindow as ReceiveWindow,
    no_limit as no_limit,
)
from .piece_receiver import PieceReceiver as PieceReceiver
from .serving import (
    CorruptReport as CorruptReport,
    PeerMessage as PeerMessage,
    ServedStream as ServedStream,
    StreamSlots as StreamSlots,
)
from .sockets import (
    MAX_SLEEP_S as MAX_SLEEP_S,
    PlainChannel as PlainChannel,
    ReadCoalescer as ReadCoalescer,
    held_bytes as held_bytes,
    read_frame as read_frame,
)
from .tcp_server import TcpTransport as TcpTransport
from .tls import (
    TlsSettings as TlsSettings,
    peer_ids as peer_ids,
    worker_host_name as worker_host_name,
)
from .transports import tls_for as tls_for, transport_for as transport_for
