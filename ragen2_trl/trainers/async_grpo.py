"""GRPO with the filter, whose completions come from a vLLM server while it trains (TRL's `AsyncGRPOTrainer`).

A rollout worker sends scored groups through a queue. The filter stands at the trainer's end of that queue
(`async_groups.py`), so that a dropped group is replaced by the next one; pilots work at the worker's end
(`async_rollouts.py`). TRL's trainer sees a queue of kept groups, and its update is its own.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isnan, nan
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.trainer.utils import get_callable_name

from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.filtering import SCORES, group_score
from ragen2_trl.metrics import GENERATION
from ragen2_trl.rollout_events import LocalRollout, SamplingEvents, extend, log_row
from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers import checks
from ragen2_trl.trainers.async_groups import ArrivedGroup, GroupLedger, GroupQueue
from ragen2_trl.trainers.async_rollouts import filtered_loop
from ragen2_trl.trainers.checkpoints import RunState
from ragen2_trl.trainers.config import SNRFilterConfig, check_required
from ragen2_trl.trainers.runs import FilteredRun
from ragen2_trl.trainers.selection import (
    Groups,
    Selection,
    Selector,
    joined_selections,
    seeded_generator,
    strategy_class,
)

_DRAW = 0xA57  # tells our draws from others of the same seed
_REQUIRED: dict[str, tuple[Any, str]] = {
    "snr_dynamic_sampling_rounds": (0, "samples in place of dropped groups, as the queue of rollouts does anyway"),
    "snr_prompt_selection": (False, "chooses among prompts, which the rollout worker takes in the dataset's order"),
    "snr_share_prompts": (None, "is about padded rows, and TRL computes what rows share once"),
}
_ENTROPIES = "a forward pass with the weights that sampled, which an asynchronous trainer no longer has"


@dataclass
class SNRFilteredAsyncGRPOConfig(SNRFilterConfig, AsyncGRPOConfig):
    r"""
    Configuration class for the [`SNRFilteredAsyncGRPOTrainer`].

    Inherits every parameter of TRL's `AsyncGRPOConfig`, and the filter's from [`SNRFilterConfig`]. Groups arrive one
    by one and are ranked among the latest 256. Two settings have another meaning here: `snr_max_empty_steps` counts
    the groups that so many optimizer steps take, and ends training by an error; `snr_pilot_generations` is by default
    2 for groups of 16 or more with `snr_strategy="nonzero"`, where TRL's own worker scores by reward functions.

    Raises:
        ValueError: for a value outside its allowed set; the message names the field, the value and the set.
    """

    # TRL's asynchronous trainer has neither, and `SNRFilterConfig` reads both.
    mask_truncated_completions = False
    beta = 0.0
    groups_per_generation = 1  # each group is decided on when it arrives

    def __post_init__(self) -> None:
        check_required(self, _REQUIRED, "here")
        if self.snr_score.startswith("entropy"):
            known = ", ".join(name for name in SCORES if not name.startswith("entropy"))
            raise ValueError(f"snr_score={self.snr_score!r} needs {_ENTROPIES}; allowed here: {known}.")
        super().__post_init__()

    @property
    def generation_batch_size(self) -> int:
        """Completions of the whole groups that an optimizer step takes, by TRL's own estimate."""
        rows: int = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        return ceil(rows / self.num_generations) * int(self.num_generations)

    @property
    def steps_per_generation(self) -> int:
        """Micro-steps of an optimizer step: what is sampled in between is announced once a step."""
        return int(self.gradient_accumulation_steps)


class SNRFilteredAsyncGRPOTrainer(FilteredRun, AsyncGRPOTrainer):
    """
    Asynchronous GRPO on the prompt groups that carry signal (arXiv 2604.06268, Section 3.3).

    Everything else is inherited from TRL's `AsyncGRPOTrainer`, which this class can replace in an existing script. A
    dropped group never reaches the update, and the next one of the queue takes its place. The update is TRL's on a
    queue of kept groups; with `snr_strategy="lossless"` it is TRL's own on all groups, and rows without an advantage
    are not computed. Every group is accounted for as trained, dropped or too old, so that a resumed run neither loses
    nor repeats one, and an epoch ends when its data have been seen.

    Args:
        model, reward_funcs, train_dataset, processing_class, **kwargs:
            As for TRL's trainer. A `rollout_worker` of your own sends the rows of a group one after the other. Each
            `RolloutSample` has its group's number as `group_id`, counted from 0, and `reward` and `rewards/<name>` in
            `metrics`. A group is complete after G rows, one for each conversation, or when another begins. A worker
            whose conversations are several rows puts a `RowTag` into `metrics["snr_tag"]` of each row, which says
            which conversation it is of. Loops derived from TRL's get these tags from us.
        args ([`SNRFilteredAsyncGRPOConfig`] or TRL's `AsyncGRPOConfig`, *optional*):
            A plain `AsyncGRPOConfig` gets the filter's default settings.
        selector (`Callable[[Groups], Tensor]`, *optional*):
            As for [`SNRFilteredGRPOTrainer`]. It is called on the main process alone, with one group at a time.

    Raises:
        ValueError: before training for a setting out of range, or one that has no meaning here.
        TypeError: for a configuration that is neither of the two, or a loss of a subclass's own with `lossless`.
        RuntimeError: while training for a subclass that loses the filter, before an update without it.

    Example:

    ```python
    >>> from ragen2_trl import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer
    >>> from trl.rewards import accuracy_reward
    >>> from datasets import load_dataset

    >>> trainer = SNRFilteredAsyncGRPOTrainer(  # doctest: +SKIP
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=SNRFilteredAsyncGRPOConfig(snr_strategy="nonzero"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["trl", "async-grpo", "snr-filter", "ragen2"]  # noqa: RUF012 -- TRL declares it so
    _name = "SNR-filtered asynchronous GRPO"
    _config_class: ClassVar[type] = SNRFilteredAsyncGRPOConfig
    _trl_config_class: ClassVar[type] = AsyncGRPOConfig
    num_iterations = 1  # updates of a group
    _has_begun = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *positional: Any,
        selector: Selector | None = None,
        **kwargs: Any,
    ):
        environments = kwargs.get("environment_factory")
        args = self._checked_args(model, args, train_dataset, selector, environments)
        self.pilot_generations = _pilots_of(args, kwargs)
        super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        self._check_made(selector, environments is not None)
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.reward_funcs = [func for func in funcs if func is not None]
        self.reward_func_names = [get_callable_name(func) for func in self.reward_funcs]
        self.reward_weights = torch.ones(len(self.reward_funcs))  # TRL sums them
        self.num_generations = self.args.num_generations
        self._tokenizer: Any = self.processing_class
        worker: Any = self.rollout_worker
        loop = worker._loop_cls if isinstance(worker, AsyncRolloutWorker) else None
        if isinstance(loop, type) and loop._score_group is _AsyncRolloutLoop._score_group:
            settings = {"seed": self.args.seed, "score_reward": self.args.snr_score_reward}
            worker._loop_cls = partial(filtered_loop, loop, pilots=self.pilot_generations, **settings)
        self._begin_run()
        self.rollout_events = SamplingEvents(self)
        self._add_companions()

    def _begin_run(self) -> None:
        """No state of an earlier run."""
        self.latest_selection, self._has_begun = None, False
        self._strategy = self._new_strategy()
        # Of micro-batches that are collated and not logged: see `on_pass`, and rows by group.
        self._passes: deque[tuple[int, int, int, Counter[int]]] = deque()
        self._micro_steps = 0  # of the present optimizer step
        self._groups: GroupQueue | None = None
        shared: dict[str, Any] = {"filter": self._strategy}
        if self.rollout_worker is not None:  # on the main process
            self._groups = shared["groups"] = GroupQueue(self)
            self.rollout_queue: Any = self._groups
            self._trained_groups: Any = self._groups.ledger  # TRL's is a set
        self._run_state = RunState(shared)

    # A group arrives

    def _decide(self, group: ArrivedGroup) -> tuple[Selection, list[Any]]:
        """What is kept of a group, and the rows that TRL gets. On the main process."""
        strategy, rows, lengths = self._strategy, group.rows, group.lengths()
        rewards = group.rewards(self.args.snr_score_reward)
        reward_range = strategy.see(rewards)
        if group.tags[0].given_up:
            scores, kept = group_score(rewards), torch.zeros(rewards.shape, dtype=torch.bool)
        else:
            per_func = [group.rewards(name) for name in group.names]
            generator = seeded_generator(_DRAW, self.args.seed, rows[0].group_id + self._groups_before_resume)
            known = rewards, torch.stack(per_func, -1), lengths, generator, reward_range
            scores, kept = strategy.select(Groups(*known, _no_entropies, group.rewards(), group.advantages))
        if not strategy.keeps_trl_batch:
            kept_rows = kept[0, group.members]
            advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
            if strategy.zeroes_advantages:
                advantages = advantages.masked_fill(~kept_rows, 0.0)
            given = zip(rows, advantages.tolist(), kept_rows.tolist(), strict=True)
            everything = strategy.is_trl_update  # whose mean is over all rows
            # TRL logs metrics of the rows that it gets, and we log those of all.
            rows = [replace(row, advantage=one, metrics={}) for row, one, is_kept in given if is_kept or everything]
        return Selection(rewards, scores, kept, lengths), rows

    # A micro-batch is collated, and trained

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        collator: Any = getattr(loader, "base_dataloader", loader).collate_fn
        collator.groups_trained = set()  # of micro-batches that are collated, one ahead of the one that is trained
        extend(collator, "torch_call", self._collate)
        return loader

    def _collate(self, collate: Callable[[list[Any]], dict[str, Any]], examples: list[Any]) -> dict[str, Any]:
        """TRL's collator, with `lossless` on the rows with an advantage; its mean stays one over the tokens of all.

        A process keeps one row, as TRL does, since one that computes nothing would not meet the others.
        """
        (packed,) = examples
        slim = packed
        if self._strategy.is_trl_update and not self._strategy.keeps_trl_batch:
            keep_longest = length_dependent(self.model.config.get_text_config()) is not None
            slim = [_packed_again(row, keep_longest) for row in packed]
        batch = collate([slim])
        every, computed = ([sample for row in rows for sample in row.samples] for rows in (packed, slim))
        if slim is not packed:
            batch["global_n_tokens"].fill_(sum(int(sample["completion_mask"][1:].sum()) for sample in every))
        positions, of_trl = (sum(len(row.tokens) for row in rows) for rows in (slim, packed))
        self._passes.append((positions, of_trl, len(computed), Counter(sample["group_id"] for sample in every)))
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._micro_steps == 0:
            self._announce()
        if self.accelerator.is_main_process and len(self._passes) <= self._micro_steps:
            raise checks.super_not_called(self, "get_train_dataloader")
        self._micro_steps, self._has_begun = self._micro_steps + 1, True
        return super().training_step(*args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called before each optimizer step: no micro-batch of it, and no earlier step, may have passed ours by."""
        due = self.current_gradient_accumulation_steps
        if self._micro_steps != due:
            raise checks.super_not_called(self, "training_step" if self._micro_steps < due else "_log_step_metrics")
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _announce(self) -> None:
        """Tell listeners what has been sampled since the last step. A call for all processes together."""
        groups: list[ArrivedGroup] = []
        if self._groups is not None:
            groups = [group for group, _ in self._groups.arrivals if not group.tags[0].given_up]
            sampled = self._groups.sampled
            self.rollout_events.tell("on_generated", sampled["tokens"], sampled["completions"])
            self._groups.sampled.clear()
        if not self.rollout_events.awaiting("on_rollout"):
            return
        (rewards,) = broadcast_object_list([torch.cat([one.rewards() for one in groups]) if groups else None])
        if rewards is not None:
            model = self.accelerator.unwrap_model(self.model)
            usual = model.config._attn_implementation
            model.set_attn_implementation("sdpa")  # without TRL's tree, which its own needs arguments for
            try:
                self.rollout_events.tell("on_rollout", _local_rollout(groups, rewards.float()))
            finally:
                model.set_attn_implementation(usual)

    def _log_step_metrics(self) -> None:
        self._micro_steps = 0
        if self._groups is not None:
            self._count_step(self._groups)
        super()._log_step_metrics()

    def _count_step(self, queue: GroupQueue) -> None:
        """Count what a step has trained, and log it with the groups that had arrived before. On the main process."""
        positions = of_trl = trained = 0
        for one in [self._passes.popleft() for _ in range(self._step_microbatches)]:
            self.rollout_events.tell("on_pass", *one[:3])
            positions, of_trl = positions + one[0], of_trl + one[1]
            trained += sum(queue.ledger.rows_done(group, rows) for group, rows in one[3].items())
        # TRL logs the difference to `len(self._trained_groups)`, in which dropped groups count.
        self._last_groups_trained = len(queue.ledger) - trained
        metrics: dict[str, float] = {"update_compute_fraction": positions / of_trl}
        rates: dict[str, Any] = {}
        if queue.arrivals:
            groups, selections = zip(*queue.arrivals, strict=True)
            self.latest_selection = joined_selections(selections)
            metrics |= self._strategy.metrics(self.latest_selection)
            metrics["sampled_staleness"] = sum(group.staleness for group in groups) / len(groups)
            if self.pilot_generations:
                metrics["sampled_completions"] = float(sum(group.sampled for group in groups))
                metrics["sampled_fraction"] = metrics["sampled_completions"] / (len(groups) * self.num_generations)
                committed = sum(not (group.tags[0].given_up or group.tags[0].audited) for group in groups)
                metrics["committed_fraction"] = committed / len(groups)
            if not self._strategy.keeps_trl_batch:
                rates = _rates([row.metrics for group in groups for row in group.rows])
        log_row(self, {f"snr/{name}": value for name, value in metrics.items()} | rates)
        queue.generations += bool(queue.arrivals)
        log_row(self, {GENERATION: float(queue.generations)}, replace=True)
        queue.arrivals = []

    # A run, and its checkpoints

    def train(self, *args: Any, **kwargs: Any) -> Any:
        checks.check_loss_of_trl(type(self), self.args)
        self._begin_run()
        return super().train(*args, **kwargs)

    def _save_run_state(self, folder: str) -> None:
        self._run_state.save(folder, self.accelerator.process_index, {}, {})

    def _load_run_state(self, folder: str | None) -> None:
        self._run_state.load(folder, self.accelerator, {}, dict[str, int])
        resumes = isinstance(self.rollout_worker, AsyncRolloutWorker) and isinstance(self.train_dataset, Dataset)
        if self._groups is not None and not resumes:
            self._groups.ledger = self._trained_groups = GroupLedger()  # TRL lets such a worker begin where it likes


def _pilots_of(args: SNRFilterConfig, kwargs: dict[str, Any]) -> int:
    """Completions of a pilot, 0 for none. Raises a `ValueError` where pilots that were asked for cannot be sampled or
    scored."""
    wanted = args.snr_pilot_generations
    obstacles = {
        "rollout_worker": "is sampled by a loop of its own",
        "environment_factory": "earns its reward after TRL has sampled a completion, too late for pilots",
    }
    for name, obstacle in obstacles.items():
        if kwargs.get(name) is not None:
            if wanted:
                raise ValueError(f"snr_pilot_generations={wanted}: a group of {name}= {obstacle}; allowed with it: 0.")
            return 0
    drops = args.keeps_every_varying_group and not strategy_class(args).is_trl_update
    return checks.pilots_or_default(args, drops and args.num_generations >= checks.LARGE_GROUP)


def _no_entropies() -> NoReturn:
    raise ValueError(f"entropies need {_ENTROPIES}; allowed here: selectors of rewards and lengths.")


def _rates(metrics: list[dict[str, float]]) -> dict[str, tuple[float, int]]:
    """By name the sum and the number of values, of which TRL logs the mean over all rows of a log row."""
    names = dict.fromkeys(name for of_row in metrics for name in of_row)
    known = {name: [of_row[name] for of_row in metrics if not isnan(of_row.get(name, nan))] for name in names}
    return {name: (float(sum(values)), len(values)) for name, values in known.items() if values}


def _packed_again(row: Any, keep_longest: bool) -> Any:
    """TRL's row of packed samples with those alone that have an advantage, and the longest where it decides on the
    rotary embeddings of all; without any, the shortest sample."""
    by_length = sorted(row.samples, key=lambda one: len(one["input_ids"]))
    longest = by_length[-1] if keep_longest else None
    samples = [sample for sample in row.samples if sample["advantage"] != 0 or sample is longest]
    packed = type(row)()
    for sample in samples or by_length[:1]:
        packed.add(sample)
    return packed


def _local_rollout(groups: list[ArrivedGroup], rewards: Tensor) -> LocalRollout:
    """Whole groups as listeners take them, one row a conversation and its further rows as turn samples."""
    conversations: list[list[dict[str, Any]]] = []
    for group in groups:
        samples: list[list[dict[str, Any]]] = [[] for _ in range(group.size)]
        for row, member in zip(group.rows, group.members, strict=True):
            samples[member].append(_sample(row))
        nothing = {**_sample(group.rows[0]), "completion_ids": [], "env_mask": None}  # of one without a row
        conversations += [of_one or [nothing] for of_one in samples]
    prompts, completions, masks = (
        [of_one[0][name] for of_one in conversations] for name in ("prompt_ids", "completion_ids", "env_mask")
    )
    inputs: list[dict[str, Any]] = [{TURN_SAMPLES: of_one[1:]} if of_one[1:] else {} for of_one in conversations]
    return LocalRollout(prompts, completions, masks, has_images=False, rewards=rewards, inputs=inputs, batch={})


def _sample(row: Any) -> dict[str, Any]:
    """A row of TRL's in the form of a turn sample: what comes before the first trainable token is its prompt."""
    first = int(row.completion_mask.argmax())
    ids, mask = row.input_ids.tolist(), row.completion_mask.tolist()
    return {"prompt_ids": ids[:first], "completion_ids": ids[first:], "env_mask": mask[first:], "earlier": []}
