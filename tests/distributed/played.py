"""Episodes of two tasks, of which a process may have one alone, while groups lie on both processes.

python -m torch.distributed.run --standalone --nproc_per_node=2 played.py FOLDER
"""

import sys

from backends import COMMON
from ending import end
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import EpisodeCallback
from ragen2_trl.columns import TASK
from ragen2_trl.envs import TaskMixture, make_env
from ragen2_trl.tiny import TINY_MODEL_PATH

ORDER = ("frozen_lake", "bandit", "bandit", "bandit", "frozen_lake", "frozen_lake")  # two generations of three groups


def run(folder: str, processes: int) -> None:
    mixture = TaskMixture([make_env("frozen_lake"), make_env("bandit")])
    dataset = mixture.dataset(16, seed=0)
    numbers = {task: [row for row, name in enumerate(dataset[TASK]) if name == task] for task in set(ORDER)}
    dataset = dataset.select([numbers[task].pop() for task in ORDER])
    settings = {name: value for name, value in COMMON.items() if not name.startswith("snr_")}
    layout = {"per_device_train_batch_size": 12 // processes, "gradient_accumulation_steps": 2}
    layout |= {"steps_per_generation": 1, "max_steps": 1}
    args = GRPOConfig(folder, **{**settings, **layout}, **({"ddp_backend": "gloo"} if processes > 1 else {}))
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), mixture.reward_funcs, args, dataset)
    trainer.add_callback(EpisodeCallback(trainer))
    trainer.train()


if __name__ == "__main__":
    run(sys.argv[1], 2)
    end()
