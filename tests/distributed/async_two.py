"""TRL's asynchronous trainer on several processes, plain and with the filter: async_two.py POLICY FOLDER.

Writes, by case, how far apart the parameters of plain TRL and of ours are, and of ours on the processes.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import async_cpu
from accelerate.utils import gather_object
from async_cpu import Server, StubWorker, make_async, rows_of_group
from conftest import parameters_of

from ragen2_trl import MutualInformationCallback

REWARDS = [[1, 0, 0, 1], [0] * 4, [0, 0, 1, 0], [0] * 4, [1, 1, 0, 1], [0] * 4] * 16
COMMON = {
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.3,
    "save_strategy": "steps",
    "save_steps": 2,
}


def worker(keeps_dead):
    groups = [(number, one) for number, one in enumerate(REWARDS) if keeps_dead or any(one)]
    return StubWorker([row for number, one in groups for row in rows_of_group(number, one)])


def train(policy, folder, keeps_dead, **settings):
    trainer = make_async(policy, folder, Server(), rollout_worker=worker(keeps_dead), **COMMON, **settings)
    if not settings.get("plain"):
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    return trainer


def apart(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def main(policy, folder):
    async_cpu.patch()
    found = {}
    for strategy in ("nonzero", "lossless"):
        for budget in (0, 60):
            case = f"{strategy}_{budget}"
            lossless = strategy == "lossless"
            plain = train(policy, f"{folder}/{case}_plain", lossless, plain=True, token_budget=budget)
            own = train(policy, f"{folder}/{case}", True, snr_strategy=strategy, token_budget=budget)
            everywhere = gather_object([{name: one.tolist() for name, one in parameters_of(own).items()}])
            if own.accelerator.is_main_process:
                row = own.state.log_history[0]
                found[case] = {
                    "from_trl": apart(parameters_of(own), parameters_of(plain)),
                    "same_everywhere": all(one == everywhere[0] for one in everywhere),
                    "processes": len(everywhere),
                    "steps": own.state.global_step,
                    "done": len(own._groups.ledger),
                    "in_progress": sorted(own._groups.ledger.rows),
                    "measured": row.get("mi/first_turn/num_prompts"),
                    "health": row["health/completions"],
                    "files": sorted(path.name for path in Path(folder, case, "checkpoint-2").glob("snr_*")),
                }
            own.accelerator.wait_for_everyone()
    if own.accelerator.is_main_process:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
