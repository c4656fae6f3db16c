"""``python -m bridge_memory``."""

import os
import sys

from bridge_memory.cli import main
from bridge_memory.processes import ENDS_WITH_STDIN, end_with_stdin

if os.environ.pop(ENDS_WITH_STDIN, ""):
    end_with_stdin()
sys.exit(main())
