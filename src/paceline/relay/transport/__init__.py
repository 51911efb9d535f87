"""How pieces travel between nodes: one contract (``transport``), framed TCP and gRPC.

``serving`` decides what a peer gets and ``intake`` judges what arrives; ``server``/``client`` and
``grpc_server``/``grpc_client`` only carry bytes, in ``frames`` or ``chunks``; ``tls`` and
``identity`` say who is at the other end, ``pacing`` how fast. Nothing here knows lanes or plans.
"""
