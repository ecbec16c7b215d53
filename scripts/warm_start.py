"""Warm start by supervised fine-tuning on demonstrations; see `--help` and `ragen2-trl recipes`.

python scripts/warm_start.py --recipe warm_start_tiny
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["warm-start", *sys.argv[1:]])
