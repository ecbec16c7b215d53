"""Several GPUs with DeepSpeed ZeRO-3, and the measurement of reasoning on the sharded model.

pip install -e ".[deepspeed]"
ragen2-trl recipes zero3 > zero3.yaml
accelerate launch --config_file zero3.yaml --num_processes 4 examples/zero3.py     # Qwen2.5-7B-Instruct
ragen2-trl recipes cpu_zero3 > cpu_zero3.yaml                                      # two processes without a GPU
accelerate launch --config_file cpu_zero3.yaml examples/zero3.py tiny
"""

import sys

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import resolve_model

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-7B-Instruct"
    is_tiny, env = model == "tiny", make_env("frozen_lake")
    trainer = SNRFilteredGRPOTrainer(
        model=resolve_model(model),
        reward_funcs=env.reward_funcs,
        args=SNRFilteredGRPOConfig(
            output_dir="runs/zero3",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1 if is_tiny else 2,  # with 4 GPUs 8 prompts of 8 completions a step
            num_generations=8 if not is_tiny else 4,
            max_completion_length=512 if not is_tiny else 48,
            max_steps=100 if not is_tiny else 3,
            snr_strategy="lossless",
            ddp_backend="gloo" if is_tiny else None,
            logging_steps=1,
            use_cpu=is_tiny,
            bf16=not is_tiny,
        ),
        train_dataset=env.dataset(1024, seed=0),
    )
    trainer.add_callback(MutualInformationCallback(trainer))  # on the sharded model
    trainer.train()
    trainer.save_model()
