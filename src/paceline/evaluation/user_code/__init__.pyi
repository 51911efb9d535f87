from .metrics import require_metrics as require_metrics, with_metrics as with_metrics
from .process import UserProcess as UserProcess
