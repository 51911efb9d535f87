from .page import COLUMNS as COLUMNS, page_of as page_of, trial_row as trial_row
from .search_space import Search as Search, Sweep as Sweep, read_space as read_space
from .study import (
    HELD_S as HELD_S,
    POINTS as POINTS,
    held as held,
    opened as opened,
    stored_run_id as stored_run_id,
    studies_of as studies_of,
)
from .sweep import report_sweep as report_sweep, run_sweep as run_sweep
