"""Whether reasoning still depends on its input, measured while a model trains (arXiv 2604.06268)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypedDict, cast

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainerCallback

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.pooling import POOL_FILE, Generation, Pool, joined, joined_selection, what_layout_means
from ragen2_trl.callbacks.run_record import keep_record, reported
from ragen2_trl.callbacks.whole_model import whole_model
from ragen2_trl.filtering import check_choice, zero_variance
from ragen2_trl.instrument.answers import FindAnswer, measure_answers
from ragen2_trl.instrument.budget import Texts, affordable, expected_tokens, num_answers
from ragen2_trl.instrument.diagnosis import (
    ANSWERS,
    SCOPES,
    Measurement,
    NotMeasurableError,
    SamePromptsError,
    Sampling,
    combine,
    draw,
    measure_first_turn,
    measure_trajectory,
)
from ragen2_trl.instrument.findings import reasoning_finding
from ragen2_trl.instrument.information import MarginalStdEMA
from ragen2_trl.instrument.reasoning import Trajectories, Turn
from ragen2_trl.instrument.scoring import ContextLengthError, count_tokens
from ragen2_trl.instrument.verdict import MIN_STEPS_BETWEEN, Evidence, Judgement, begins, judge, regime_flags
from ragen2_trl.metrics import STEP_OF_MI
from ragen2_trl.record.files import MEASUREMENTS
from ragen2_trl.record.run import MI_STATE, run_of
from ragen2_trl.record.saved_measurement import SavedMeasurement
from ragen2_trl.rollout_events import (
    Listener,
    LocalRollout,
    Rollout,
    forget_in_row,
    gather_rollout,
    listen,
    log_row,
)
from ragen2_trl.saved_state import kept_by_callback
from ragen2_trl.trainers.stock import StockTrainer

logger = get_logger(__name__)

STOP_ON_TEMPLATE = "template_even_if_success_rises"


class InformationState(TypedDict):
    """What a checkpoint keeps."""

    watch: dict[str, list[Evidence]]
    ema: dict[str, dict[str, float]]
    last_step: int | None
    asked: int | None
    silence: str


class MutualInformationCallback(TrainerCallback):
    """
    Logs, in the same row as TRL's metrics, how much the reasoning of a policy depends on its prompt.

    The completions of a generation are scored under the prompts of the whole batch, with the weights that sampled
    them and before anything is filtered (see [`~ragen2_trl.instrument.cross_score`]). Where a generation has fewer
    than `min_prompts` groups, the latest are pooled and scored with the weights of the moment, which have sampled the
    last of them alone; `mi/pooled_steps` logs how many optimizer steps they reach back.
    The metrics of [`~ragen2_trl.instrument.information_metrics`] land under `mi/first_turn/` and, with several turns,
    under `mi/trajectory/`. Training is left bit-identical. Exceptions are not caught; where there is nothing to
    measure, a warning says why and no number is logged.

    Each measurement of first turns is written, with its texts, to `_measurements/` in the trainer's `output_dir`,
    which uploads to the Hub leave out, and drawn as images for the trainer's trackers. The model card gets a section
    that says whether reasoning depends on its prompt.

    Of several on one trainer the one that was added last measures.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to.
        every (`int`, *optional*):
            Measure at optimizer steps that are multiples of it. By default at logging steps, but no more often than
            every 10th step, so that a run shorter than its `logging_steps` (10 in TRL) is not measured. Where rows
            are logged by epoch, every 10th step; where none are, never. A row holds the latest measurement of its
            steps.
        num_completions (`int`, *optional*, defaults to `64`):
            Reasoning traces that are scored in each scope, drawn without replacement.
        max_prompts (`int`, *optional*, defaults to `64`):
            Prompts that they are scored under, if the batch has more.
        budget (`float`, *optional*, defaults to `0.05`):
            Most that measurements may score, as a share of the tokens of plain updates between two of them, a backward
            pass counted as two forward ones. Above it, and above 300,000 tokens, fewer tokens of each trace are scored
            (down to 128), then fewer prompts (down to 16), and a line says so. `None` for all at any cost.
        min_prompts (`int`, *optional*, defaults to `8`):
            Groups that a measurement waits for. Each completion is measured once.
        verbose (`bool`, *optional*, defaults to `False`):
            Whether trackers and the console get every metric, in place of retrieval accuracy and chance, the mutual
            information with its bound, closed reasoning, and three of the filter. `trainer.state.log_history` and the
            run's files always have all.
        scopes (`Sequence[str]`, *optional*, defaults to `("first_turn", "trajectory", "answer")`):
            `first_turn` compares the first turns of all groups. Where a game shows its state later and all rows share
            one prompt, `("trajectory", "answer")` measures from the first observation on. `trajectory` draws from all
            turns and compares within each turn position; it is left out as long as completions have a single turn.
            `answer` scores answers after the reasoning, and after the prompt, of others
            ([`~ragen2_trl.instrument.measure_answers`]): it says whether the answer uses its prompt and its reasoning.
            It costs at most a fifth of 64 first turns under 64 prompts, and is left out where fewer than 8 turns have
            an answer.
        stop_on (`str`, *optional*):
            `"template_even_if_success_rises"` ends training when reasoning has become a template: it has depended on
            its prompt and surely does so less than half as much, in two measurements in a row or more, with high
            entropy (see [`~ragen2_trl.instrument.judge`]). On real runs success has gone on rising in this state; to
            end runs that fail, there is [`TrainingHealthCallback`]. Measurements too small to tell never end it.
        max_tokens_per_forward (`int`, *optional*):
            See [`~ragen2_trl.instrument.cross_score`].
        answer (`Callable[[str], str | None]`, *optional*):
            Gives the answer in the text of a turn, or `None` where there is none. By default it is what stands in
            `<answer>…</answer>`, in tool calls, in the last `\\boxed{…}`, or after `</think>`
            ([`~ragen2_trl.instrument.find_answer`]).

    Raises:
        ValueError: for a setting outside its range.
        TypeError: at the start of training, for a trainer that does not sample completions.

    Example:

    ```python
    >>> from ragen2_trl import MutualInformationCallback

    >>> trainer.add_callback(MutualInformationCallback(trainer))  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int | None = None,
        num_completions: int = 64,
        max_prompts: int = 64,
        scopes: Sequence[str] = SCOPES,
        stop_on: Literal["template_even_if_success_rises"] | None = None,
        max_tokens_per_forward: int | None = None,
        min_prompts: int = 8,
        verbose: bool = False,
        budget: float | None = 0.05,
        answer: FindAnswer | None = None,
    ):
        if budget is not None and budget <= 0:
            raise ValueError(f"budget must be above 0, or None for measurements at any cost, got {budget!r}")
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 or None, got {every!r}")
        if min_prompts < 2:
            raise ValueError(f"min_prompts must be at least 2, got {min_prompts!r}")
        if stop_on is not None:
            check_choice("stop_on", stop_on, (STOP_ON_TEMPLATE,))
        if not scopes:
            raise ValueError(f"scopes must name at least one of {SCOPES}, got {scopes!r}")
        for scope in scopes:
            check_choice("scopes", scope, SCOPES)
        self.trainer = cast(StockTrainer, trainer)
        self.every = every
        self.cadence = Cadence(self.trainer, every)
        self.scopes = tuple(scopes)
        self.leading_scope = next((scope for scope in scopes if scope != ANSWERS), None)
        self.answer = answer
        # Many models write no tags, so that there is nothing to warn of unless answers were asked for.
        self.asks_for_answers = answer is not None or (ANSWERS in scopes and self.scopes != SCOPES)
        self.stop_on = stop_on
        self.sampling = Sampling(
            num_completions,
            max_prompts,
            self.trainer.args.temperature,
            max_tokens_per_forward,
            split_over_processes=trainer.accelerator.num_processes > 1,
        )
        self.min_prompts = min_prompts
        self.budget = budget
        record = keep_record(trainer)
        record.verbose |= verbose
        if (line := what_layout_means(self.trainer, min_prompts)) is not None:
            logger.warning(line)
            record.texts.add(POOL_FILE)
        self._listener: Listener | None = None
        self._pool = Pool(self.trainer, min_prompts)
        self._reset()

    def _reset(self) -> None:
        self.evidence: list[Evidence] = []  # of all measurements of the run
        self.ema = {scope: MarginalStdEMA() for scope in self.scopes if scope != ANSWERS}
        self.last_step: int | None = None  # the optimizer step that asked for the latest measurement
        self._asked: int | None = None  # the optimizer step that asked for one which waits for more prompts
        self._pool.take()  # of an earlier run
        self._latest: Generation | None = None  # until it is known which of its groups are kept
        self._measured: list[Generation] = []  # by the latest measurement, until it is saved
        self._judgement: Judgement | None = None  # of the latest measurement
        self._stop = False
        self._to_save: SavedMeasurement | None = None  # until the step has ended
        self._to_draw: SavedMeasurement | None = None  # until its row is logged
        self._silent: dict[str, str] = {}  # what could not be measured last time, and why
        self._told: Sampling | None = None  # in a line, of how much is scored

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        self._reset()
        if not is_newest(self, self.trainer):
            if self._listener is not None:
                self._listener.remove()
                self._listener = None
            return
        self._forget_row()  # of a step that was interrupted
        saved = kept_by_callback(state, MI_STATE, InformationState)
        if saved is not None:
            self.evidence = [Evidence(**one) for one in saved["watch"]["measurements"]]
            self.ema |= {s: MarginalStdEMA(values=saved["ema"][s]) for s in self.ema if s in saved["ema"]}
            self.last_step, self._asked = saved["last_step"], saved["asked"]
        if (reason := self.cadence.why_never(self.last_step if self._asked is None else self._asked)) is not None:
            logger.warning(
                f"Mutual information will not be measured: {reason}. Train longer, or set a smaller logging_steps or "
                "MutualInformationCallback(trainer, every=...) (--mi_every on the command line)."
            )
        self._pool.begin_run()
        self._save_state()
        self._listener = self._listener or listen(self.trainer, on_rollout=self._on_rollout)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if is_newest(self, self.trainer) and not args.save_only_model:  # it holds prompts and completions
            self._pool.save()

    def _note_selection(self) -> None:
        """Of our trainer, which chooses after the rollout has been handed on."""
        if self._latest is not None:
            selection, groups = getattr(self.trainer, "latest_selection", None), len(self._latest.rollout.rewards)
            # The rollout is the first round of the step; those of dynamic sampling come after it.
            self._latest.selection = selection and (selection.scores[:groups], selection.kept[:groups].any(dim=1))
            self._latest = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_selection()
        if self._to_save is not None:
            selection, self._measured = joined_selection(self._measured), []
            if selection is not None:
                self._to_save = replace(self._to_save, scores=selection[0], kept=selection[1])
            with reported("Saving the measurement"):
                self._to_save.save(Path(args.output_dir) / MEASUREMENTS)
            self._to_draw, self._to_save = self._to_save, None
        if self._stop:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After the trackers: they have the row, so that images can join it."""
        if self._to_draw is None or "mi/tokens" not in state.log_history[-1]:  # rows of an evaluation come in between
            return
        measurement, self._to_draw = self._to_draw, None
        from ragen2_trl.report.trackers import has_image_trackers, log_figures

        if has_image_trackers(self.trainer):
            from ragen2_trl.report.figures import measurement_figures

            with reported("Drawing figures for the trackers"):
                figures = measurement_figures(run_of(self.trainer), measurement)
                log_figures(self.trainer, {f"mi/{name}": figure for name, figure in figures})

    def _on_rollout(self, local: LocalRollout) -> None:
        self._note_selection()
        if not is_newest(self, self.trainer):
            return
        asked = self.cadence.due_step(self.last_step) if self._asked is None else self._asked
        if asked is None and len(local.rewards) >= self.min_prompts:
            return
        started, done = time.perf_counter(), self.trainer.state.global_step
        # Completions may serve several optimizer steps. They are told by the first of them, whose row is logged next.
        step = done + 1
        if any(gather_object([local.has_images])):  # on some processes perhaps, told to all
            if asked is not None:
                self.last_step = asked
                reason = "completions with images cannot be scored without their prompts' images"
                self._stay_silent(step, "images", reason)
            return
        self._latest = Generation(gather_rollout(local), done, beside=logged_beside(self.trainer))
        self._pool.add(self._latest)
        self._asked = None if self._pool.is_full else asked
        if asked is None or not self._pool.is_full:
            self._save_state()
            return
        self._forget_row()  # what it holds already is an older measurement's
        self.last_step, self._measured = max(asked, step), self._pool.take()
        rollout = joined(self._measured)
        self._log({STEP_OF_MI: float(step)})
        if len(self._measured) > 1:
            self._log({"mi/pooled_steps": float(done - self._measured[0].step)})
        tokenizer = self.trainer._tokenizer
        trajectories = Trajectories(
            rollout.prompt_ids, rollout.completion_ids, tokenizer, rollout.tool_masks, rollout.turn_samples
        )
        groups = [row // rollout.group_size for row in range(len(trajectories))]
        self._log(group_metrics(rollout))
        # Read are those that are drawn: where all have a turn, the very ones that the first scope draws.
        drawn = draw(range(len(trajectories)), self.sampling.num_completions, self._generator(step, 0))
        valid_rate = self._log_validity([trajectories[i] for i in drawn])
        warn_of_unequal_prompts(rollout, groups)
        sampling = self._affordable(rollout, trajectories, len(set(groups)))
        with whole_model(self.trainer) as model, count_tokens(model) as tokens, self.trainer.accelerator.autocast():
            metrics, first_turn = self._measure(model, step, trajectories, groups, sampling)
        total = sum(gather_object([sum(tokens)]))  # over all processes
        self._log({"mi/seconds": time.perf_counter() - started, "mi/tokens": float(total)})
        if metrics is not None:
            self._follow(step, metrics, valid_rate)
        if first_turn is not None and self.trainer.is_world_process_zero():
            self._to_save = self._with_texts(step, first_turn, trajectories, rollout.rewards)
        self._save_state()

    def _generator(self, step: int, number: int) -> torch.Generator:
        """The same draws on every process, and after a resume; no global generator moves."""
        seed = np.random.SeedSequence([self.trainer.args.seed, step, number]).generate_state(1)[0]
        return torch.Generator().manual_seed(int(seed))

    def _affordable(self, rollout: Rollout, trajectories: Trajectories, num_prompts: int) -> Sampling:
        """What the budget pays for; told once, and again when it changes."""
        if self.budget is None:
            return self.sampling
        lengths, counts = [], []
        for number, ids in enumerate(rollout.completion_ids):
            samples = rollout.turn_samples[number]
            lengths.append(len(ids) + sum(len(sample["completion_ids"]) for sample in samples))
            counts.append(max(1, trajectories.num_turns(number)))
        turns = [length / count for length, count in zip(lengths, counts, strict=True)]
        contexts = [len(ids) for ids in rollout.prompt_ids]
        texts = Texts(contexts, turns, lengths, max(counts), num_prompts)
        update = 3 * (sum(contexts) + sum(lengths)) / len(self._measured)  # of one generation
        update *= self.cadence.generations_between * self.trainer.num_iterations
        sampling = affordable(self.scopes, self.sampling, texts, self.budget * update)
        if sampling not in (self.sampling, self._told):
            whole, part = (expected_tokens(self.scopes, one, texts) / update for one in (self.sampling, sampling))
            traces = f"the first {sampling.max_tokens} tokens of each trace" if sampling.max_tokens else "all traces"
            logger.warning(
                f"A whole measurement of mutual information would cost {whole:.0%} of the tokens of the update. It "
                f"is cut to {traces} under at most {sampling.max_prompts} prompts, which costs {part:.0%}; "
                "budget=None scores all."
            )
        self._told = sampling
        return replace(sampling, num_answers=num_answers(sampling, texts))

    def _measure(
        self, model: nn.Module, step: int, trajectories: Trajectories, groups: list[int], sampling: Sampling
    ) -> tuple[dict[str, float] | None, Measurement | None]:
        """Logs all scopes that can be measured.

        Gives the metrics of the leading scope, which regimes are told by, and the measurement of first turns.
        """
        has_turns = any(trajectories.num_turns(i) > 1 for i in range(len(trajectories)))
        leading = first_turn = None
        for number, scope in enumerate(self.scopes):
            if scope == "trajectory" and not has_turns:
                continue
            generator = self._generator(step, number)
            try:
                if scope == ANSWERS:
                    answers = measure_answers(model, trajectories, groups, generator, sampling, self.answer)
                    self._log({f"mi/{scope}/{key}": value for key, value in answers.items()})
                    self._silent.pop(scope, None)
                    continue
                metrics, parts, measurement = measure_scope(scope, model, trajectories, groups, generator, sampling)
            except (NotMeasurableError, ContextLengthError) as error:
                if scope != ANSWERS or self.asks_for_answers:
                    remedy = what_to_do(has_turns) if isinstance(error, SamePromptsError) else ""
                    self._stay_silent(step, scope, f"{error}{remedy}")
                continue
            self._silent.pop(scope, None)
            metrics |= self.ema[scope].update(metrics)
            self._log({f"mi/{scope}/{key}": value for key, value in (parts | metrics).items()})
            first_turn = measurement or first_turn
            leading = metrics if scope == self.leading_scope else leading
        return leading, first_turn

    def _with_texts(
        self, step: int, measurement: Measurement, trajectories: Trajectories, rewards: torch.Tensor
    ) -> SavedMeasurement:
        decode: Callable[..., Any] = self.trainer._tokenizer.decode  # a string for ids of one text
        judged = self._judgement
        return SavedMeasurement.of(
            step,
            measurement,
            [trajectories.first_context(i) for i in measurement.columns],
            [trajectories[i][0].reasoning for i in measurement.trajectories],
            decode,
            None if judged is None or judged.evidence.step != step else judged.regime,
            rewards,
        )

    def _follow(self, step: int, metrics: dict[str, float], valid_rate: float) -> None:
        self.evidence.append(
            evidence_of(self.trainer, step, metrics, valid_rate, [one.beside for one in self._measured])
        )
        judgements = judge(self.evidence)
        self._judgement = judgements[-1]
        self._log(regime_flags(self._judgement))
        if not begins(judgements):
            return
        finding = reasoning_finding(judgements, step)
        logger.warning(f"Step {step}: {finding.text} ({finding.figures})")
        if finding.name == "template_collapse" and self.stop_on is not None:
            step = self.trainer.state.global_step + 1
            logger.warning(f"Training stops after step {step}: stop_on={self.stop_on!r}.")
            self._stop = True

    def _log_validity(self, trajectories: list[list[Turn]]) -> float:
        turns = [turn for trajectory in trajectories for turn in trajectory]
        valid_rate = sum(turn.valid for turn in turns) / max(1, len(turns))
        without = sum(not any(turn.reasoning for turn in trajectory) for trajectory in trajectories)
        self._log({"mi/valid_thinking_rate": valid_rate, "mi/completions_without_reasoning": float(without)})
        return valid_rate

    def _stay_silent(self, step: int, what: str, reason: str) -> None:
        """Say why, once until it can be measured again."""
        if what not in self._silent:
            logger.warning(f"Step {step}: mutual information ({what}) is not measured: {reason}.")
        self._silent[what] = reason
        self._save_state()

    def _log(self, metrics: dict[str, float]) -> None:
        log_row(self.trainer, metrics, replace=True)  # one measurement and no mean over a row's

    def _forget_row(self) -> None:
        forget_in_row(self.trainer, "mi/")

    def _save_state(self) -> None:
        """Into the trainer's state, which every checkpoint writes."""
        reasons = dict.fromkeys(self._silent.values())
        if self._asked is not None:
            reasons[f"a measurement takes {self.min_prompts} prompts, and {self._pool.num_prompts} are sampled"] = None
        elif self.last_step is None:
            reasons[self.cadence.why_not_yet] = None
        self.trainer.state.stateful_callbacks[MI_STATE] = {
            "watch": {"measurements": [asdict(one) for one in self.evidence]},
            "ema": {scope: dict(ema.values) for scope, ema in self.ema.items()},
            "last_step": self.last_step,
            "asked": self._asked,
            "silence": "; ".join(reasons),
        }


# When, and what


@dataclass(frozen=True)
class Cadence:
    """Multiples of `every`, or logging steps that lie at least `MIN_STEPS_BETWEEN` apart.

    Args:
        trainer: In whose run they are.
        every: See `MutualInformationCallback`.
    """

    trainer: StockTrainer
    every: int | None

    def asks(self, step: int, last: int | None) -> bool:
        """Whether an optimizer step asks for a measurement, after the step `last` that asked for the latest."""
        if last is not None and step <= last:
            return False
        if self.every is not None:
            return step % self.every == 0
        if last is not None and step < last + MIN_STEPS_BETWEEN:
            return False
        args = self.trainer.args
        first = step == 1 and args.logging_first_step
        at_logging_step = args.logging_strategy == "steps" and step % max(1, self.trainer.state.logging_steps) == 0
        return first or at_logging_step or args.logging_strategy == "epoch"

    @property
    def generations_between(self) -> float:
        """Generations for training from one measurement to the next, about."""
        args = self.trainer.args
        logging_steps = self.trainer.state.logging_steps if args.logging_strategy == "steps" else 0
        steps = self.every or max(MIN_STEPS_BETWEEN, logging_steps)
        return max(1.0, steps / self._steps_of_a_generation)

    @property
    def _steps_of_a_generation(self) -> float:
        args = self.trainer.args
        return args.steps_per_generation * self.trainer.num_iterations / args.gradient_accumulation_steps

    def due_step(self, last: int | None) -> int | None:
        """The optimizer step that asks for a measurement of the completions that come next, if one does."""
        done = self.trainer.state.global_step
        steps = range(done + 1, done + ceil(self._steps_of_a_generation) + 1)
        return next((step for step in steps if self.asks(step, last)), None)

    def why_never(self, last: int | None) -> str | None:
        """Why none of the steps that are left asks for the first measurement; `None` if one does, or has done so."""
        state = self.trainer.state
        to_come = range(state.global_step + 1, state.max_steps + 1)
        if last is not None or any(self.asks(step, last) for step in to_come):
            return None
        return f"none of the {state.max_steps} optimizer steps asks for it ({self._settings})"

    @property
    def _settings(self) -> str:
        if self.every is not None:
            return f"every={self.every}"
        strategy = self.trainer.args.logging_strategy
        steps = f", logging_steps={self.trainer.state.logging_steps}" if strategy == "steps" else ""
        return f"logging_strategy={strategy.value!r}{steps}"

    @property
    def why_not_yet(self) -> str:
        return f"no optimizer step so far has asked for it ({self._settings})"


def logged_beside(trainer: StockTrainer) -> dict[str, float]:
    """What a trainer has logged of the completions that it has just sampled, and a verdict needs to know of them."""
    latest = {key: values[-1] for key, values in trainer._metrics["train"].items() if values}
    success = next((latest[key] for key in latest if key.startswith("env/") and key.endswith("/success")), None)
    beside = {"success": success, "clipped_ratio": latest.get("completions/clipped_ratio")}
    return {name: value for name, value in beside.items() if value is not None}


def evidence_of(
    trainer: StockTrainer,
    step: int,
    metrics: Mapping[str, float],
    valid_rate: float,
    beside: Sequence[Mapping[str, float]],
) -> Evidence:
    """A measurement, with what the trainer has logged of the completions that were measured.

    Args:
        trainer: During the optimizer step `step`.
        metrics: From `information_metrics`.
        valid_rate: Share of turns whose reasoning is closed by a tag.
        beside: Of each generation that was measured, `logged_beside`; they have as many completions each.
    """
    empty = getattr(trainer, "_empty_steps", None)  # of our trainer, where not every step has an update
    known = {name: [one[name] for one in beside if name in one] for name in ("success", "clipped_ratio")}
    return Evidence.of(
        metrics,
        step=step,
        updates=trainer.state.global_step - (empty.empty_steps if empty else 0),
        valid_thinking_rate=valid_rate,
        **{name: fmean(values) for name, values in known.items() if values},
    )


# Of a trajectory's single positions, only what tells them apart.
PER_POSITION = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "conditional_entropy_token", "num_completions")
# The metrics that stay meaningful when the model's earlier words are left out of the contexts.
WITHOUT_OWN_WORDS = ("retrieval_accuracy", "retrieval_chance", "num_completions")


def measure_scope(scope: str, *arguments: Any) -> tuple[dict[str, float], dict[str, float], Measurement | None]:
    """Measures one scope.

    Args:
        scope: `first_turn` or `trajectory`.
        *arguments: of `measure_first_turn` and its siblings.

    Returns:
        The metrics of the scope, further ones of its parts by their names within the scope, and the measurement where
        it is of first turns.

    Raises:
        NotMeasurableError: Where there is nothing to measure.
    """
    if scope == "first_turn":
        measurement = measure_first_turn(*arguments)
        return measurement.metrics, {}, measurement
    by_position = measure_trajectory(*arguments)
    parts = {
        f"turn_{position + 1}/{key}": measurement.metrics[key]
        for position, measurement in by_position.items()
        for key in PER_POSITION
    }
    retold = [one.without_own_words for one in by_position.values() if one.without_own_words]
    if retold:
        without = combine(retold)
        parts |= {f"without_own_words/{name}": without[name] for name in WITHOUT_OWN_WORDS}
    return combine(list(by_position.values())), parts, None


def what_to_do(has_turns: bool) -> str:
    """What makes a game measurable whose rows all share one prompt."""
    later = (
        "MutualInformationCallback(trainer, scopes=('trajectory', 'answer')) measures from the first observation on; "
        "for first turns, too, "
    )
    return (
        f". What would change that: {later if has_turns else ''}let reset() of the environment return the first "
        "observation, which TRL appends to the prompt, or give each row of train_dataset a prompt of its own"
    )


def group_metrics(rollout: Rollout) -> dict[str, float]:
    """Why groups have no reward variance: shares of all groups, under `mi/groups/`.

    `identical_completions`: all G are the same ids. `equal_rewards`: completions differ and their rewards do not.
    `zero_variance`: rewards do not vary, for either reason.
    """
    size = rollout.group_size
    episodes = zip(rollout.completion_ids, rollout.turn_samples, strict=True)
    texts = [(*map(tuple, [ids, *(sample["completion_ids"] for sample in samples)]),) for ids, samples in episodes]
    identical = torch.tensor([len(set(texts[i : i + size])) == 1 for i in range(0, len(texts), size)])
    constant = zero_variance(rollout.rewards)
    return {
        "mi/groups/identical_completions": identical.float().mean().item(),
        "mi/groups/equal_rewards": (constant & ~identical).float().mean().item(),
        "mi/groups/zero_variance": constant.float().mean().item(),
    }


def warn_of_unequal_prompts(rollout: Rollout, groups: list[int]) -> None:
    """Once, of groups that are not the answers to one question."""
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for group, prompt in zip(groups, rollout.prompt_ids, strict=True):
        prompts.setdefault(group, set()).add(tuple(prompt))
    unequal = next((group for group, distinct in prompts.items() if len(distinct) > 1), None)
    if unequal is not None:
        logger.warning_once(
            f"The completions of group {unequal} have {len(prompts[unequal])} different prompts. Each is scored as a "
            "prompt of its own, but advantages within such a group compare answers to different questions."
        )
