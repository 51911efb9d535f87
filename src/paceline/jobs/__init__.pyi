from .admission import (
    HOLD_AFTER_S as HOLD_AFTER_S,
    OVERDUE_AFTER_S as OVERDUE_AFTER_S,
    Decision as Decision,
    Quota as Quota,
    decide as decide,
    why_never as why_never,
)
from .placement import Gang as Gang, Host as Host, Placement as Placement
from .preemption import Reservation as Reservation
