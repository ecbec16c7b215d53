"""Maths with two rewards and LoRA: TRL's own training, at a lower cost.

python examples/maths.py                # Qwen2.5-0.5B-Instruct, on a GPU
python examples/maths.py tiny           # a model of 0.9M parameters, on a CPU, to see that it runs
"""

import random
import re
import sys

from datasets import Dataset
from peft import LoraConfig

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.tiny import resolve_model


def sums(count: int, seed: int) -> Dataset:
    rng = random.Random(seed)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(count)]
    ask = "What is {} + {}? Think inside <think></think>, then write the number alone."
    return Dataset.from_list([{"prompt": [{"role": "user", "content": ask.format(*p)}], "sum": sum(p)} for p in pairs])


def right(completions, **columns):
    answers = [re.findall(r"\d+", one[0]["content"]) for one in completions]
    return [float(found[-1:] == [str(total)]) for found, total in zip(answers, columns["sum"], strict=True)]


def closed(completions, **columns):
    return [float(one[0]["content"].count("</think>") == 1) for one in completions]


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
    is_tiny = model == "tiny"
    trainer = SNRFilteredGRPOTrainer(
        model=resolve_model(model),
        reward_funcs=[right, closed],
        args=SNRFilteredGRPOConfig(
            output_dir="runs/maths",
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,  # 8 prompts of 8 completions a step
            num_generations=8,
            max_completion_length=128,
            max_steps=3 if is_tiny else 100,
            reward_weights=[1.0, 0.1],
            snr_strategy="lossless",  # parameters are TRL's to rounding
            logging_steps=1,
            use_cpu=is_tiny,
            bf16=not is_tiny,
        ),
        train_dataset=sums(1024, seed=0),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.add_callback(MutualInformationCallback(trainer))
    trainer.train()
