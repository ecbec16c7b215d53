"""What if: which remedy for groups without signal pays on the data of a training, from its log alone.

ragen2-trl what-if runs/my_run
ragen2-trl what-if runs/my_run --tokenizer Qwen/Qwen2.5-0.5B-Instruct --json what_if.json
ragen2-trl what-if rollouts.jsonl --num_generations 8 --groups 16
"""

from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen2_trl.cli.arguments import parse_plain
from ragen2_trl.cli.typed import checked_input
from ragen2_trl.messages import printable
from ragen2_trl.record.files import write_json
from ragen2_trl.remedies import WhatIf, what_if


def main(args: list[str] | None = None) -> None:
    """Print what is wrong, the table of remedies and an advice; write all numbers with `--json`.

    Raises:
        InputError: If the log cannot be read.
    """
    arguments = parse_plain("what-if", args)
    with checked_input():
        found = what_if(
            arguments.run,
            num_generations=arguments.num_generations,
            groups_per_generation=arguments.groups,
            rewards=arguments.rewards,
            reward_weights=arguments.reward_weights,
            micro_batch=arguments.micro_batch,
            tokenizer=arguments.tokenizer,
            sampling_share=arguments.sampling_share,
            seed=arguments.seed,
        )
        if arguments.json is not None:
            write_json(arguments.json, found.to_dict(), indent=2)
    show(Console(), found)


def show(console: Console, found: WhatIf) -> None:
    """Faults first, then the table, the advice, and what was read. Prompts and names in it are escaped."""
    for fault in found.faults:
        console.print(Text(printable(f"Wrong: {fault.text}"), style="bold"))
    if found.remedies:
        console.print(remedy_table(found))
    console.print(Text(printable(found.advice), style="bold"))
    for note in found.notes:
        console.print(Text(printable(note)))


def remedy_table(found: WhatIf) -> Table:
    """A row for each remedy, the most useful first."""
    table = Table(title=Text(printable(Path(found.log.name).name)), box=HORIZONTALS, show_lines=True)
    table.add_column("remedy")
    table.add_column("gain")
    table.add_column("what it would have cost and bought here (95 % interval)", ratio=1)
    for one in found.remedies:
        gain = "" if one.gain is None else one.gain.number().replace(" (", "\n(")
        table.add_row(*(Text(printable(part)) for part in (one.name, gain, one.finding)))
    return table
