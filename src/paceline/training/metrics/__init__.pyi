from .alerts import (
    AlertChange as AlertChange,
    Alerts as Alerts,
    Straggler as Straggler,
    stragglers as stragglers,
)
from .device import (
    ForwardTimer as ForwardTimer,
    Utilisation as Utilisation,
    matmul_peak as matmul_peak,
    memory as memory,
)
from .exporter import Exporter as Exporter, RankMetrics as RankMetrics
from .meter import StepMetrics as StepMetrics
from .tracing import (
    BackgroundUpload as BackgroundUpload,
    Tracer as Tracer,
    TraceUploader as TraceUploader,
)
