from .board import (
    Board as Board,
    cells as cells,
    render as render,
    told as told,
)
from .commands import COMMANDS as COMMANDS
from .distribution import PublishBars as PublishBars, RelayBars as RelayBars
from .forecast import simulating as simulating
from .main import cli as cli, run as run
