"""Training on the tasks of an OpenEnv server, through TRL's own `environment_factory`.

python examples/openenv/server.py                             # elsewhere, or in another terminal
python examples/openenv/client.py http://127.0.0.1:8000       # Qwen3-0.6B, on a GPU
python examples/openenv/client.py http://127.0.0.1:8000 tiny  # a model of 0.9M parameters, on a CPU
"""

import os
import sys
from functools import partial
from itertools import count

from datasets import Dataset
from openenv.core import GenericEnvClient
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from websockets.exceptions import WebSocketException

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.tiny import resolve_model

NUMBERS = count()


class Remote:
    """A player on the server. TRL makes one for each completion and offers `act` to the model as a tool."""

    def __init__(self, url: str):
        self._url, self._number, self._resets = url, next(NUMBERS), 0
        self._client = None

    def reset(self, seed: int, **row) -> str:
        # Members of a group play the same task, each with chance events of its own.
        self._resets, self._return = self._resets + 1, 0.0
        episode = f"{os.environ.get('RANK', '0')}/{self._number}/{self._resets}"
        return self._call("reset", seed=seed, episode_id=episode).observation["text"]

    def act(self, actions: list[str]) -> str:
        """Take a turn.

        Args:
            actions: Actions to carry out one after the other.

        Returns:
            What came of them, and what is seen then.
        """
        known = isinstance(actions, list) and all(isinstance(action, str) for action in actions)
        seen = self._call("step", {"actions": [action.strip() for action in actions] if known else []})
        self._return += seen.reward
        return seen.observation["text"]

    def get_reward(self) -> float:
        return self._return

    def _call(self, name: str, *args, **kwargs):
        """Ask the server. A lost connection is a `ConnectionError`, whose episode our trainers leave out."""
        try:
            if self._client is None:
                self._client = GenericEnvClient(self._url).sync()
            return getattr(self._client, name)(*args, **kwargs)
        except (OSError, WebSocketException) as error:
            self._client = None  # the next episode has a new connection
            raise ConnectionError(f"no answer from the OpenEnv server at {self._url}: {error}") from error


def dataset(url: str) -> Dataset:
    """A prompt with the rules and the number of a task, for each task of the server; `reset` shows the task."""
    state = Remote(url)._call("state")
    prompt = [{"role": "system", "content": state["instructions"]}, {"role": "user", "content": ""}]
    return Dataset.from_list([{"prompt": prompt, "seed": number} for number in range(state["num_tasks"])])


if __name__ == "__main__":
    url, model = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "Qwen/Qwen3-0.6B"
    is_tiny = model == "tiny"
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    if is_tiny:
        tokenizer.chat_template = qwen3_chat_template  # its own has no tools
    args = SNRFilteredGRPOConfig(
        "runs/openenv",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,  # 4 prompts of 8 completions a step
        max_completion_length=16 if is_tiny else 1024,  # of all turns together
        max_steps=2 if is_tiny else 100,
        snr_strategy="lossless",
        logging_steps=1,
        use_cpu=is_tiny,
        bf16=not is_tiny,
    )
    factory = partial(Remote, url)
    trainer = SNRFilteredGRPOTrainer(
        resolve_model(model), None, args, dataset(url), processing_class=tokenizer, environment_factory=factory
    )
    trainer.train()
