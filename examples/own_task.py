"""A task of your own, with a held-out curve and a report.

python examples/own_task.py          # Qwen2.5-0.5B-Instruct, on a GPU; or: tiny, on a CPU, to see that it runs
ragen2-trl report runs/own_task --output report.html
"""

import random
import sys

from ragen2_trl import EnvironmentEvalCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import Environment, Episode, Limits
from ragen2_trl.envs.tasks import held_out
from ragen2_trl.tiny import resolve_model


class SumEpisode(Episode):
    def __init__(self, a, b):
        self.a, self.b = a, b

    def observation(self):
        return f"{self.a} + {self.b} = ?"

    def is_action(self, action):
        return action.isascii() and action.isdecimal() and len(action) < 10

    def step(self, action):
        self.done, self.success = True, int(action) == self.a + self.b
        return float(self.success)


class Sum(Environment):
    name, example = "sum", "42"
    single_turn_limits = Limits(turns=1, actions=1)

    def instructions(self):
        return "Add the two numbers. Reward: 1 if right."

    def tasks(self, seed, split, data):
        stream = random.Random(f"sum/{split}/{seed}")
        while True:
            a, b = stream.randint(10, 99), stream.randint(10, 99)
            if held_out(f"{a} {b}") == (split == "test"):  # a task is either for training or held out
                yield {"seed": 100 * a + b, "a": a, "b": b}

    def episode(self, row, rng):
        return SumEpisode(row["a"], row["b"])


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
    is_tiny, env = model == "tiny", Sum()
    args = SNRFilteredGRPOConfig(
        "runs/own_task",
        per_device_train_batch_size=64,  # 8 prompts of 8 completions a step
        max_completion_length=32 if is_tiny else 256,
        max_steps=3 if is_tiny else 100,
        snr_strategy="lossless",
        log_completions=True,  # for the report
        use_cpu=is_tiny,
        bf16=not is_tiny,
    )
    trainer = SNRFilteredGRPOTrainer(resolve_model(model), env.reward_funcs, args, env.dataset(1024, seed=0))
    trainer.add_callback(EnvironmentEvalCallback(env, trainer, every=20, num_prompts=16 if is_tiny else 256))
    trainer.train()
