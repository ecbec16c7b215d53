"""Success, pass@k and mean reward of a model on held-out tasks, with confidence intervals; see `--help`.

python scripts/evaluate.py --model tiny --num_prompts 256 --num_samples 8
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
