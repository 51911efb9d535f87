"""The coordinator's three stores, each with two backends, and the values that they exchange.

========== =================================================== ================= =================
contract   content                                             one machine       cluster
========== =================================================== ================= =================
Coordination deployments, plans, workers, receipts, keys,      SQLite            etcd
           tokens, the ledger, the event outbox, the leader
Progress   each worker's progress and last heartbeat           memory            Redis
Audit      every event, for as long as the operator wants      SQLite            PostgreSQL
========== =================================================== ================= =================

Only Coordination must not lose anything. Progress may be lost at any moment. Audit is filled from
Coordination's outbox, so an event is committed together with the change that it describes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
