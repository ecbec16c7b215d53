"""An agent with tools, through TRL's own `environment_factory`: guess a number in four calls.

pip install "transformers>=5.2" jmespath   # what TRL's tool loop needs
python examples/agent.py                   # Qwen3-0.6B, on a GPU
python examples/agent.py tiny              # a model of 0.9M parameters, on a CPU, to see that it runs
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.callbacks import EnvironmentEvalCallback, MutualInformationCallback
from ragen2_trl.tiny import resolve_model


class GuessingGame:
    """TRL makes one for each completion. Public methods but `reset` and `get_reward` are the model's tools."""

    def reset(self, secret: int, **row) -> str:
        self._secret, self._calls, self._found = secret, 0, False
        return f"The number ends in {secret % 10}."  # so that prompts differ, and reasoning can depend on them

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 0 to 99.

        Returns:
            Whether the number is higher, lower, or found.
        """
        self._calls += 1
        if self._calls > 4:
            return "No guesses are left."
        self._found = self._found or number == self._secret
        return "found" if self._found else "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        return float(self._found)


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    is_tiny = model == "tiny"
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    if is_tiny:
        tokenizer.chat_template = qwen3_chat_template  # its own has no tools
    ask = [{"role": "user", "content": "Find the number from 0 to 99 with the tool `guess`."}]
    rows = Dataset.from_list([{"prompt": ask, "secret": secret} for secret in range(100)])
    rows = rows.train_test_split(2 if is_tiny else 20, seed=0)
    args = SNRFilteredGRPOConfig(
        "runs/agent",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,  # 4 prompts of 8 completions a step
        max_completion_length=16 if is_tiny else 1024,  # of all turns together
        max_steps=2 if is_tiny else 100,
        snr_strategy="lossless",
        logging_steps=1,
        use_cpu=is_tiny,
        bf16=not is_tiny,
    )
    trainer = SNRFilteredGRPOTrainer(
        resolve_model(model), None, args, rows["train"], processing_class=tokenizer, environment_factory=GuessingGame
    )
    trainer.add_callback(EnvironmentEvalCallback(GuessingGame, trainer, dataset=rows["test"]))
    trainer.add_callback(MutualInformationCallback(trainer))
    trainer.train()
