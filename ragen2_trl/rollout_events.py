"""Events of a trainer's sampling, before the update, and the one function that rebinds methods of a live object.

TRL has no callback event between sampling and update. Our trainers announce their rollouts (`RolloutEvents.rollout`);
on TRL's stock trainers `_generate_and_score_completions` is rebound once, whatever the number of listeners.

    >>> listener = listen(trainer, on_rollout=lambda rollout: print(rollout.rewards.shape))  # doctest: +SKIP
    >>> listener.remove()  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor

from ragen2_trl.columns import EPISODE, GENERATION, REQUIRED, TURN_SAMPLES
from ragen2_trl.failures import LOST, check_failed, left_out

logger = get_logger(__name__)

Batch = dict[str, Any]
TRAINERS = "GRPOTrainer, RLOOTrainer, and the trainers with the filter"
_ATTRIBUTE = "_rollout_events"  # of a trainer: its `RolloutEvents`


@dataclass(frozen=True)
class LocalRollout:
    """The completions of one generation on this process, as ids without padding, and the rewards of all processes.

    Args:
        prompt_ids: ids of the prompt of each row.
        completion_ids: ids of the completion of each row, as they were sampled.
        tool_masks: where there are turns, 1 for each id that the model wrote and 0 for the others; else `None`.
        has_images: whether prompts came with images.
        rewards: (N, G) weighted reward sums of all processes; NaN where there is no finite one.
        inputs: the rows of the dataset, as the trainer was given them.
        batch: the trainer's batch of these rows, before any is dropped.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_masks: list[list[int] | None]
    has_images: bool
    rewards: Tensor
    inputs: list[dict[str, Any]]
    batch: Batch

    @property
    def turn_samples(self) -> list[list[dict[str, Any]]]:
        """For each row, the training samples of its episode after the first (see `ContextWindow`)."""
        return [row.get(TURN_SAMPLES, []) for row in self.inputs]


@dataclass(frozen=True)
class Rollout:
    """Completions of one generation over all processes: N groups of G rows, one after the other.

    Args:
        prompt_ids, completion_ids, tool_masks, turn_samples: of each of the B rows, as in `LocalRollout`.
        rewards: (N, G), as in `LocalRollout`.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_masks: list[list[int] | None]
    rewards: Tensor
    turn_samples: list[list[dict[str, Any]]]

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]


@dataclass(frozen=True)
class Scored:
    """The result of one call of `_calculate_rewards`.

    Args:
        rewards_per_func: (B, F) rewards by function over all processes, NaN where a function gave no number, and for
            failed episodes.
        sums: (B,) weighted, see `group_rewards`.
        exact_sums: (B,) the same in float64 on the CPU, which do not depend on the order of functions.
        columns: by column, the values that reward functions logged in this call (TRL's `log_extra`) for this process's
            rows; twice as many where two functions logged the same column.
        failed: (B,) bool over all processes, episodes that their environment could not play to the end.
    """

    rewards_per_func: Tensor
    sums: Tensor
    exact_sums: Tensor
    columns: Mapping[str, list[Any]]
    failed: Tensor


@runtime_checkable
class NeedsRows(Protocol):
    """A rollout function that sees the dataset rows of each generation, once it is attached to a trainer."""

    @property
    def splits_episodes(self) -> bool:
        """Whether an episode may be several training samples."""

    def attach(self, trainer: Any) -> None:
        """Listen to a trainer."""


@runtime_checkable
class TellsFailure(Protocol):
    """An environment of TRL's `environment_factory` that tells its task, and what has ended its episode."""

    _snr_task: str
    _snr_failure: str | None


@dataclass(eq=False)
class Listener:
    """A subscription to a trainer's sampling events; see `listen`."""

    events: SamplingEvents = field(repr=False)
    on_rows: Callable[[list[dict[str, Any]]], None] | None = None
    on_generated: Callable[[int, int], None] | None = None
    on_rollout: Callable[[LocalRollout], None] | None = None
    on_pass: Callable[[int, int, int], None] | None = None
    aside: Callable[[], AbstractContextManager[None]] | None = None
    all_rows: Callable[[], bool] | None = None

    def remove(self) -> None:
        """Unsubscribe."""
        if self in self.events.listeners:
            self.events.listeners.remove(self)


class SamplingEvents:
    """The listeners to a trainer's sampling. A trainer that samples by methods of its own announces it here.

    Args:
        trainer: any of TRL's, or a subclass; `listen` finds the events there.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.listeners: list[Listener] = []
        setattr(trainer, _ATTRIBUTE, self)

    def awaiting(self, event: str) -> list[Any]:
        """What listeners have subscribed to an event with, by its name in `listen`."""
        found = (getattr(listener, event) for listener in self.listeners)
        return [one for one in found if one is not None]

    def tell(self, event: str, *values: Any) -> None:
        """Announce an event, by its name in `listen`. `on_rollout` is a call for all processes together."""
        with ExitStack() as stack:
            for aside in self.awaiting("aside") if event == "on_rollout" else ():
                stack.enter_context(aside())
            for take in self.awaiting(event):
                take(*values)

    @property
    def needs_all_rows(self) -> bool:
        """Whether a listener computes with rows of groups that carry no signal."""
        return any(needs() for needs in self.awaiting("all_rows"))


class RolloutEvents(SamplingEvents):
    """The latest completions and rewards of a trainer, and the listeners to its sampling.

    `_generate` and `_calculate_rewards` are rebound on the instance, around the methods of subclasses, so that
    listeners get the values that TRL gets.

    Args:
        trainer: TRL's GRPO or RLOO trainer, or a subclass.
        announces: whether the trainer tells `on_rows` and calls `rollout` itself; else this is done around its
            `_generate_and_score_completions`.

    Raises:
        TypeError: for a trainer that does not sample completions.
    """

    def __init__(self, trainer: Any, announces: bool = False):
        for name in ("_generate_and_score_completions", "_generate", "_calculate_rewards", "_metrics"):
            if not hasattr(trainer, name):
                raise TypeError(f"{type(trainer).__name__} has no {name}; allowed: {TRAINERS}.")
        super().__init__(trainer)
        self.scored: Scored | None = None  # of the latest call of `_calculate_rewards`
        self._has_failed = False  # whether an episode has, which is said once
        self._prompts: Any = None  # of the latest call of `_generate`
        self._generated: Any = None  # its result
        self._ahead: Tensor | None = None  # rewards of completions that TRL has not asked for yet
        extend(trainer, "_generate", self._note_generated)
        extend(trainer, "_calculate_rewards", self._note_rewards)
        if not announces:
            extend(trainer, "_generate_and_score_completions", self._around_sampling)

    def rollout(self, inputs: list[dict[str, Any]], batch: Batch) -> None:
        """Announce a complete generation for training, with the weights that sampled it, before any row is dropped."""
        if not self.awaiting("on_rollout"):
            return
        prompt_ids, completion_ids, *_ = self._generated
        masks = self._masks(self._generated)
        has_images, rewards = batch.get("pixel_values") is not None, self.group_rewards.cpu()
        of_rows = _as_lists(prompt_ids), _as_lists(completion_ids), _as_lists(masks)
        self.tell("on_rollout", LocalRollout(*of_rows, has_images, rewards, inputs, batch))

    @property
    def group_rewards(self) -> Tensor:
        """(N, G) of the latest generation, see `group_rewards`."""
        assert self.scored is not None  # a generation has been scored
        return self.scored.sums.view(-1, self.trainer.num_generations)

    def generated(self, generated: Any) -> None:
        """Announce completions that were sampled for training, in the form of a result of `_generate`."""
        if self.awaiting("on_generated"):
            self.tell("on_generated", self._tokens_written(generated), len(generated[1]))

    @property
    def conversations(self) -> list[tuple[Any, Any, int]]:
        """For each row of the latest generation on this process, its prompt and completion as reward functions get
        them, and how many tokens the model wrote."""
        texts = texts_of(self.trainer, self._generated)
        return list(zip(self._prompts, texts, self._written(self._generated), strict=True))

    @property
    def has_generated(self) -> bool:
        """Whether a call of `_generate` has returned, and no other has begun."""
        return self._generated is not None

    def score_ahead(self, inputs: list[dict[str, Any]]) -> Tensor:
        """(B, F) rewards of the latest completions, which TRL then gets without calling a reward function again.

        Args:
            inputs: this process's rows of the dataset, one for each completion.
        """
        completion_ids = self._generated[1]
        completions = texts_of(self.trainer, self._generated)
        # TRL puts the fields of a rollout function into its rows before it scores them.
        fields = next((one for one in self._generated if isinstance(one, dict)), {})
        of_rows = [
            (name, values if isinstance(values, list) else [values] * len(inputs)) for name, values in fields.items()
        ]
        rows = [
            {**row, **{name: values[number] for name, values in of_rows if number < len(values)}}
            for number, row in enumerate(inputs)
        ]
        self._ahead = self.trainer._calculate_rewards(rows, self._prompts, completions, completion_ids)
        return self._ahead

    def scored_rows(self, rows: list[dict[str, Any]], rewards: Tensor, columns: Mapping[str, list[Any]]) -> Scored:
        """What reward functions said of some rows; failed episodes have no reward. A call for all processes together.

        Args:
            rows: this process's rows, as reward functions see them.
            rewards: (B, F) by function, over all processes.
            columns: that they logged.

        Raises:
            ConnectionError: if too many episodes have failed.
        """
        trainer = self.trainer
        environments = getattr(trainer, "environments", None) or [row.get(EPISODE) for row in rows]
        told: list[tuple[str | None, str | None]] = gather_object([_failure_of(one) for one in environments])
        failed = torch.tensor([failure is not None for _, failure in told], device=rewards.device)
        if rewards.size(1) == len(trainer.reward_funcs):  # a subclass may have merged several functions into one
            required = [hasattr(func, REQUIRED) for func in trainer.reward_funcs]
            failed |= rewards[:, required].isnan().any(dim=1)
        example = next((failure for _, failure in told if failure), "see the warning above")
        check_failed(int(failed.sum()), len(failed), example)
        for task in sorted({task for task, _ in told if task}):
            key, of_task = f"env/{task}/failed", [failure is not None for name, failure in told if name == task]
            if key not in trainer._pending_metrics:  # which a reward function has not told
                trainer._pending_metrics[key].append(sum(of_task) / len(of_task))
        rewards = rewards.masked_fill(failed.unsqueeze(1), torch.nan)
        weights = trainer.reward_weights
        sums = group_rewards(rewards, weights, 1).flatten()
        exact = group_rewards(rewards.cpu().double(), weights.cpu().double(), 1).flatten()
        return Scored(rewards, sums, exact, columns, failed)

    def number(self, rows: int, generation: int | None) -> None:
        """Number this process's latest completions in TRL's table, unless a reward function logs such a column."""
        if self.scored is None or GENERATION not in self.scored.columns:
            self.trainer._logs["extra"][GENERATION].extend(gather_object([generation] * rows))

    def watched(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        """An `environment_factory` of environments with an `EnvironmentWatch`."""

        def make() -> Any:
            return EnvironmentWatch(factory(), self._say).environment

        return make

    def watch_environments(self) -> None:
        """Watch all environments of the trainer."""
        factories = getattr(self.trainer, "environment_factories", None)  # RLOO has none
        if factories is not None:
            self.trainer.environment_factories = {name: self.watched(one) for name, one in factories.items()}
            for environment in (one for pool in self.trainer._environment_pool.values() for one in pool):
                EnvironmentWatch(environment, self._say)

    def _say(self, task: str, failure: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(left_out(task, failure), main_process_only=False)

    def _note_generated(self, generate: Callable[..., Any], prompts: Any, *args: Any, **kwargs: Any) -> Any:
        self._prompts, self._generated, self._ahead = prompts, None, None
        is_training = self.trainer.model.training
        self._generated = generate(prompts, *args, **kwargs)
        if is_training:
            self.generated(self._generated)
        elif self.trainer.model.training:  # continuous batching leaves it so
            self.trainer.model.eval()
        return self._generated

    def _tokens_written(self, generated: Any) -> int:
        """By the model on this process; its turn samples included."""
        fields = [one for one in generated[3:] if isinstance(one, dict) and TURN_SAMPLES in one]
        further = [sample["env_mask"] for one in fields for samples in one[TURN_SAMPLES] for sample in samples]
        return sum(self._written(generated)) + sum(int(sum(mask)) for mask in further)

    def _written(self, generated: Any) -> list[int]:
        """For each completion, how many tokens the model wrote."""
        masks = zip(generated[1], self._masks(generated), strict=True)
        return [len(ids) if mask is None else int(sum(mask)) for ids, mask in masks]

    def _masks(self, generated: Any) -> list[list[int] | None]:
        """For each completion, 1 for each id that the model wrote and 0 for the others; `None` without turns."""
        _, completion_ids, masks, *_ = generated
        if masks is None or is_rloo(self.trainer):  # whose third value is something else
            return [None] * len(completion_ids)
        return list(masks)

    def _note_rewards(self, calculate: Callable[..., Tensor], rows: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._ahead is not None:
            rewards, self._ahead = self._ahead, None
            return rewards
        pending = self.trainer._pending_extra_logs  # TRL moves it to its table of completions later
        before = {column: len(values) for column, values in pending.items()}
        rewards = calculate(rows, *args, **kwargs)
        logged = {column: list(values[before.get(column, 0) :]) for column, values in pending.items()}
        self.scored = self.scored_rows(rows, rewards, {column: one for column, one in logged.items() if one})
        return self.scored.rewards_per_func

    def _around_sampling(self, sample: Callable[[Any], Batch], inputs: Any) -> Batch:
        self.tell("on_rows", inputs)
        batch = sample(inputs)
        if self.trainer.model.training:
            self.rollout(inputs, batch)
        return batch


class EnvironmentWatch:
    """Notes what an environment of TRL's `environment_factory` raises, in the attributes of `TellsFailure`.

    TRL shows the model what a tool raises, and goes on. What `reset` and `get_reward` raise would end the run: a lost
    connection does not, and any other exception is told the environment, the row and the turn. After a lost
    connection, in a tool too, the episode has no reward.

    Args:
        environment: any; one that tells its failures itself is left as it is.
        say: takes task and failure of an episode.
    """

    def __init__(self, environment: Any, say: Callable[[str, str], None]):
        self.environment, self.say = environment, say
        self.row: Any = None
        self.turn = self.depth = 0
        if isinstance(environment, TellsFailure) or not hasattr(environment, "__dict__"):
            return
        environment._snr_task, environment._snr_failure = type(environment).__name__, None
        for name, method in inspect.getmembers(type(environment), inspect.isfunction):
            if not name.startswith("_"):
                call = self._call_async if inspect.iscoroutinefunction(method) else self._call
                noted = wraps(method)(partial(call, name, method))
                is_static = isinstance(inspect.getattr_static(environment, name), staticmethod)
                # The oldest releases of TRL take bound methods as tools, and nothing else.
                setattr(environment, name, noted if is_static else MethodType(noted, environment))

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noting(name, kwargs):
            if name != "get_reward" or self.environment._snr_failure is None:
                return method(*args, **kwargs)

    async def _call_async(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noting(name, kwargs):
            if name != "get_reward" or self.environment._snr_failure is None:
                return await method(*args, **kwargs)

    @contextmanager
    def _noting(self, name: str, given: Mapping[str, Any]) -> Iterator[None]:
        """Around a call. An environment may try again what one of its own methods has failed to do."""
        environment, is_tool = self.environment, name not in ("reset", "get_reward")
        is_own = self.depth > 0
        if name == "reset":
            environment._snr_failure, self.row, self.turn = None, given.get("seed", given), 1
        self.depth += 1
        try:
            yield
        except Exception as error:
            if is_own:
                raise
            where = f"{environment._snr_task}, row {self.row!r:.200}, turn {self.turn}"
            if not isinstance(error, LOST):
                error.add_note(where)
                raise
            environment._snr_failure = f"{where}: {type(error).__name__}: {error}"
            self.say(environment._snr_task, environment._snr_failure)
            if is_tool:
                raise
        finally:
            self.depth -= 1
            self.turn += is_tool and not is_own


def is_rloo(trainer: Any) -> bool:
    """Whether it is TRL's `RLOOTrainer`, whose `_generate` returns no masks of tools."""
    from trl import RLOOTrainer  # an import of seconds, which readers of a log do without

    return isinstance(trainer, RLOOTrainer)


def texts_of(trainer: Any, generated: tuple[Any, ...]) -> Any:
    """The completions as texts or messages, in a result of `_generate`."""
    return generated[2 if is_rloo(trainer) else 3]


def announces_sampling(trainer: Any) -> bool:
    """Whether `listen` takes this trainer."""
    return hasattr(trainer, _ATTRIBUTE) or hasattr(trainer, "_generate_and_score_completions")


def refuse_asynchronous(trainer: Any, callback: str) -> None:
    """Raise a `TypeError` for a callback that generates or computes as TRL's own batches do, by its name, and for a
    trainer that does not sample completions."""
    if not announces_sampling(trainer):
        raise TypeError(f"{callback} takes {TRAINERS}, got {type(trainer).__name__}.")
    events = getattr(trainer, _ATTRIBUTE, None)
    if events is not None and not isinstance(events, RolloutEvents):
        raise TypeError(
            f"{callback} needs completions that the trainer samples itself, and {type(trainer).__name__} takes them "
            "from a server; allowed with it: MutualInformationCallback, TrainingHealthCallback, CostCallback."
        )


def sampling_events(trainer: Any) -> Any:
    """The `SamplingEvents` of a trainer: `RolloutEvents`, unless it samples by methods of its own.

    Raises:
        TypeError: for a trainer that does not sample completions.
    """
    return getattr(trainer, _ATTRIBUTE, None) or RolloutEvents(trainer)


def listen(
    trainer: Any,
    *,
    on_rows: Callable[[list[dict[str, Any]]], None] | None = None,
    on_generated: Callable[[int, int], None] | None = None,
    on_rollout: Callable[[LocalRollout], None] | None = None,
    on_pass: Callable[[int, int, int], None] | None = None,
    aside: Callable[[], AbstractContextManager[None]] | None = None,
    all_rows: Callable[[], bool] | None = None,
) -> Listener:
    """Subscribe to a trainer's sampling, until `remove` is called. Listeners are called in the order they subscribed.

    Args:
        trainer: TRL's GRPO or RLOO trainer, or a subclass.
        on_rows: takes this process's rows of the dataset before each generation, further rounds of dynamic sampling,
            pilots and evaluations included.
        on_generated: takes the numbers of tokens and of completions that the model wrote on this process, after each
            generation for training, further rounds of dynamic sampling and pilots included.
        on_rollout: takes the completions sampled for training, once a step's first prompts are scored and before any
            is dropped; with pilots, the groups that were sampled whole.
        on_pass: takes the padded positions that a pass over a generation computes, the positions of plain TRL's
            micro-batches of it, and the rows that it trains on, over all processes. Our trainers announce it.
        aside: a context around `on_rollout` of all listeners: a clock of training stops inside.
        all_rows: whether `on_rollout` is about to compute with old and reference log-probs of rows that no loss sees.

    Raises:
        TypeError: for a trainer that does not sample completions.
    """
    events = sampling_events(trainer)
    listener = Listener(events, on_rows, on_generated, on_rollout, on_pass, aside, all_rows)
    events.listeners.append(listener)
    return listener


def gather_rollout(local: LocalRollout) -> Rollout:
    """The completions of all processes, on each of them. A call for all processes together."""
    parts = (local.prompt_ids, local.completion_ids, local.tool_masks, local.turn_samples)
    prompt_ids, completion_ids, tool_masks, turn_samples = (gather_object(part) for part in parts)
    return Rollout(prompt_ids, completion_ids, tool_masks, local.rewards, turn_samples)


def group_rewards(rewards_per_func: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Weighted reward sums as TRL forms them, before any normalisation.

    Args:
        rewards_per_func: (B, F), NaN where a function gave no number.
        weights: (F,).
        num_generations: G.

    Returns:
        (N, G); NaN where no function gave a number, or the sum is not finite.

    >>> per_func = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.nan, torch.nan], [torch.inf, 0.0]])
    >>> group_rewards(per_func, torch.tensor([1.0, 0.5]), 2).tolist()
    [[2.0, 0.5], [nan, nan]]
    """
    sums = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    unscorable = rewards_per_func.isnan().all(dim=1) | ~sums.isfinite()
    return sums.masked_fill(unscorable, torch.nan).view(-1, num_generations)


def end_tokens(trainer: Any) -> list[int]:
    """Ids that end a turn where the trainer generates."""
    if hasattr(trainer, "eos_token_ids"):  # since TRL 1.14.2: those of the model's generation config, too
        return list(trainer.eos_token_ids)
    return [trainer._tokenizer.eos_token_id]


def log_row(trainer: Any, metrics: Mapping[str, float], *, replace: bool = False) -> None:
    """Let metrics join the trainer's next log row, where TRL averages the values of a name.

    Args:
        trainer: TRL's, whose `_metrics["train"]` becomes the row.
        metrics: values by name.
        replace: in place of what the row has by these names: one measurement, or a sum so far, and no mean.
    """
    row = trainer._metrics["train"]
    for name, value in metrics.items():
        if replace:
            row[name] = [value]
        else:
            row[name].append(value)


def forget_in_row(trainer: Any, prefix: str) -> None:
    """Take out of the trainer's next log row what begins with a prefix."""
    row = trainer._metrics["train"]
    for name in [name for name in row if name.startswith(prefix)]:
        del row[name]


def extend(owner: Any, name: str, extension: Callable[..., Any]) -> Callable[[], None]:
    """Call `extension(method, ...)` in place of a method of one object, whatever its class.

    Returns:
        A function that removes the extension; it does nothing once another extension was put around this one.
    """
    method = getattr(owner, name)
    bound = wraps(method)(partial(extension, method))
    own = name in vars(owner)
    setattr(owner, name, bound)

    def take_off() -> None:
        if vars(owner).get(name) is bound:
            setattr(owner, name, method) if own else delattr(owner, name)

    return take_off


def _failure_of(played: Any) -> tuple[str | None, str | None]:
    """Task and failure of an environment or of a rollout function's outcome, `None` where they are not told."""
    if isinstance(played, TellsFailure):
        return played._snr_task, played._snr_failure
    return None, played.get("failure") if isinstance(played, dict) else None


def _as_lists(rows: list[Any]) -> list[Any]:
    return [None if row is None else list(map(int, row)) for row in rows]
