"""Warm start by supervised fine-tuning on demonstrations; see `--help` and `recipes/warm_start_tiny.yaml`.

python scripts/warm_start.py --config recipes/warm_start_tiny.yaml
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["warm-start", *sys.argv[1:]])
