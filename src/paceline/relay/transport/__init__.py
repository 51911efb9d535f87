"""How pieces travel between workers: one contract, implemented over framed TCP and over gRPC.

``serving`` selects what a peer receives and ``piece_receiver`` verifies what arrives; the ``tcp_*``
and ``grpc_*`` modules only carry bytes, encoded by ``frames``. ``tls`` and ``identity``
authenticate peers, ``pacing`` limits rates. Nothing here depends on lanes or plans.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
