"""SNR-filtered GRPO on an environment, from a recipe or from arguments; see `--help`.

python scripts/train.py --recipe frozen_lake_tiny
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
