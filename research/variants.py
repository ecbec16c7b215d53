"""`ragen2-trl` with a class of `research` mixed in before the filtered trainers.

    python -m research.variants SkipsZeroGradients train --config config.yaml

Among an experiment's settings `variant` names the class, which is in `research.ablations` or `research.gradients`.
"""

import sys
from collections.abc import Sequence
from typing import cast

from ragen2_trl import cli
from ragen2_trl.cli import train
from research import ablations, gradients


def main(args: Sequence[str]) -> None:
    """Run a command with a variant of the trainers.

    Args:
        args: name of the class, and the arguments of `ragen2-trl`.
    """
    variant, *command = args
    mixin: type = getattr(gradients if hasattr(gradients, variant) else ablations, variant)
    for name, (trainer, config) in train.ALGORITHMS.items():
        train.ALGORITHMS[name] = cast("type[train.Trainer]", type(trainer.__name__, (mixin, trainer), {})), config
    cli.main(command)


if __name__ == "__main__":
    main(sys.argv[1:])
