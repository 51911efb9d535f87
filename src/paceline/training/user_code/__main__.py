"""Entry point of the process that checks user code; ``checking`` starts it."""

from __future__ import annotations

import os
import sys

from paceline.training.loop.rank_process import stand_somewhere
from paceline.training.user_code.checking import main

if __name__ == "__main__":
    stand_somewhere()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # user code may have left threads
