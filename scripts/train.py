"""SNR-filtered GRPO on an environment, from a recipe or from arguments; see `--help`.

python scripts/train.py --config recipes/frozen_lake_tiny.yaml
"""

from ragen2_trl.cli.train import main

if __name__ == "__main__":
    main()
