"""Tasks of your own data: prompts from a dataset, rewards from functions as TRL takes them."""

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from ragen2_trl.envs.base import Environment, Episode, Limits, RewardFunc
from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.responses import Response, completion_text
from ragen2_trl.envs.tasks import SPLITS, Row, check_columns, held_out, load_tasks

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]


class DatasetEpisode(Episode):
    """One completion of one prompt.

    Args:
        prompt: Text, or messages.
        rewards: What a completion is worth to each of the reward functions; `None` where one does not apply.
        success_at: What the first of them gives for a solved task.
    """

    def __init__(self, prompt: Prompt, rewards: Callable[[str], list[float | None]], success_at: float):
        self._prompt = prompt
        self._rewards = rewards
        self._success_at = success_at

    def observation(self) -> str:
        return self._prompt if isinstance(self._prompt, str) else str(self._prompt[-1]["content"])

    def is_action(self, action: str) -> bool:
        return True

    def step(self, action: str) -> float:
        """The sum of the rewards."""
        rewards = self._rewards(action)
        self.done, self.success = True, rewards[0] is not None and rewards[0] >= self._success_at
        return sum(reward for reward in rewards if reward is not None)


class DatasetEnvironment(Environment):
    """A dataset and reward functions as a task, to be trained, evaluated on held-out rows, and diagnosed.

    ```python
    env = DatasetEnvironment(load_dataset("json", data_files="mine.jsonl", split="train"), [correct, short])
    trainer = SNRFilteredGRPOTrainer(model, env.reward_funcs, args, env.dataset())
    evaluate_model(trainer.model, tokenizer, env)
    ```

    Args:
        dataset: Rows with `prompt`, text or messages as in TRL, and what the reward functions need.
        reward_funcs: One function or several, called as TRL calls them: with `prompts`, `completions` and the columns
            of the dataset, all lists. When tasks are evaluated it is one completion at a time.
        eval_dataset: Held-out rows; default: one in five of `dataset`, by its prompt.
        success_at: A task is solved where the first reward function gives that or more.
        name: What metrics and cards call the task.

    Raises:
        ValueError: If a column is missing or taken, or a reward function cannot be called so.
    """

    single_turn_limits = Limits(turns=1, actions=1)
    multi_turn_limits = None
    example = ""
    splits_answers = False
    name = "dataset"

    def __init__(
        self,
        dataset: Dataset,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        eval_dataset: Dataset | None = None,
        success_at: float = 1.0,
        name: str = "dataset",
    ):
        super().__init__()
        vars(self)["name"] = name
        self.functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self.success_at = success_at
        for function in self.functions:
            _check_function(function)
        if not self.functions:
            raise ValueError("reward_funcs must be one function or more, got none")
        self._sources = [dataset] if eval_dataset is None else [dataset, eval_dataset]
        for rows in self._sources:
            check_columns(rows, ("prompt",))
            if "seed" in rows.column_names:
                raise ValueError(f"columns must leave the name 'seed' to the numbers of rows, got {rows.column_names}")
        numbered = dataset.add_column("seed", range(len(dataset)))
        if eval_dataset is None:
            outside = [held_out(_text(prompt)) for prompt in dataset["prompt"]]
            self.splits = {
                split: numbered.select([number for number, out in enumerate(outside) if out == (split == "test")])
                for split in SPLITS
            }
        else:
            # Numbers tell prompts apart, so those of the two splits do not meet.
            later = range(len(dataset), len(dataset) + len(eval_dataset))
            self.splits = {"train": numbered, "test": eval_dataset.add_column("seed", later)}
        self.options = {"reward_funcs": [function.__name__ for function in self.functions], "success_at": success_at}

    def dataset(
        self, num_prompts: int | None = None, seed: int = 0, split: str = "train", data: str | None = None
    ) -> Dataset:
        """Rows of one split in the order of `seed`: `num_prompts` of them, or all if there are fewer.

        Raises:
            ValueError: If an argument is outside its range, or the split has no row.
        """
        check_choice("split", split, SPLITS)
        check_choice("data", data, (None,))
        rows = self.splits[split]
        if num_prompts is not None:
            check_count("num_prompts", num_prompts, 1, 10_000_000)
        if not len(rows):
            raise ValueError(f"dataset must have rows of the split {split!r}, got none; allowed: an eval_dataset")
        order = list(range(len(rows)))
        random.Random(f"{split}/{seed}").shuffle(order)
        return rows.select(order[:num_prompts])

    def tasks(self, seed: int, split: str, data: str | None) -> Iterator[dict[str, Any]]:
        yield from self.dataset(None, seed, split, data)

    def episode(self, row: Row, rng: random.Random) -> DatasetEpisode:
        prompt = self.prompt(row)
        return DatasetEpisode(prompt, functools.partial(self._rewards, prompt, row), self.success_at)

    def _rewards(self, prompt: Prompt, row: Row, text: str) -> list[float | None]:
        """What TRL would get from each function for a completion of a row."""
        spoken = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
        silent = {"trainer_state": None, "log_metric": lambda *_: None, "log_extra": lambda *_: None}
        given = {"prompts": [prompt], "completions": [spoken], **columns, **silent}
        rewards: list[float | None] = [reward for (reward,) in (function(**given) for function in self.functions)]
        return rewards

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """The functions themselves; the first also logs `env/<name>/success`."""
        first = self.functions[0]

        @functools.wraps(first)
        def counted(*args: Any, log_metric: Callable[[str, float], None] | None = None, **kwargs: Any) -> list[Any]:
            rewards: list[Any] = first(*args, log_metric=log_metric, **kwargs)
            if log_metric is not None:
                solved = [reward is not None and reward >= self.success_at for reward in rewards]
                log_metric(f"env/{self.name}/success", sum(solved) / len(solved))
            return rewards

        del counted.__wrapped__  # so that TRL sees what this one takes
        vars(counted)["environment"] = self  # for the model card
        return [counted, *self.functions[1:]]

    def prompt(self, row: Row) -> Any:
        """That of the row's number, text or messages."""
        number = row["seed"]
        later = number - len(self._sources[0])
        return self._sources[0][number]["prompt"] if later < 0 else self._sources[1][later]["prompt"]

    def read(self, text: str) -> Response:
        return Response("", (text,))

    def instructions(self) -> str:
        return "Prompts of a dataset, with reward functions."


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else completion_text([{**m, "role": "assistant"} for m in prompt])


def _check_function(function: Any) -> None:
    if not callable(function) or not hasattr(function, "__name__"):
        raise ValueError(f"reward_funcs must be functions, got {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward_funcs must be plain functions, {function.__name__} is a coroutine")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"reward_funcs must take **kwargs, as TRL passes all columns, {function.__name__} does not")
    if any(parameter.name == "completion_ids" and parameter.default is parameter.empty for parameter in parameters):
        raise ValueError(
            f"reward_funcs must do without completion_ids, which evaluation does not have, "
            f"{function.__name__} asks for them"
        )


def load_own_data(source: str) -> tuple[Dataset, Dataset | None]:
    """Training rows, and held-out ones where the data have a split for them, of a Hub id, a folder or a file.

    Raises:
        ValueError: If there is nothing to read.
    """
    if Path(source).is_file() or Path(source).suffix:
        return load_tasks(source, "train"), None
    try:
        splits = load_dataset(source)
    except DatasetsError as error:
        raise ValueError(f"dataset={source!r} cannot be read: {error.__cause__ or error}") from error
    except ConnectionError as error:
        raise ValueError(f"dataset={source!r} cannot be read: {error}; allowed offline: a file or a folder") from error
    held = next((splits[name] for name in ("test", "validation") if name in splits), None)
    if "train" not in splits:
        raise ValueError(f"dataset={source!r} must have the split 'train', got {sorted(splits)}")
    return splits["train"], held
