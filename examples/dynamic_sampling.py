"""Most prompts are too hard: sample two completions of each first, and more prompts until the batch is full.

python examples/dynamic_sampling.py          # Qwen2.5-0.5B-Instruct, on a GPU
python examples/dynamic_sampling.py tiny     # a model of 0.9M parameters, on a CPU, to see that it runs
"""

import sys

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import resolve_model

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
    is_tiny = model == "tiny"
    env = make_env("frozen_lake", impossible=0.7)  # 70 % of the lakes have no way to the goal
    trainer = SNRFilteredGRPOTrainer(
        model=resolve_model(model),
        reward_funcs=env.success_func,
        args=SNRFilteredGRPOConfig(
            output_dir="runs/dynamic_sampling",
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,  # 8 prompts of 8 completions a step
            num_generations=8,
            max_completion_length=48 if is_tiny else 128,
            max_steps=3 if is_tiny else 100,
            snr_strategy="nonzero",  # a group is kept if its rewards vary
            snr_dynamic_sampling_rounds=4,  # at most so many further rounds of prompts
            snr_pilot_generations=2,  # two completions first; the other six where rewards may vary
            logging_steps=1,
            use_cpu=is_tiny,
            bf16=not is_tiny,
        ),
        train_dataset=env.dataset(1024, seed=0),
    )
    trainer.train()  # the table at its end says what was sampled, against plain TRL
