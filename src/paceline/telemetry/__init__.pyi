from .metrics import (
    CONTENT_TYPE as CONTENT_TYPE,
    FleetMetrics as FleetMetrics,
    Snapshot as Snapshot,
)
from .page import PAGE_FILES as PAGE_FILES, PAGE_HEADERS as PAGE_HEADERS, page_text as page_text
from .prefect_events import JobEvents as JobEvents
from .watch_items import (
    DeploymentSnapshot as DeploymentSnapshot,
    MomentBuilder as MomentBuilder,
    PartSnapshot as PartSnapshot,
    StateSnapshot as StateSnapshot,
    of_deployment as of_deployment,
)
