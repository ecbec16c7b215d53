"""Two processes with different settings: each must say so and end. Prints what each was told."""

import sys
from pathlib import Path

from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import PROMPTS
from datasets import Dataset

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    args = SNRFilteredGRPOConfig(
        folder,
        snr_value=0.9 if state.is_main_process else 0.5,
        per_device_train_batch_size=4,
        num_generations=4,
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    try:
        SNRFilteredGRPOTrainer(policy_path, lambda completions, **_: [0.0] * len(completions), args, dataset)
    except ValueError as error:
        (Path(folder) / f"error_{state.process_index}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
    end()
