"""The record of a run that others will look at: diagnostics on its model card and beside it, and failed uploads."""

import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from huggingface_hub import hf_hub_download, list_repo_files
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ragen2_trl.callbacks.shown_metrics import shown_metrics
from ragen2_trl.callbacks.training_progress import TrainingProgressCallback, next_command
from ragen2_trl.record.checks import check_callbacks
from ragen2_trl.record.files import (
    DIAGNOSTICS,
    EPISODES,
    EVALUATIONS,
    MEASUREMENTS,
    measured_step,
    write_text,
)
from ragen2_trl.record.group_rewards import append_group_rewards, forget_group_rewards
from ragen2_trl.record.lock import alone_in
from ragen2_trl.record.run import RUN_STATE, Run, read_run, run_of, write_run
from ragen2_trl.record.settings import public_prompt
from ragen2_trl.redaction import hide_credentials, with_hidden_credentials
from ragen2_trl.rollout_events import extend
from ragen2_trl.saved_state import of_checkpoint, remove_unfinished

logger = get_logger(__name__)

CHECKPOINT_STRATEGIES = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """An error in what others look at is said, and does not cost them the training that it is about."""
    try:
        yield
    except Exception as error:
        logger.debug(f"{what} failed.", exc_info=True)
        logger.error(f"{what} failed; training goes on ({type(error).__name__}: {hide_credentials(str(error))}).")


def keep_record(trainer: Any) -> "RunRecord":
    """Let a trainer write diagnostics with every model card, and say what to do where an upload fails."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RunRecord):
            return callback
    record = RunRecord(trainer)
    trainer.add_callback(record)
    return record


class RunRecord(TrainerCallback):
    """
    Adds diagnostics to the model cards of a trainer, which TRL writes at each checkpoint and before each upload, and
    once more when training ends. `SNRFilteredGRPOTrainer` and `MutualInformationCallback` bring it along.

    Figures are drawn when somebody will look at them: when training ends, at an upload, and when a script writes a
    card. At any other checkpoint the card and `diagnostics/` get their numbers, which figures can be drawn of later.

    An upload that fails at a checkpoint is a warning, and training goes on; one that a script asked for with
    `trainer.push_to_hub()` raises, and below the traceback it is said that the files are there and how to upload them.
    Tokens in the trainer's arguments stay out of `training_args.bin`, which is uploaded too.

    Where a filter chooses among groups, the rewards of all of them are kept in `_measurements/`, by generation.

    Of its metrics, trackers and the console get the eight of [`shown_metrics`] (all with `verbose`), while
    `trainer.state.log_history`, and with it checkpoints, card and report, has them all.

    While it trains, no other process can train into its `output_dir`.

    When training begins, what an earlier one left in `diagnostics/`, `evaluation_after.json`, and measurements and
    episodes of steps that are still to come are removed from `output_dir`.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer whose `train`, `create_model_card`, `push_to_hub`, `_push_from_checkpoint`, `_save_checkpoint`
            and `callback_handler.on_log` are extended.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.draws = True  # figures; without them, cards have their numbers alone
        self.verbose = getattr(trainer.args, "snr_verbose", False)  # whether callbacks get all that is logged
        # Names of files in checkpoints that hold what a model wrote; callbacks add theirs.
        self.texts = {"snr_state_*.pt"} if hasattr(trainer.args, "snr_value") else set()
        self._at_checkpoint = False  # a card is written there before it is known whether it will be uploaded
        self._write_card: Callable[[], None] | None = None  # as the latest card was asked for
        self._recorded: Any = None  # the selection that was noted last
        self._of_step: list[Any] = []  # those of this optimizer step, which may span several generations
        extend(trainer, "train", self._train)
        extend(trainer.callback_handler, "on_log", self._tell)
        extend(trainer, "create_model_card", self._create_model_card)
        extend(trainer, "push_to_hub", self._push_to_hub)
        extend(trainer, "_push_from_checkpoint", self._push_from_checkpoint)
        extend(trainer, "_save_checkpoint", self._save_checkpoint)
        trainer.args = with_hidden_credentials(trainer.args)

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        folder = Path(self.trainer.args.output_dir)
        with alone_in(folder) if self.trainer.is_world_process_zero() else nullcontext():
            return train(*args, **kwargs)

    def _tell(self, on_log: Callable[..., Any], args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        """The log history has the whole row by now: a callback that needs it looks there."""
        return on_log(args, state, control, logs if self.verbose else shown_metrics(logs))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write_card = None
        self._of_step = []  # of a step that was interrupted
        with of_checkpoint():  # it goes on the card
            check_callbacks(state.stateful_callbacks, "the checkpoint's trainer_state.json")
        before = state.stateful_callbacks.get(RUN_STATE, {}).get("resumed_at", [])
        resumed_at = [*before, state.global_step] if state.global_step > 0 else []
        state.stateful_callbacks[RUN_STATE] = {"ended": False, "resumed_at": resumed_at}
        if state.is_world_process_zero:
            with reported("Removing the files of an earlier training"):
                self._remove_leftovers()
            with reported("Writing the record of this run"):
                write_run(self.trainer)
            if args.push_to_hub:
                self._warn_of_other_content()
                self._warn_of_texts()

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before each upload; the one that a script asks for writes a card of its own after this."""
        if self._at_checkpoint and self._write_card is not None:
            self._at_checkpoint = False
            self._write_card()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.stateful_callbacks[RUN_STATE]["ended"] = True
        if not state.is_world_process_zero:
            return
        self.trainer._finish_current_push()  # it may be reading what is written next
        with reported("Writing the record of this run"):
            if self._write_card is not None:
                self._write_card()
            else:
                write_run(self.trainer)
            callbacks = self.trainer.callback_handler.callbacks
            if not any(isinstance(one, TrainingProgressCallback) for one in callbacks):  # whose table says all this
                run = run_of(self.trainer)
                known = (one for one in run.findings if one.kind != "data" and one.name != "not_measured")
                said = [finding.sentence for finding in known]
                logger.warning(" ".join(["Training has ended.", *said, next_command("report", args.output_dir)]))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        selection = getattr(self.trainer, "latest_selection", None)
        if selection is not self._recorded and selection is not None:
            self._recorded = selection  # which may serve several optimizer steps
            self._of_step.append(selection)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end(args, state, control)
        selections, self._of_step = self._of_step, []
        if selections and state.is_world_process_zero:
            with reported("Saving the rewards of the groups"):
                known = all(one.predicted is not None for one in selections)
                append_group_rewards(
                    Path(args.output_dir),
                    state.global_step,
                    torch.cat([one.rewards for one in selections]),
                    torch.cat([one.kept.any(dim=1) for one in selections]),
                    [value for one in selections for value in one.predicted] if known else None,
                )

    def _create_model_card(self, create: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        create(*args, **kwargs)
        if not self.trainer.is_world_process_zero():
            return
        self._write_card = lambda: self._create_model_card(create, *args, **kwargs)
        with reported("Writing the diagnostics of the model card"):  # the checkpoint, written next, is worth more
            _extend_card(self.trainer, self._write_run(with_figures=not self._at_checkpoint))

    def _write_run(self, with_figures: bool) -> Run:
        """The run that the card is about, with its numbers in `diagnostics/` once it has begun."""
        has_begun = self._has_begun()
        run = run_of(self.trainer) if has_begun else _run_before(self.trainer)
        is_uploading = any(not job.done() for job in self._jobs())  # which a picture that changes would break
        if with_figures and self.draws and not is_uploading:
            with reported("Drawing figures"):
                run = write_figures(run)
        if not has_begun:
            return run
        self.trainer.state.stateful_callbacks[RUN_STATE]["drawn"] = run.drawn
        return write_run(self.trainer)

    def _has_begun(self) -> bool:
        return RUN_STATE in self.trainer.state.stateful_callbacks

    def _push_to_hub(self, push: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if self.trainer.is_world_process_zero():
                self.trainer._finish_current_push()
            pushed = push(*args, **kwargs)
        except Exception as error:
            error.add_note(self._failed(error))
            raise
        if isinstance(pushed, Future):
            self._watch(pushed)
        return pushed

    def _save_checkpoint(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._at_checkpoint = True
        try:
            save(*args, **kwargs)
        finally:
            self._at_checkpoint = False

    def _push_from_checkpoint(self, push: Callable[..., None], checkpoint_folder: str) -> None:
        known = self._jobs()
        push(checkpoint_folder)
        for job in self._jobs():
            if job not in known:
                self._watch(job, "\nTraining goes on.")

    def _jobs(self) -> list[Future[Any]]:
        """Uploads of checkpoints; transformers never asks them whether they failed."""
        # The attribute is there once there is a repository.
        in_progress = getattr(self.trainer, "push_in_progress", None)
        return [] if in_progress is None else list(in_progress.jobs)

    def _watch(self, job: Future[Any], consequence: str = "") -> None:
        def report(done: Future[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:  # in a thread that does not know accelerate's state
                logger.warning(self._failed(error) + consequence, main_process_only=False)

        job.add_done_callback(report)

    def _failed(self, error: BaseException) -> str:
        args = self.trainer.args
        command = ["hf", "upload", self.trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).name]
        command += [args.output_dir, ".", "--exclude", "_*", "--exclude", "checkpoint-*"]
        command += ["--private"] if args.hub_private_repo else []
        command += ["--revision", args.hub_revision] if args.hub_revision else []
        reason = " ".join(str(error).partition("For more information")[0].split())
        return hide_credentials(
            f"Upload to the Hub failed with {type(error).__name__}: {reason}\nEverything is in {args.output_dir}. "
            f"To upload it, logged in by `hf auth login`: {shlex.join(command)}"
        )

    def _remove_leftovers(self) -> None:
        from ragen2_trl.report.card import FIGURES

        folder = Path(self.trainer.args.output_dir)
        for place in (folder, *(folder / name for name in (DIAGNOSTICS, MEASUREMENTS, EPISODES))):
            remove_unfinished(place)
        figures = [folder / DIAGNOSTICS / f"{name}{suffix}" for name in FIGURES for suffix in (".png", ".svg")]
        for path in [*figures, folder / EVALUATIONS["after"]]:
            path.unlink(missing_ok=True)
        saved = [*(folder / MEASUREMENTS).glob("*_*.json"), *(folder / EPISODES).glob("*_*.*")]
        for path in saved:
            if (measured_step(path) or 0) > self.trainer.state.global_step:
                path.unlink()
        forget_group_rewards(folder, after=self.trainer.state.global_step)

    def _warn_of_texts(self) -> None:
        """A checkpoint goes up as it is: without the groups that wait for the next step a run could not go on."""
        if self.trainer.args.hub_strategy in CHECKPOINT_STRATEGIES and self.texts:
            hold = "hold" if len(self.texts) > 1 else "holds"
            logger.warning(
                f"hub_strategy={self.trainer.args.hub_strategy.value!r} uploads checkpoints to "
                f"{self.trainer.hub_model_id}: {' and '.join(sorted(self.texts))} in them {hold} prompts and "
                "completions word by word, to resume from. With hub_strategy='every_save' they stay on this machine."
            )

    def _warn_of_other_content(self) -> None:
        """A trainer's upload replaces the card of a repository, whoever wrote it."""
        args, repo_id = self.trainer.args, self.trainer.hub_model_id
        where = {"revision": args.hub_revision, "token": args.hub_token}
        try:
            files = set(list_repo_files(repo_id, **where)) - {".gitattributes"}
            card = (
                Path(hf_hub_download(repo_id, "README.md", **where)).read_text("utf-8") if "README.md" in files else ""
            )
        except Exception as error:  # noqa: BLE001 - of whichever HTTP library; a look must not end a training
            logger.warning(
                f"Training begins, but {repo_id} could not be checked on the Hub: {hide_credentials(str(error))}"
            )
            return
        if files and "generated_from_trainer" not in card:
            logger.warning(
                f"{repo_id} on the Hub holds {', '.join(sorted(files)[:5])}, not written by a trainer. Uploads "
                "replace README.md and files of the same names. Other files stay, and the "
                "repository's history keeps all of them."
            )


def write_figures(run: Run) -> Run:
    """Draw the figures of a run into its `diagnostics/`, as PNG and SVG, and remove those that it has no data for.

    Returns:
        The run with figures; it is the same if they were there already.
    """
    if run.drawn == len(run.rows):
        return run
    from ragen2_trl.report.figures import draw_figures  # matplotlib only where something is drawn

    draw_figures(run, run.folder / DIAGNOSTICS)
    return replace(run, drawn=len(run.rows))


def _run_before(trainer: Any) -> Run:
    """Of a trainer that has not begun: the run whose files are in its folder, which it may be there to upload."""
    try:
        return read_run(Path(trainer.args.output_dir))
    except ValueError:
        return run_of(trainer)


def _extend_card(trainer: Any, run: Run) -> None:
    import yaml  # with what is needed for cards alone
    from huggingface_hub import ModelCard

    from ragen2_trl.report.card import add_diagnostics

    path = Path(trainer.args.output_dir) / "README.md"
    try:
        card = ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        logger.warning(f"{path} gets no diagnostics (they are in {DIAGNOSTICS}/): its metadata is not valid: {error}")
        return
    prompt = public_prompt(vars(trainer).get("reward_funcs", ()))
    add_diagnostics(card, run, trainer.hub_model_id, trainer.args.hub_revision or "main", prompt)
    write_text(path, str(card))
