"""The tiny model with reasoning that does not depend on its prompt: the reference of a KL penalty toward templates.

    python -m research.templates OUTPUT_DIR    # three minutes on one core

It is fine-tuned on demonstrations of FrozenLake whose completions are shuffled over the prompts. As in training, most
maps of the prompts cannot be solved.
"""

import random
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_MODEL_PATH

PAIRS = 12_800
IMPOSSIBLE = 0.7  # of the prompts, as in training


def shuffled_pairs(count: int = PAIRS, seed: int = 0) -> Dataset:
    """Prompts of training maps, each with the completion of a demonstration on another map."""
    prompts = make_env("frozen_lake", impossible=IMPOSSIBLE).dataset(count, seed=seed)["prompt"]
    completions = make_env("frozen_lake").demonstrations(count, seed=seed + 1)["completion"]
    rows = random.Random(seed).sample(range(len(completions)), len(completions))
    return Dataset.from_dict({"prompt": list(prompts)[: len(rows)], "completion": [completions[row] for row in rows]})


def make_templates(folder: Path) -> None:
    """Fine-tune the tiny model on shuffled pairs, and save it in a new folder."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        args = SFTConfig(
            scratch,
            max_steps=200,
            per_device_train_batch_size=64,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            seed=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(str(TINY_MODEL_PATH), args, train_dataset=shuffled_pairs())
        trainer.train()
        made, tokenizer = Path(scratch) / "made", trainer.processing_class
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(made)
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        tokenizer.save_pretrained(made)
        made.rename(folder)


if __name__ == "__main__":
    make_templates(Path(sys.argv[1]))
