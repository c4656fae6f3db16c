#!/usr/bin/env python3
"""``bridge-memory estimate`` from a clone, with nothing installed. Prints the estimate and writes nothing by itself.

    python scripts/estimate_from_hf.py deepseek-ai/DeepSeek-V3 --tp 4 --pp 4 --ep 8 --num-gpus 128 \
        --num-layers-in-last-pipeline-stage 16
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_memory.cli import main

if __name__ == "__main__":
    sys.exit(main(["estimate", *sys.argv[1:]]))
