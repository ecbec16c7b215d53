"""GRPO with the filter, whose completions come from a vLLM server while it trains (TRL's `AsyncGRPOTrainer`).

A rollout worker sends scored groups through a queue. The filter stands at the trainer's end of that queue
(`async_groups.py`), so that a dropped group is replaced by the next one; pilots work at the worker's end
(`async_rollouts.py`). TRL's trainer sees a queue of kept groups, and its update is its own.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf, isnan
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.trainer.utils import get_callable_name

from ragen2_trl.columns import TURN_SAMPLES
from ragen2_trl.filtering import group_score
from ragen2_trl.metrics import GENERATION
from ragen2_trl.names import named_object
from ragen2_trl.redaction import with_hidden_credentials
from ragen2_trl.rollout_events import LocalRollout, SamplingEvents, extend, log_row
from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.async_groups import Arrival, GroupLedger, GroupQueue, ScoredGroup
from ragen2_trl.trainers.async_rollouts import FilteredRolloutLoop
from ragen2_trl.trainers.checkpointed import WholeCheckpoints
from ragen2_trl.trainers.checkpoints import RunState
from ragen2_trl.trainers.checks import (
    LARGE_GROUP,
    PILOTS,
    check_loss_of_trl,
    check_prompt_column,
    check_router_loss,
    check_same_on_all_processes,
    check_selector,
    known_range,
    super_not_called,
    warn_of_equal_rows,
    with_snr_fields,
)
from ragen2_trl.trainers.companions import COMPANIONS, PAPER
from ragen2_trl.trainers.config import TOKEN_SCORES, SNRFilterConfig
from ragen2_trl.trainers.empty_steps import why_nothing_is_kept
from ragen2_trl.trainers.selection import (
    Groups,
    Selection,
    Selector,
    joined_selections,
    seeded_generator,
    strategy_class,
    strategy_of,
)
from ragen2_trl.trainers.trl_contract import check_trl

logger = get_logger(__name__)

_DRAW = 0xA57  # tells our draws from others of the same seed


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

    def __post_init__(self) -> None:
        forward = "needs a forward pass with the weights that sampled, which the trainer no longer has"
        for name, refused, allowed, reason in (
            (
                "snr_dynamic_sampling_rounds",
                self.snr_dynamic_sampling_rounds != 0,
                "0",
                "samples in place of dropped groups, which the rollout worker's queue does anyway",
            ),
            (
                "snr_prompt_selection",
                self.snr_prompt_selection,
                "False",
                "chooses among prompts, which the rollout worker takes in the dataset's order",
            ),
            (
                "snr_share_prompts",
                self.snr_share_prompts is not None,
                "None",
                "is about padded rows, and TRL computes what rows share once",
            ),
            ("snr_score", self.snr_score in TOKEN_SCORES and self.snr_score != "length", "scores of rewards", forward),
        ):
            if refused:
                raise ValueError(f"{name}={getattr(self, name)!r} {reason}; allowed here: {allowed}.")
        super().__post_init__()

    @property
    def groups_per_generation(self) -> int:
        """1: each group is decided on when it arrives."""
        return 1

    @property
    def generation_batch_size(self) -> int:
        """Completions of the whole groups that an optimizer step takes, by TRL's own estimate."""
        rows: int = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        groups = ceil(rows / self.num_generations)
        return groups * int(self.num_generations)

    @property
    def steps_per_generation(self) -> int:
        """Micro-steps of an optimizer step: what is sampled in between is announced once a step."""
        return int(self.gradient_accumulation_steps)


class SNRFilteredAsyncGRPOTrainer(WholeCheckpoints, AsyncGRPOTrainer):
    """
    Asynchronous GRPO on the prompt groups that carry signal (arXiv 2604.06268, Section 3.3).

    Everything else is inherited from TRL's `AsyncGRPOTrainer`, which this class can replace in an existing script. A
    dropped group never reaches the update, and the next one of the queue takes its place. The update is TRL's on a
    queue of kept groups; with `snr_strategy="lossless"` it is TRL's own on all groups, and rows without an advantage
    are not computed. Every group is accounted for as trained, dropped or too old, so that a resumed run neither loses
    nor repeats one, and an epoch ends when its data have been seen.

    Args:
        model, reward_funcs, train_dataset, processing_class, **kwargs:
            As for TRL's trainer. Any `rollout_worker` works that sends the rows of a group one after the other.
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
    ...     args=SNRFilteredAsyncGRPOConfig(snr_strategy="nonzero", snr_pilot_generations=2),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    _tag_names = ["trl", "async-grpo", "snr-filter", "ragen2"]  # noqa: RUF012 -- TRL declares it so
    _name = "SNR-filtered asynchronous GRPO"
    _paper = PAPER
    _config_class: ClassVar[type] = SNRFilteredAsyncGRPOConfig
    _trl_config_class: ClassVar[type] = AsyncGRPOConfig
    num_iterations = 1  # updates of a group
    latest_selection: Selection | None = None

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
        check_trl(type(self))
        if args is None:
            args = self._config_class(f"{model.split('/')[-1]}-{self._name.replace(' ', '-')}")
        check_prompt_column(train_dataset, kwargs.get("environment_factory"))
        args = with_snr_fields(args, self._config_class, self._trl_config_class)
        check_loss_of_trl(type(self), args)
        check_selector(selector, args)
        self.pilot_generations = _pilots_of(args, kwargs)
        super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        self.args = with_hidden_credentials(self.args)  # before others hold them
        check_router_loss(self)
        check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if kwargs.get("environment_factory") is not None:
            warn_of_equal_rows(self.train_dataset)
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.reward_funcs = [func for func in funcs if func is not None]
        self.reward_func_names = [get_callable_name(func) for func in self.reward_funcs]
        self.reward_weights = torch.ones(len(self.reward_funcs))  # TRL sums them
        self.num_generations = self.args.num_generations
        self._tokenizer: Any = self.processing_class
        named = self.args.snr_selector
        self._own_selector = selector if named is None else named_object(named, "snr_selector")
        worker = self.rollout_worker
        if isinstance(worker, AsyncRolloutWorker) and worker._loop_cls is _AsyncRolloutLoop:
            worker._loop_cls = FilteredRolloutLoop
            worker._loop_kwargs |= {
                "snr_pilots": self.pilot_generations,
                "snr_seed": self.args.seed,
                "snr_score_reward": self.args.snr_score_reward,
            }
        self._begin_run()
        self.rollout_events = SamplingEvents(self)
        for companion in COMPANIONS:
            named_object(companion, "companion")(self)

    @property
    def _has_begun(self) -> bool:
        return self._trains

    def _begin_run(self) -> None:
        """No state of an earlier run."""
        args = self.args
        self.latest_selection, self._trains = None, False
        known = known_range(
            self.reward_funcs, self.reward_func_names, self.reward_weights.tolist(), args.snr_score_reward
        )
        self._strategy = strategy_of(args, self._own_selector, known)
        self._ledger = GroupLedger()
        self._trained_groups: Any = self._ledger  # TRL's is a set
        self._groups: GroupQueue | None = None
        self._announced: list[Arrival] = []
        self._passes: deque[tuple[int, int, int]] = deque()  # of micro-batches that are collated, see `on_pass`
        self._micro_steps = 0  # of the present optimizer step
        shared: dict[str, Any] = {"filter": self._strategy, "ledger": self._ledger}
        if self.rollout_worker is not None:
            empty = args.snr_max_empty_steps * (args.generation_batch_size // args.num_generations)
            self._groups = GroupQueue(
                self.rollout_worker.rollout_buffer,
                self._ledger,
                self._decide,
                self._staleness,
                self._is_refused,
                args.num_generations,
                args.max_staleness,
                empty if empty > 0 else inf,
                lambda: f"(snr_max_empty_steps={args.snr_max_empty_steps}) {why_nothing_is_kept(self)}",
                args.heartbeat_stale_after_s,
            )
            self.rollout_queue: Any = self._groups
            shared["groups"] = self._groups
        self._run_state = RunState(shared)

    # A group arrives

    def _decide(self, group: ScoredGroup, given_up: bool) -> tuple[Selection, list[Any]]:
        """What is kept of a group, and the rows that TRL gets. On the main process."""
        args, rewards = self.args, self._rewards_to_score(group)
        number = group.rows[0].group_id + self._groups_before_resume
        groups = Groups(
            rewards,
            group.rewards_per_func,
            group.lengths,
            seeded_generator(_DRAW, args.seed, number),
            self._strategy.see(rewards),
            _no_entropies,
            lambda: group.rewards,
            lambda: self._advantages_of(group),
        )
        if given_up:
            scores, kept = group_score(rewards), torch.zeros(rewards.shape, dtype=torch.bool)
        else:
            scores, kept = self._strategy.select(groups)
        if not self._strategy.keeps_trl_batch:  # whose log is TRL's own
            self._log_rewards(group.rows)
        rows = group.rows
        if self._strategy.is_trl_update and not self._strategy.keeps_trl_batch and not kept.any():
            for row in rows:
                row.advantage = 0.0  # rounding noise in TRL
        if not self._strategy.is_trl_update and not kept.all():
            rows = [row for row, member in zip(rows, self._members(group, kept), strict=True) if kept[0, member]]
        return Selection(rewards, scores, kept, group.lengths), rows

    def _rewards_to_score(self, group: ScoredGroup) -> Tensor:
        """(1, G) the reward sums, or the rewards that `snr_score_reward` names."""
        name = self.args.snr_score_reward
        if name is None:
            return group.rewards
        if name not in group.names:
            raise ValueError(
                f"snr_score_reward={name!r} is no reward function of this run; allowed here, where columns are not "
                f"logged: {', '.join(group.names)}."
            )
        if group.members is None:
            _refuse_forks(f"snr_score_reward={name!r}")
        values = group.rewards_per_func[..., group.names.index(name)]
        return values.masked_fill(~values.isfinite(), torch.nan)

    @staticmethod
    def _members(group: ScoredGroup, kept: Tensor) -> list[int]:
        """The conversation of each row, as far as `kept` tells conversations apart."""
        if group.members is not None:
            return group.members
        if kept.any():
            _refuse_forks("a selector of single completions")
        return [0] * len(group.rows)

    @staticmethod
    def _advantages_of(group: ScoredGroup) -> Tensor:
        """(1, G) of each conversation the advantage that is largest among its rows, in size."""
        found = torch.zeros(group.rewards.shape)
        for row, member in zip(group.rows, group.members or range(len(group.rows)), strict=True):
            place = min(member, found.size(1) - 1)
            found[0, place] = max(found[0, place], abs(row.advantage))
        return found

    def _log_rewards(self, rows: list[Any]) -> None:
        """Metrics of rows as means over all that were sampled, kept or not; TRL's collator finds none."""
        values: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row.metrics.items():
                values.setdefault(name, []).append(value)
            row.metrics = {}
        known = {name: [value for value in column if not isnan(value)] for name, column in values.items()}
        # A numerator and its denominator, of which TRL logs the sum over the sum.
        rates: dict[str, Any] = {name: (sum(column), len(column)) for name, column in known.items() if column}
        log_row(self, rates)

    def _staleness(self, row: Any) -> int:
        """Weight versions since a row was sampled."""
        versions: int = self.model_version - row.model_version
        return versions

    def _is_refused(self, row: Any) -> bool:
        """Whether TRL is about to pass over a row, too old or too long, by its own rules."""
        is_long = 0 < (self.args.token_budget or 0) < len(row.input_ids)
        return is_long or self._staleness(row) > self.args.max_staleness

    # A micro-batch is collated, and trained

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        collator = getattr(loader, "base_dataloader", loader).collate_fn
        extend(collator, "torch_call", self._collate)
        return loader

    def _collate(self, collate: Callable[[list[Any]], dict[str, Any]], examples: list[Any]) -> dict[str, Any]:
        """TRL's collator, with `lossless` on the rows with an advantage; its mean stays one over the tokens of all.

        A process keeps one row, as TRL does, since one that computes nothing would not meet the others.
        """
        (packed,) = examples
        is_lossless = self._strategy.is_trl_update and not self._strategy.keeps_trl_batch
        keep_longest = length_dependent(self.model.config.get_text_config()) is not None
        slim = [_packed_again(row, keep_longest) for row in packed] if is_lossless else packed
        batch = collate([slim])
        kept = {id(sample) for row in slim for sample in row.samples}
        if is_lossless:
            every = [sample for row in packed for sample in row.samples]
            self._ledger.left_out(sample["group_id"] for sample in every if id(sample) not in kept)
            batch["global_n_tokens"].fill_(sum(int(sample["completion_mask"][1:].sum()) for sample in every))
        computed, plain = (sum(len(row.tokens) for row in rows) for rows in (slim, packed))
        self._passes.append((computed, plain, len(kept)))
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._micro_steps == 0:
            self._announce()
        if self.accelerator.is_main_process:
            if not self._passes:
                raise super_not_called(self, "get_train_dataloader")
            computed, plain, rows = self._passes.popleft()
            log_row(self, {"snr/update_compute_fraction": computed / plain})
            self.rollout_events.update_pass(computed, plain, rows)
        loss = super().training_step(*args, **kwargs)
        self._trains = True
        self._micro_steps += 1
        if self.accelerator.is_main_process:
            self._ledger.micro_batch_trained()
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called before each optimizer step: no micro-batch of it, and no earlier step, may have passed ours by."""
        due = self.current_gradient_accumulation_steps
        if self._micro_steps != due:
            raise super_not_called(self, "training_step" if self._micro_steps < due else "_log_step_metrics")
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _announce(self) -> None:
        """Tell listeners what has been sampled since the last step. A call for all processes together."""
        arrivals = self._groups.take_arrivals() if self._groups is not None else []
        self._announced += arrivals
        if self._groups is not None:
            sampled = self._groups.take_sampled()
            self.rollout_events.written(sampled["tokens"], sampled["completions"])
        if not self.rollout_events.is_awaited:
            return
        whole = [one.group for one in arrivals if not one.tag.given_up and one.group.members is not None]
        told: list[Any] = [torch.cat([group.rewards for group in whole]) if whole else None]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(told)
        if told[0] is not None:
            with _plain_attention(self.accelerator.unwrap_model(self.model)):
                self.rollout_events.announce(_local_rollout(whole, told[0].float()))

    def _log_step_metrics(self) -> None:
        super()._log_step_metrics()
        self._micro_steps = 0
        if self._groups is None:
            return
        # TRL takes the difference of `len(self._trained_groups)`, in which dropped groups count.
        row = self._metrics["train"]
        row["batch/groups_per_step"][-1] = float(self._ledger.trained)
        self._ledger.trained = 0
        arrivals, self._announced = [*self._announced, *self._groups.take_arrivals()], []
        self._groups.generations += bool(arrivals)
        log_row(self, {GENERATION: float(self._groups.generations)}, replace=True)
        if not arrivals:
            return
        self.latest_selection = joined_selections([one.selection for one in arrivals])
        metrics = self._strategy.metrics(self.latest_selection)
        metrics["sampled_staleness"] = sum(one.staleness for one in arrivals) / len(arrivals)
        if self.pilot_generations:
            sampled = sum(one.tag.sampled for one in arrivals)
            metrics["sampled_completions"] = float(sampled)
            metrics["sampled_fraction"] = sampled / (len(arrivals) * self.num_generations)
            committed = sum(not (one.tag.given_up or one.tag.audited) for one in arrivals)
            metrics["committed_fraction"] = committed / len(arrivals)
        log_row(self, {f"snr/{name}": value for name, value in metrics.items()})

    # A run, and its checkpoints

    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_loss_of_trl(type(self), self.args)
        self._begin_run()
        return super().train(*args, **kwargs)

    def _save_run_state(self, folder: str) -> None:
        self._run_state.save(folder, self.accelerator.process_index, {}, {})

    def _load_run_state(self, folder: str | None) -> None:
        self._run_state.load(folder, self.accelerator, {}, dict[str, int])
        resumes = isinstance(self.rollout_worker, AsyncRolloutWorker) and isinstance(self.train_dataset, Dataset)
        if self._groups is not None and not resumes:
            self._ledger.load({"ahead": []})  # TRL lets such a worker begin where it likes


def _pilots_of(args: SNRFilterConfig, kwargs: dict[str, Any]) -> int:
    """Completions of a pilot, 0 for none.

    Raises:
        ValueError: where pilots were asked for and could not be scored, or not be sampled.
    """
    obstacles = {
        "rollout_worker": "is sampled by a loop of its own",
        "environment_factory": "earns its reward after TRL has sampled a completion, too late for pilots",
    }
    name = next((one for one in obstacles if kwargs.get(one) is not None), None)
    if name is not None:
        if args.snr_pilot_generations:
            raise ValueError(
                f"snr_pilot_generations={args.snr_pilot_generations}: a group of {name}= {obstacles[name]}; allowed "
                "with it: 0."
            )
        return 0
    if args.snr_pilot_generations is not None:
        return args.snr_pilot_generations
    drops = args.keeps_every_varying_group and not strategy_class(args).is_trl_update
    if not drops or args.num_generations < LARGE_GROUP:
        return 0
    logger.warning(
        f"snr_pilot_generations={PILOTS} by default: {PILOTS} of {args.num_generations} completions are sampled and "
        "scored first, the others only where rewards can be expected to vary. With 0, all at once."
    )
    return PILOTS


def _refuse_forks(what: str) -> NoReturn:
    raise ValueError(
        f"{what} is about single conversations, and a group of this rollout worker has more rows than conversations, "
        "which nothing tells apart; allowed with such a worker: selections of groups by their summed rewards."
    )


def _no_entropies() -> NoReturn:
    raise ValueError(
        "entropies need a forward pass with the weights that sampled, which an asynchronous trainer no longer has; "
        "allowed here: selectors of rewards and lengths."
    )


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


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Forward passes of rows without TRL's tree, which its own attention needs arguments for."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def _local_rollout(groups: list[ScoredGroup], rewards: Tensor) -> LocalRollout:
    """Whole groups as listeners take them, one row a conversation and its further rows as turn samples."""
    conversations: list[list[dict[str, Any]]] = []
    for group in groups:
        rows: list[list[dict[str, Any]]] = [[] for _ in range(group.rewards.size(1))]
        for row, member in zip(group.rows, group.members or (), strict=True):
            rows[member].append(_sample(row))
        prompt = next(one for one in rows if one)[0]["prompt_ids"]
        nothing = {"prompt_ids": prompt, "completion_ids": [], "env_mask": None}  # of a conversation without a row
        conversations += [one or [nothing] for one in rows]
    return LocalRollout(
        prompt_ids=[rows[0]["prompt_ids"] for rows in conversations],
        completion_ids=[rows[0]["completion_ids"] for rows in conversations],
        tool_masks=[rows[0]["env_mask"] for rows in conversations],
        has_images=False,
        rewards=rewards,
        inputs=[{TURN_SAMPLES: rows[1:]} if rows[1:] else {} for rows in conversations],
        batch={},
    )


def _sample(row: Any) -> dict[str, Any]:
    """A row of TRL's in the form of a turn sample: what comes before the first trainable token is its prompt."""
    first = int(row.completion_mask.argmax())
    ids, mask = row.input_ids.tolist(), row.completion_mask.tolist()
    return {"prompt_ids": ids[:first], "completion_ids": ids[first:], "env_mask": mask[first:], "earlier": []}
