from .board import (
    Board as Board,
    cells as cells,
    event_line as event_line,
    render as render,
)
from .commands import COMMANDS as COMMANDS
from .forecast import simulating as simulating
from .main import cli as cli, run as run
from .progress import PublishBars as PublishBars, RelayBars as RelayBars
