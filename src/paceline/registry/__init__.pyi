from .lineage import (
    MLMODEL_FILE as MLMODEL_FILE,
    TAG_ACCELERATORS as TAG_ACCELERATORS,
    TAG_APPROVAL as TAG_APPROVAL,
    TAG_MANIFEST as TAG_MANIFEST,
    TAG_PARENT as TAG_PARENT,
    TAG_SWEEP as TAG_SWEEP,
    MetricPoint as MetricPoint,
    Promotion as Promotion,
    RegisteredVersion as RegisteredVersion,
    claim_digest as claim_digest,
    cost_metrics as cost_metrics,
    evaluation_metrics as evaluation_metrics,
    evidence_path as evidence_path,
    gate_metrics as gate_metrics,
    mlmodel as mlmodel,
    page_tags as page_tags,
)
from .registry import Registry as Registry
from .runs import RunStatus as RunStatus, require_run_prefix as require_run_prefix
from .sources import (
    allowed_remote_model as allowed_remote_model,
    import_place as import_place,
    published_reference as published_reference,
    resolve_source as resolve_source,
    resolve_version as resolve_version,
)
