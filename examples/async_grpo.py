"""Asynchronous GRPO with the filter: completions come from a vLLM server while the model trains.

    CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 4096 \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'
    CUDA_VISIBLE_DEVICES=1 python examples/async_grpo.py

With LoRA the server takes the adapter alone: see docs/async.md.
"""

from datasets import load_dataset
from trl.rewards import accuracy_reward

from ragen2_trl import MutualInformationCallback, SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer


def main() -> None:
    trainer = SNRFilteredAsyncGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,  # a function of a module: it is sent to the worker's process
        args=SNRFilteredAsyncGRPOConfig(
            output_dir="qwen-async",
            num_generations=16,
            snr_strategy="nonzero",  # every group whose rewards vary; "lossless" for TRL's own training for less
            snr_pilot_generations=2,  # two completions of each prompt first
            max_steps=200,
        ),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.add_callback(MutualInformationCallback(trainer))
    trainer.train()


if __name__ == "__main__":  # the worker's process imports this file
    main()
