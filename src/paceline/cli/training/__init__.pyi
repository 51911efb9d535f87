from .command import train as train
from .mlflow_logging import TrainingLog as TrainingLog, location as location
from .output import (
    JOB_FILE as JOB_FILE,
    METRICS_FILE as METRICS_FILE,
    Lines as Lines,
    beside as beside,
    facts as facts,
)
from .reproduce import (
    is_directory as is_directory,
    recorded_here as recorded_here,
    recorded_run as recorded_run,
)
