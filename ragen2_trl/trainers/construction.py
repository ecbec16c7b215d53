"""How a filtered trainer is made, and what it begins each run with."""

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import Tensor

from ragen2_trl.names import named_object
from ragen2_trl.redaction import with_hidden_credentials
from ragen2_trl.rollout_events import NeedsRows, RolloutEvents, extend
from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.batches import padded_size
from ragen2_trl.trainers.checkpoints import RunState
from ragen2_trl.trainers.checks import (
    check_has_rows,
    check_pilots,
    check_prompt_column,
    check_router_loss,
    check_same_on_all_processes,
    check_selector,
    check_subclass,
    known_range,
    overridden,
    pilots_of,
    shares_prompts,
    warn_of_equal_rows,
    with_snr_fields,
)
from ragen2_trl.trainers.config import SNRFilterConfig
from ragen2_trl.trainers.dynamic_sampling import DynamicSampling
from ragen2_trl.trainers.empty_steps import EmptySteps
from ragen2_trl.trainers.generation import reads_prompts_once
from ragen2_trl.trainers.micro_batches import MicroBatches
from ragen2_trl.trainers.pilots import PilotSampling
from ragen2_trl.trainers.plans import LossMean, MicroStep
from ragen2_trl.trainers.prompt_selection import PromptSelection
from ragen2_trl.trainers.prompt_source import DatasetOrder, TRLOrder
from ragen2_trl.trainers.row_means import RowMeans
from ragen2_trl.trainers.selection import Selection, Selector
from ragen2_trl.trainers.shared_prompts import SharedPrompts
from ragen2_trl.trainers.strategies import strategy_class, strategy_of
from ragen2_trl.trainers.trl_contract import check_trl
from ragen2_trl.trainers.turn_samples import check_turn_samples

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockTrainer
else:
    StockTrainer = object  # it is mixed in before one of TRL's

# Callbacks that a trainer brings along, as `package.module:name` of a function that takes the trainer: by name, as the
# filter knows nothing of callbacks and reports.
COMPANIONS = (
    "ragen2_trl.callbacks.run_record:keep_record",
    "ragen2_trl.callbacks.cost:count_cost",
    "ragen2_trl.callbacks.training_health:keep_watch",
    "ragen2_trl.callbacks.cold_start:keep_cold_start",
    "ragen2_trl.callbacks.training_progress:show_progress",
)

# On the model cards of the trainers.
PAPER = {
    "title": "RAGEN-2: Reasoning Collapse in Agentic RL",
    "id": "2604.06268",
    "citation": textwrap.dedent("""\
        @article{wang2026ragen2,
            title  = {{RAGEN-2: Reasoning Collapse in Agentic RL}},
            author = {Zihan Wang and Chi Gui and Xing Jin and Qineng Wang and Licheng Liu and Kangrui Wang and Shiqi Chen and Linjie Li and Zhengyuan Yang and Pingyue Zhang and Yiping Lu and Jiajun Wu and Li Fei-Fei and Lijuan Wang and Yejin Choi and Manling Li},
            year   = 2026,
            eprint = {arXiv:2604.06268},
        }"""),  # noqa: E501 -- BibTeX
}


class Constructed(StockTrainer):
    """Construction of a filtered trainer. Mixed in before one of TRL's trainers."""

    _config_class: ClassVar[type]  # with the filter's settings
    _trl_config_class: ClassVar[type]  # of the plain trainer
    can_share_prompts: ClassVar[bool] = True  # whether the loss reads log-probs and entropies alone
    takes_turn_samples: ClassVar[bool] = False  # whether an episode may be several training samples
    _paper = PAPER

    args: SNRFilterConfig

    # Hooks of a step, which `SNRFilter` defines.
    _check_weighted: Callable[[], None]
    _loss_of_kept_rows: Callable[..., Tensor]
    _backward_of_kept_rows: Callable[..., None]

    # Defaults of the class: a trainer that was made without `__init__`, as in TRL's unit tests, has TRL's own hooks.
    _is_made: bool = False
    _pilots: PilotSampling | None = None
    _row_means: RowMeans | None = None
    _in_loss: bool = False
    _shared_prompts: SharedPrompts | None = None
    _reads_prompts_once: bool = False
    latest_selection: Selection | None = None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *positional: Any,
        selector: Selector | None = None,
        **kwargs: Any,
    ):
        check_trl(type(self))
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{name.split('/')[-1]}-{self._name.replace(' ', '-')}")
        check_prompt_column(train_dataset, kwargs.get("environment_factory"))
        args = with_snr_fields(args, self._config_class, self._trl_config_class)
        self.pilot_generations = pilots_of(args, type(self))
        check_subclass(type(self), args, self.pilot_generations)
        check_selector(selector, args)
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, *positional, **kwargs
        )
        self.args = with_hidden_credentials(self.args)  # before others hold them
        check_router_loss(self)
        check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if any(kwargs.get(name) is not None for name in ("environment_factory", "rollout_func")):
            warn_of_equal_rows(self.train_dataset)
        check_has_rows(self.train_dataset, self.args)
        check_pilots(self, kwargs.get("rollout_func"))
        named = self.args.snr_selector
        self._own_selector = selector if named is None else named_object(named, "snr_selector")
        padding = self._tokenizer.pad_token_id, self.pad_to_multiple_of
        shared = SharedPrompts(self.accelerator, self.model) if shares_prompts(self) else None
        self._shared_prompts, serves = shared, lambda batch: shared is not None and shared.serves_rows(batch)
        self._reads_prompts_once = reads_prompts_once(self)
        make_plan = strategy_class(self.args).plan
        self._plan = make_plan(self.accelerator, self.args, lambda: self._loss_mean, *padding, serves)
        # A loss of one's own may compute padded rows.
        self._plan.fills_by_positions = not {"compute_loss", "_compute_loss"} & overridden(type(self))
        if (scaled := length_dependent(self.model.config.get_text_config())) is not None:
            self._plan.longest_trimmed = scaled[0] - 1  # the padded width of longer rows decides on their embeddings
        positions = padded_size if shared is None else shared.positions
        self._micro_batches = MicroBatches(self.accelerator, self.args, self._plan, self._announce_pass, positions)
        self._empty_steps = EmptySteps(self, self._check_weighted)
        self._begin_run()
        self._is_made = True
        # Around the methods of subclasses: none can lose a weight, or a reward.
        self.rollout_events = RolloutEvents(self, announces=True)
        self.rollout_events.watch_environments()
        for name in ("compute_loss", "_compute_loss"):
            extend(self, name, self._loss_of_kept_rows)
        if self.is_deepspeed_enabled:
            extend(self.accelerator, "backward", self._backward_of_kept_rows)
        if shared is not None:
            extend(self.accelerator, "backward", shared.backward)
        if isinstance(rollout := kwargs.get("rollout_func"), NeedsRows):
            rollout.attach(self)
            if rollout.splits_episodes:
                check_turn_samples(self)
        self.add_callback(self._empty_steps)
        for companion in COMPANIONS:
            named_object(companion, "companion")(self)

    def _begin_run(self) -> None:
        """No state of an earlier run, or of another dataset."""
        args = self.args
        self.latest_selection = None
        self._micro_step: MicroStep | None = None  # of the micro-batch that is about to be computed
        self._is_weighted = True  # whether its loss has come through `_loss_of_kept_rows`
        weights = self.reward_weights.tolist()
        known = known_range(self.reward_funcs, self.reward_func_names, weights, args.snr_score_reward)
        self._strategy = strategy_of(args, self._own_selector, known)
        self._empty_steps.begin_run()
        self._prompts = self._prompt_source()
        first, groups = self.pilot_generations, args.groups_per_generation
        self._pilots = PilotSampling(self, first, self._prompts) if first else None
        self._dynamic_sampling: DynamicSampling | None = None
        if (
            args.snr_dynamic_sampling_rounds > 0 or first
        ):  # pilots leave places in a batch, even without further prompts
            updates = args.steps_per_generation * self.num_iterations // args.gradient_accumulation_steps
            # Pilots of as many prompts as a batch has room for; TRL resets an environment for each of their rows.
            environments = getattr(self, "environment_factories", None) is not None
            most = groups * args.num_generations // first if first and not environments else groups
            padding = self._tokenizer.pad_token_id, self.pad_to_multiple_of
            unit = 1 if first else args.num_generations
            self._dynamic_sampling = DynamicSampling(self.accelerator, args, updates, *padding, most, unit)
        self._run_state = RunState(
            shared={"filter": self._strategy, "steps": self._empty_steps, "prompts": self._prompts}
        )
        if self._pilots is not None:
            self._run_state.shared["pilots"] = self._pilots
        if self._dynamic_sampling is not None:
            self._run_state.own["dynamic_sampling"] = self._dynamic_sampling

    def _prompt_source(self) -> TRLOrder:
        args = self.args
        if not args.snr_prompt_selection and args.snr_dynamic_sampling_rounds == 0:
            return TRLOrder()
        rows = self._remove_unused_columns(self.train_dataset, description="training")
        kind = PromptSelection if args.snr_prompt_selection else DatasetOrder
        return kind(self.accelerator, args, rows, self.shuffle_dataset)

    def _announce_pass(self, computed: int, plain: int, rows: int) -> None:
        if self._shared_prompts is not None:
            self._shared_prompts.announce(computed, plain)
        self._empty_steps.log("update_compute_fraction", computed / plain)
        self.rollout_events.update_pass(computed, plain, rows)

    @property
    def _loss_mean(self) -> LossMean:
        raise NotImplementedError
