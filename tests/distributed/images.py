"""Trains on two processes, of which the first samples prompts with images and the second prompts without."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_images import idefics3, llava, llava_next, looking

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer

SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "ddp_backend": "gloo",
    "ddp_find_unused_parameters": True,  # without an image, a vision tower has no gradients
    "log_multimodal": False,  # TRL gathers images on those processes only that have some
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
}


def varied(prompts, **kwargs):
    """0, 1, 0, 1 in the groups of each process but the last."""
    return [number % 2 * float(number < 4) for number in range(len(prompts))]


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 2
    seen = []
    for family in (llava, llava_next, idefics3):
        model, processor = family(policy_path)
        args = SNRFilteredGRPOConfig(output_dir=folder, **SETTINGS)
        trainer = SNRFilteredGRPOTrainer(model, varied, args, looking([1, 2, 0, 5]), processing_class=processor)
        sample, compute = trainer._sample_round, trainer._compute_loss
        sampled = []

        def sampling(inputs, number, sample=sample, sampled=sampled):
            sampled.append(sample(inputs, number))
            return sampled[-1]

        def computing(model, inputs, compute=compute):
            loss = compute(model, inputs)
            seen.append(bool(loss.isfinite()))
            return loss

        trainer._sample_round, trainer._compute_loss = sampling, computing
        trainer.train()
        assert all(("pixel_values" in batch) == (state.process_index == 0) for batch in sampled)
    torch.save(seen, Path(folder) / f"seen_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()
