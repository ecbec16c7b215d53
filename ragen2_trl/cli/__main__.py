"""`python -m ragen2_trl.cli` is `ragen2-trl`: for processes and launchers that know this Python alone."""

from ragen2_trl.cli import main

main()
