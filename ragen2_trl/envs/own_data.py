"""Tasks of your own data: prompts from a dataset, rewards from functions as TRL takes them."""

import functools
import inspect
import math
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, load_dataset

from ragen2_trl.envs.checks import check_choice, check_count
from ragen2_trl.envs.environment import Environment, RewardFunc
from ragen2_trl.envs.episode import Episode, Limits
from ragen2_trl.envs.responses import Response
from ragen2_trl.envs.tasks import SPLITS, Row, check_columns, held_out, load_tasks, means_a_path, readable
from ragen2_trl.messages import InputError
from ragen2_trl.text import check_text_or_messages, flatten, with_text

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
# What TRL hands to a reward function beside the columns, of which an evaluation has nothing.
SILENT: Mapping[str, Any] = {"trainer_state": None, "log_metric": lambda *_: None, "log_extra": lambda *_: None}


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
        if not self.functions:
            raise ValueError("reward_funcs must be one function or more, got none")
        self._sources = [dataset] if eval_dataset is None else [dataset, eval_dataset]
        for place, rows in enumerate(self._sources):
            check_columns(rows, ("prompt",))
            self._sources[place] = _with_prompts(rows)
            if "seed" in rows.column_names:
                raise ValueError(f"columns must not include 'seed', which numbers the rows, got {rows.column_names}")
            for function in self.functions:
                _check_function(function, rows.column_names)
        dataset = self._sources[0]
        numbered = dataset.add_column("seed", range(len(dataset)))
        if eval_dataset is None:
            outside = [held_out(flatten(prompt)) for prompt in dataset["prompt"]]
            self.splits = {
                split: numbered.select([number for number, out in enumerate(outside) if out == (split == "test")])
                for split in SPLITS
            }
        else:
            # Numbers tell prompts apart, so those of the two splits do not meet.
            later = range(len(dataset), len(dataset) + len(eval_dataset))
            self.splits = {"train": numbered, "test": self._sources[1].add_column("seed", later)}
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
            raise ValueError(
                f"dataset has no row for the split {split!r}: of {len(self._sources[0])}, one in five is held out; "
                "allowed: more rows, or an eval_dataset (in a folder, a split 'test')"
            )
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
        given = {"prompts": [prompt], "completions": [spoken], **columns, **SILENT}
        rewards = []
        for function in self.functions:
            try:
                found = function(**given)
                found = list(found) if isinstance(found, Iterator) else found  # one that yields raises here
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}, line {place.lineno}"
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise InputError(f"reward {_name(function)} raised {what} ({where})") from error
            rewards += _checked(function, found, 1)
        return rewards

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """The functions themselves; the first also logs `env/<name>/success`."""
        first = self.functions[0]

        @functools.wraps(first)
        def counted(
            prompts: Sequence[Prompt],
            completions: Sequence[Prompt],
            log_metric: Callable[[str, float], None] | None = None,
            **kwargs: Any,
        ) -> list[Any]:
            found = first(prompts=prompts, completions=completions, log_metric=log_metric, **kwargs)
            found = list(found) if isinstance(found, Iterator) else found
            rewards = _checked(first, found, len(completions))
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


def _name(function: RewardFunc) -> str:
    return f"{function.__module__}:{function.__name__}"


def _checked(function: RewardFunc, rewards: Any, count: int) -> list[float | None]:
    """What a function has given for so many completions; NaN is `None`, as for TRL.

    Raises:
        InputError: If it is something else than as many finite numbers or `None`.
    """
    told = f"reward {_name(function)} must give a list with a number or None for each completion"
    try:
        found = list(rewards)
    except TypeError:
        raise InputError(f"{told}, got {rewards!r:.60}") from None
    if len(found) != count:
        raise InputError(f"{told}, got {len(found)} for {count}")
    numbers: list[float | None] = []
    for reward in found:
        if reward is not None and not hasattr(reward, "__float__"):
            raise InputError(f"{told}, got {reward!r:.60} among them")
        try:
            number = math.nan if reward is None else float(reward)
        except (TypeError, ValueError, RuntimeError):  # of a tensor of two, for example
            raise InputError(f"{told}, got {reward!r:.60} among them") from None
        if math.isinf(number):
            raise InputError(f"{told}, got {number} among them, which is not finite")
        numbers.append(None if math.isnan(number) else number)
    return numbers


def _with_prompts(rows: Dataset) -> Dataset:
    """The rows, checked, with text in place of messages' content that is a list of parts.

    Raises:
        ValueError: If a prompt is neither text nor messages; the message names its row.
    """
    try:
        prompts = rows["prompt"][:]
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt must be text in UTF-8, got other bytes in a row: {error}") from error
    for number, prompt in enumerate(prompts):
        check_text_or_messages("prompt", prompt, f"row {number}")
        if not prompt:
            raise ValueError(f"prompt must not be empty, got {prompt!r} in row {number}")
    if not any(isinstance(message["content"], list) for one in prompts if isinstance(one, list) for message in one):
        return rows
    texts = [one if isinstance(one, str) else with_text(one) for one in prompts]
    return rows.remove_columns("prompt").add_column("prompt", texts)


def _check_function(function: Any, columns: Sequence[str]) -> None:
    if not callable(function) or not hasattr(function, "__name__"):
        raise ValueError(f"reward_funcs must be functions, got {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward_funcs must be plain functions, got the coroutine {function.__name__}")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"reward_funcs must take **kwargs, since TRL passes all columns; got {function.__name__}")
    given = {"prompts", "completions", "seed", *SILENT, *columns} - {"prompt", "completion"}
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty]
    if missing := [parameter.name for parameter in named if parameter.name not in given]:
        raise ValueError(
            f"evaluation passes reward_funcs only {sorted(given)}; {function.__name__} also needs {missing}"
        )


def load_own_data(source: str, field: str = "dataset") -> tuple[Dataset, Dataset | None]:
    """Training rows, and held-out ones where the data have a split for them, of a Hub id, a folder or a file.

    Raises:
        ValueError: If there is nothing to read.
    """
    path = Path(source)
    if path.is_file() or (not path.exists() and (path.suffix or means_a_path(source))):
        return load_tasks(source, "train", field=field), None
    with readable(field, source):
        splits = load_dataset(source)
    held = next((splits[name] for name in ("test", "validation") if name in splits), None)
    if "train" not in splits:
        raise ValueError(f"{field}={source!r} must have the split 'train', got {sorted(splits)}")
    return splits["train"], held
