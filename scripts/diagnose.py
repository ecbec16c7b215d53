"""Whether a model's reasoning depends on its prompt, from samples or from completions that TRL saved; see `--help`.

python scripts/diagnose.py --model tiny
python scripts/diagnose.py --model runs/my_run --completions runs/my_run/completions
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["diagnose", *sys.argv[1:]])
