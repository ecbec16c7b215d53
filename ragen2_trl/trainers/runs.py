"""What the synchronous and the asynchronous trainers share: checks when they are made, runs and their checkpoints."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragen2_trl.names import named_object
from ragen2_trl.redaction import hide_credentials, with_hidden_credentials
from ragen2_trl.trainers import checks
from ragen2_trl.trainers.checkpoints import (
    RunState,
    checkpoint_to_resume,
    last_complete_checkpoint,
    open_checkpoint,
    write_manifest,
)
from ragen2_trl.trainers.selection import Selection, Selector, Strategy, strategy_class, strategy_of
from ragen2_trl.trainers.trl_contract import check_trl

if TYPE_CHECKING:
    from ragen2_trl.trainers.stock import StockTrainer
else:
    StockTrainer = object  # it is mixed in before one of TRL's

logger = get_logger(__name__)

# Callbacks that a trainer brings along, as `package.module:name` of a function that takes the trainer: by name, as the
# filter knows nothing of callbacks and reports.
COMPANIONS = (
    "ragen2_trl.callbacks.run_record:keep_record",
    "ragen2_trl.callbacks.cost:count_cost",
    "ragen2_trl.callbacks.training_health:keep_watch",
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


class FilteredRun(StockTrainer):
    """A run with the filter, whose checkpoints count once all of them is written. Mixed in before one of TRL's."""

    _config_class: ClassVar[type]  # with the filter's settings
    _trl_config_class: ClassVar[type]  # of the plain trainer
    _paper = PAPER
    how_to_resume = "train(resume_from_checkpoint=True)"  # for the last line of an error
    latest_selection: Selection | None = None
    _own_selector: Selector | None
    _strategy: Strategy
    _run_state: RunState
    _train_sampler: Any = None  # TRL's, of datasets with rows

    # For each trainer to fill in.
    _save_run_state: Callable[[str], None]
    _load_run_state: Callable[[str | None], None]

    @property
    def _has_begun(self) -> bool:
        """Whether a step has begun."""
        raise NotImplementedError

    # Construction: before and after TRL's

    def _checked_args(self, model: Any, args: Any, train_dataset: Any, selector: Any, environments: Any) -> Any:
        """The settings, once everything is checked that needs no model; see the trainers for arguments and errors."""
        check_trl(type(self))
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{name.split('/')[-1]}-{self._name.replace(' ', '-')}")
        checks.check_prompt_column(train_dataset, environments)
        args = checks.with_snr_fields(args, self._config_class, self._trl_config_class)
        checks.check_loss_of_trl(type(self), args)
        checks.check_selector(selector, args)
        return args

    def _check_made(self, selector: Selector | None, plays_episodes: bool) -> None:
        """TRL has made the trainer."""
        self.args = with_hidden_credentials(self.args)  # before others hold them
        if self.aux_loss_enabled:  # of a mixture of experts
            strategy_class(self.args).check_losses(type(self), [], self.router_aux_loss_coef)
        checks.check_same_on_all_processes(self.args, self.accelerator.num_processes)
        if plays_episodes:
            checks.warn_of_equal_rows(self.train_dataset)
        named = self.args.snr_selector
        self._own_selector = selector if named is None else named_object(named, "snr_selector")

    def _new_strategy(self) -> Strategy:
        """That of a run that begins."""
        weights, by = self.reward_weights.tolist(), self.args.snr_score_reward
        known = checks.known_range(self.reward_funcs, self.reward_func_names, weights, by)
        return strategy_of(self.args, self._own_selector, known)

    def _add_companions(self) -> None:
        for companion in COMPANIONS:
            named_object(companion, "companion")(self)

    # A run

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """A Hub that cannot be reached, or refuses, ends no training before it begins: uploads are tried later."""
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - of whichever HTTP library
            self.push_in_progress: Any = None
            self.hub_model_id: Any = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
            logger.warning(
                f"push_to_hub=True: {self.hub_model_id} cannot be made on the Hub ({hide_credentials(str(error))}). "
                "Training goes on, and each upload is tried when its time comes."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self._check_trainable()
        checkpoint = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint, self.accelerator)
        try:
            return super().train(checkpoint, *args, **kwargs)
        except (KeyboardInterrupt, Exception) as end:
            self._tell_where_to_resume(end)
            raise

    def _check_trainable(self) -> None:
        checks.check_trainable(self.model)

    def _tell_where_to_resume(self, end: BaseException) -> None:
        """Add a line below the traceback; for an error only after a step, with a checkpoint that could be loaded."""
        interrupted = isinstance(end, KeyboardInterrupt)  # all processes are interrupted; an error may be of one alone
        has_begun = self.state.global_step > 0 and self._has_begun
        if not (self.is_world_process_zero() if interrupted else has_begun):
            return
        last = last_complete_checkpoint(Path(str(self.args.output_dir)))
        if last is None and not interrupted:
            return
        how = f"{self.how_to_resume} goes on from {last.name}" if last else "no checkpoint is whole"
        event = "Interrupted" if interrupted else "Failed"
        where = f"{event} at step {self.state.global_step}; {how} in {self.args.output_dir}."
        end.add_note(where)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            open_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        if not self.args.save_only_model:
            self._save_run_state(folder)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """The last part of a checkpoint that every process writes."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.state.global_step > self.state.max_steps:
            raise ValueError(
                f"resume_from_checkpoint={checkpoint!r} is at global_step={self.state.global_step} "
                f"(trainer_state.json), but this run ends after {self.state.max_steps} optimizer steps; allowed: a "
                "larger max_steps or num_train_epochs, or an earlier checkpoint."
            )
        super()._load_optimizer_and_scheduler(checkpoint)
        sampler = self._train_sampler
        if sampler is not None and sampler.shuffle:
            # A permutation for each epoch: those of earlier epochs were drawn in the process that saved.
            for _ in range(int(self.state.epoch or 0)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._load_run_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Without a word of weights that are tied to others, such as `lm_head`'s: these have been loaded.

        Raises:
            ValueError: where other weights are missing: training would go on from their initial values.
        """
        known = {*getattr(self.model, "all_tied_weights_keys", {}), *(self.model._keys_to_ignore_on_save or ())}
        missing = [name for name in load_result.missing_keys if name not in known]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} weights of the model, such as {missing[0]}: training would go "
                "on from their initial values; allowed: a checkpoint of this model, written by this release of "
                "transformers."
            )
        load_result.missing_keys.clear()
        super()._issue_warnings_after_load(load_result)
