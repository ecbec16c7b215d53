"""Warm start by supervised fine-tuning on demonstrations; see `--help` and `recipes/warm_start_tiny.yaml`.

python scripts/warm_start.py --config recipes/warm_start_tiny.yaml
"""

from ragen2_trl.cli.warm_start import main

if __name__ == "__main__":
    main()
