"""``python -m bridge_memory``."""

import sys

from bridge_memory.cli import main

sys.exit(main())
