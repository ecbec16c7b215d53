"""Held-out tasks are played while a model trains: a curve, the best checkpoint, and an end where nothing is learnt."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ragen2_trl.callbacks.attached import check_own_trainer, is_newest
from ragen2_trl.callbacks.run_record import keep_record, reported
from ragen2_trl.callbacks.trl_play import HeldOutPlay
from ragen2_trl.callbacks.whole_model import model_for_generation
from ragen2_trl.envs import Environment
from ragen2_trl.envs.random_baseline import random_success
from ragen2_trl.failures import check_failed
from ragen2_trl.record.files import EPISODES, EVALUATION
from ragen2_trl.record.held_out import LOGGED, curves_of
from ragen2_trl.record.saved_episodes import PlayedEpisode, episodes_of, save_episodes
from ragen2_trl.rollout_events import forget_in_row, log_row, refuse_asynchronous, sampling_events
from ragen2_trl.rollouts.outcomes import outcomes_of, summarize
from ragen2_trl.rollouts.sampling import check_sampling, held_out_rows, play_rows

logger = get_logger(__name__)

Episodes: TypeAlias = list[PlayedEpisode | None]  # `None` where one has failed

SECONDS = "eval_seconds"  # log key of what evaluating cost


class EnvironmentEvalCallback(TrainerCallback):
    """
    Plays the same held-out tasks before the first step, at every `every` optimizer steps and after the last one.

    The tasks come from our environments, or are held-out rows for TRL's own contracts: the trainer plays them with its
    `environment_factory`, `tools` or `rollout_func`, or in one turn, and scores them with its reward functions. For
    such rows, `return` is the weighted reward sum, 0 if no function gives a number. An episode succeeds if a reward
    function logs so (`log_extra("success", [1.0, 0.0, …])`). If none does, success is a reward of at least 1.0 from
    the environment's `get_reward`, or else from the first reward function.

    Success, return and pass@k with 95 % intervals, and the other numbers of `ragen2-trl evaluate`, are in the log row
    of that step under `eval/env/<task>/`, in `log_history` and in trackers; a row that logging would have left out is
    logged for them. Model card and report draw the curve. Training is left bit-identical: random states, modes and
    gradients are as before. Exceptions in an evaluation end the training. A resumed run goes on with the curve.

    Whenever success is the best so far, a checkpoint is saved that `save_total_limit` leaves alone. transformers'
    `metric_for_best_model` may name another metric, such as `eval/env/sokoban/pass@4`. Of equals, the earliest is the
    best; the model that training begins with has no checkpoint.

    Episodes are saved as `_episodes/evaluation_<step>.jsonl` in `output_dir`, for `ragen2-trl report`.
    Our environments are played by the model that trains, also where the trainer samples with vLLM. Rows of `dataset`
    are played by vLLM there, and its random state moves on. On several processes each plays its share.

    Args:
        env ([`~ragen2_trl.envs.Environment`] or a sequence of them, an `environment_factory`, or reward functions):
            The tasks, in text, in one turn or several. The first one tells which checkpoint is best. With `dataset`,
            the trainer's `environment_factory`, or some of its reward functions, which then decide on success.
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`], or a subclass):
            The trainer that the callback is then added to. Of several such callbacks on it the newest evaluates.
        every (`int`, *optional*, defaults to `10`):
            Optimizer steps between evaluations.
        num_prompts, num_samples (`int`, *optional*, default to `256` and `4`):
            Held-out tasks of each environment (split `"test"`; of `dataset`, all rows if there are fewer), and
            completions for each.
        temperature (`float`, *optional*, defaults to `0.5`):
            Of the sampling, as in the paper; 0 is greedy, with `num_samples=1` and without `dataset`.
        seed (`int`, *optional*, defaults to `0`):
            Of the tasks and of the sampling.
        data (`str`, *optional*):
            Where the tasks of the first environment come from; default: its own source.
        max_new_tokens (`int`, *optional*):
            Longest completion in tokens, all turns included; default: the trainer's `max_completion_length`.
        max_turn_tokens (`int`, *optional*):
            Longest turn in tokens.
        batch_size (`int`, *optional*):
            Completions generated at once on a process; default: as many as the trainer samples.
        keep_best (`bool`, *optional*, defaults to `True`):
            Save a checkpoint at each new best; not with `save_strategy="no"`.
        load_best (`bool`, *optional*, defaults to `False`):
            End training with the weights of the best checkpoint: transformers' `load_best_model_at_end`, which a
            configuration refuses where transformers does not evaluate.
        stop_below (`float`, *optional*):
            End training after `stop_patience` evaluations in a row, that before the first step not counted, with a
            success of the first environment below it.
        stop_patience (`int`, *optional*, defaults to `5`):
            The paper ends runs below 0.01 five times in a row.
        context_options (`dict`, *optional*):
            What of an episode a turn is sampled from, as `TextRollout` takes it: `context`, `context_turns` and
            `drop_oldest_turns`.
        dataset ([`~datasets.Dataset`], *optional*):
            Held-out rows with the columns of `train_dataset`, if `env` is a factory or reward functions. `data`,
            `max_turn_tokens` and `context_options` are for our environments only.

    Raises:
        TypeError: if `env` is neither an environment nor the trainer's own factory or reward functions.
        ValueError: for a setting outside its range, and if there are fewer held-out tasks than `num_prompts`.

    Example:

    ```python
    >>> from ragen2_trl import EnvironmentEvalCallback

    >>> trainer.add_callback(EnvironmentEvalCallback(env, trainer, every=10))  # doctest: +SKIP
    >>> trainer.add_callback(EnvironmentEvalCallback(GuessEnv, trainer, dataset=held_out))  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        env: Environment | Sequence[Environment] | Any,
        trainer: Any,
        every: int = 10,
        num_prompts: int = 256,
        num_samples: int = 4,
        temperature: float = 0.5,
        seed: int = 0,
        data: str | None = None,
        max_new_tokens: int | None = None,
        max_turn_tokens: int | None = None,
        batch_size: int | None = None,
        keep_best: bool = True,
        load_best: bool = False,
        stop_below: float | None = None,
        stop_patience: int = 5,
        context_options: dict[str, Any] | None = None,
        dataset: Dataset | None = None,
    ):
        for name, value in (("every", every), ("stop_patience", stop_patience)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if stop_below is not None and not 0 < stop_below <= 1:
            raise ValueError(f"stop_below must be above 0 and at most 1, or None, got {stop_below!r}")
        envs = [env] if isinstance(env, Environment) else list(env) if isinstance(env, Sequence) else []
        is_ours = bool(envs) and all(isinstance(one, Environment) for one in envs)
        others: dict[str, Any] = {"data": data, "max_turn_tokens": max_turn_tokens, "context_options": context_options}
        played = "an Environment, which has its own tasks" if is_ours else "not an Environment"
        for name, given in ({"dataset": dataset} if is_ours else others).items():
            if given is not None:
                raise ValueError(f"{name} must be None when env is {played}, got {given!r:.60}")
        args = trainer.args
        refuse_asynchronous(trainer, "EnvironmentEvalCallback")
        self.trainer = trainer
        self.every = every
        self.num_samples = num_samples
        self.seed = seed
        self.max_turn_tokens = max_turn_tokens
        self.sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens or args.max_completion_length,
            "batch_size": batch_size or max(1, args.generation_batch_size // trainer.accelerator.num_processes),
        }
        self.tasks: dict[str, tuple[Environment, Dataset]] = {}
        self.by_trainer: HeldOutPlay | None = None  # where the trainer itself plays
        if is_ours:
            for one in envs:
                check_sampling(one, num_samples, **self.sampling)
            for number, (name, one) in enumerate(zip(task_names(envs), envs, strict=True)):
                rows = held_out_rows(one, num_prompts, num_samples, seed, None if number else data)
                self.tasks[name] = one, rows
        else:
            numbers = {"num_prompts": num_prompts, "num_samples": num_samples, "seed": seed}
            self.by_trainer = HeldOutPlay(sampling_events(trainer), env, dataset, **numbers, **self.sampling)
        self.keep_best = keep_best and args.save_strategy != "no"
        self.load_best = load_best
        self.stop_below, self.stop_patience = stop_below, stop_patience
        self.best_task, self.best_metric, self._best_sign = self._what_is_best()
        self.context_options = context_options
        self._random_baselines: dict[str, dict[str, float]] = {}
        self._pending: list[str] = []  # keys of an evaluation whose row is not logged yet
        if trainer.use_vllm and is_ours:
            logger.warning("Held-out tasks are sampled by transformers, from the model that trains, and not by vLLM.")
        keep_record(trainer)
        if load_best:
            trainer.args.load_best_model_at_end = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_own_trainer(self, self.trainer, state)
        if not is_newest(self, self.trainer):
            return
        for key in self._pending:  # of a step that was interrupted
            forget_in_row(self.trainer, key)
        self._pending = []
        if self.task_names[0] not in curves_of(state.log_history):
            values = self._evaluate()
            # TRL's own `log` would save the completions of a step as well.
            Trainer.log(self.trainer, values)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if not is_newest(self, self.trainer):
            return
        if step % self.every and step < state.max_steps and not control.should_training_stop:
            return
        values = self._evaluate()
        log_row(self.trainer, values)
        control.should_log = True
        self._note_best(state, control, values[f"{LOGGED}{self.best_task}/{self.best_metric}"])
        if self.stop_below is not None:
            self._stop_if_below(self.stop_below, state, control, values)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Trackers have had the row; in the history it gets the names that they show."""
        row = state.log_history[-1]
        if self._pending and self._pending[0] in row:
            for key in self._pending:
                row[key.replace("_", "/", 1)] = row.pop(key)
            self._pending = []

    @property
    def task_names(self) -> list[str]:
        """Task names as they are in log keys."""
        return list(self.tasks if self.by_trainer is None else self.by_trainer.tasks)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The metrics of each task, as `ragen2-trl evaluate` has them. A call for all processes together."""
        if self.by_trainer is not None:
            played = {name: self.by_trainer.play(rows) for name, rows in self.by_trainer.tasks.items()}
        else:
            played = self._play_all()
        self._save(list(played.values()))
        metrics = {name: summarize(self.num_samples, **columns) for name, (columns, _) in played.items()}
        return {name: values | self._random_baseline(name) for name, values in metrics.items()}

    def _play_all(self) -> dict[str, tuple[dict[str, list[float]], Episodes]]:
        """The tasks of our environments."""
        with model_for_generation(self.trainer) as model:
            return {name: self._play(model, env, rows) for name, (env, rows) in self.tasks.items()}

    def _random_baseline(self, name: str) -> dict[str, float]:
        """What success has to be compared with; the tasks are the same each time."""
        if name in self.tasks and name not in self._random_baselines:
            self._random_baselines[name] = random_success(*self.tasks[name], self.num_samples)
        return self._random_baselines.get(name, {})

    def _evaluate(self) -> dict[str, float]:
        """What is logged of an evaluation."""
        started = time.perf_counter()
        values = {
            f"{LOGGED}{task}/{name}": value
            for task, metrics in self.evaluate().items()
            for name, value in metrics.items()
        }
        values[SECONDS] = time.perf_counter() - started
        self._pending = list(values)
        return values

    def _play(self, model: Any, env: Environment, rows: Dataset) -> tuple[dict[str, list[float]], Episodes]:
        """What came of each row, on all processes, and the episodes."""
        accelerator = self.trainer.accelerator
        processes, me = accelerator.num_processes, accelerator.process_index
        own = list(range(me, len(rows), processes))
        # As many on each process, since generation may need all of them; nobody looks at what fills up.
        filled = own + [0] * (ceil(len(rows) / processes) - len(own))
        alone = processes == 1
        trajectories = play_rows(
            model,
            self.trainer._tokenizer,
            env,
            rows.select(filled),
            **self.sampling,
            seed=self.seed if me == 0 else int(np.random.SeedSequence([self.seed, me]).generate_state(1)[0]),
            max_turn_tokens=self.max_turn_tokens,
            chat_template_kwargs=chat_template_of(self.trainer),
            context_options=self.context_options,
            on_played=None if alone else lambda batch, played: None,
            most=int if alone else lambda number: max(gather_object([number])),
        )[: len(own)]
        plays = [trajectory.play for trajectory in trajectories]
        failures = gather_object([play.failure for play in plays])
        failed = [failure for failure in failures if failure]
        check_failed(len(failed), len(failures), next(iter(failed), None))
        columns = outcomes_of(plays)
        columns["completion_length"] = [float(sum(map(len, trajectory.answers))) for trajectory in trajectories]
        shown = rows.select(own)
        played = iter(episodes_of(shown["prompt"][:], shown["seed"][:], plays, self.trainer.state.global_step))
        episodes = [None if play.failure else next(played) for play in plays]
        parts = gather_object([(own, columns, episodes)])
        order = np.argsort([row for numbers, *_ in parts for row in numbers])

        def in_order(values: list[Any]) -> list[Any]:
            return [values[i] for i in order]

        flat = {name: in_order([value for _, part, _ in parts for value in part[name]]) for name in columns}
        return flat, in_order([episode for *_, part in parts for episode in part])

    def _save(self, played: list[tuple[dict[str, list[float]], Episodes]]) -> None:
        """All episodes of an evaluation, groups numbered over processes and tasks, beside those of training."""
        state, episodes = self.trainer.state, [episode for _, part in played for episode in part]
        if not state.is_world_process_zero:
            return
        places = [divmod(number, self.num_samples) for number in range(len(episodes))]
        numbered = [replace(one, group=g, sample=s) for one, (g, s) in zip(episodes, places, strict=True) if one]
        with reported("Saving the evaluated episodes"):
            save_episodes(Path(self.trainer.args.output_dir) / EPISODES, numbered, EVALUATION, state.global_step)

    def _note_best(self, state: Any, control: Any, value: float) -> None:
        """Where transformers keeps the best checkpoint, which it then neither deletes nor forgets."""
        if not self.keep_best:
            return
        if state.best_metric is not None and self._best_sign * (value - state.best_metric) <= 0:
            return
        folder = Path(self.trainer._get_output_dir(trial=None))
        state.best_metric, state.best_global_step = value, state.global_step
        state.best_model_checkpoint = str(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        control.should_save = True

    def _stop_if_below(self, bound: float, state: Any, control: Any, values: dict[str, float]) -> None:
        task = self.task_names[0]
        curve = curves_of(state.log_history).get(task)
        before = [point.success for point in curve.points if point.step > 0] if curve else []
        latest = [*before, values[f"{LOGGED}{task}/success"]][-self.stop_patience :]
        if len(latest) == self.stop_patience and max(latest) < bound:
            control.should_training_stop = True
            logger.warning(
                f"Training stops after step {state.global_step}: held-out success on {task} was below "
                f"{bound:.1%} in {self.stop_patience} evaluations in a row (now {latest[-1]:.1%})."
            )

    def _what_is_best(self) -> tuple[str, str, int]:
        """Task and metric by which the best checkpoint is told, and 1 where more is better, -1 where less is."""
        args, first = self.trainer.args, self.task_names[0]
        if self.load_best and not self.keep_best:
            raise ValueError(
                "load_best=True needs keep_best=True and save_strategy 'steps', 'epoch' or 'best'; save_strategy is "
                f"{args.save_strategy.value!r}."
            )
        sharded = "DeepSpeed" if self.trainer.is_deepspeed_enabled else "FSDP" * self.trainer.is_fsdp_enabled
        if self.load_best and args.save_only_model and sharded:  # transformers has checked before this was asked for
            raise ValueError(
                f"load_best=True cannot load checkpoints of save_only_model=True with {sharded}; set either to False."
            )
        named = args.metric_for_best_model
        if self.keep_best and args.eval_strategy != "no" and named is not None:
            raise ValueError(
                f"eval_strategy={args.eval_strategy.value!r} also looks up metric_for_best_model={named!r}; allowed "
                "with keep_best=True: 'no'."
            )
        if named in (None, "loss", "eval_loss"):  # which transformers fills in where there is nothing
            return first, "success", 1
        task, _, metric = re.sub("^(eval[/_])?env/", "", named).partition("/")
        metrics = ["success", "return", *(["valid_rate"] if self.tasks else []), "turns", "completion_length"]
        metrics += [f"pass@{2**k}" for k in range(self.num_samples.bit_length())]
        if self.keep_best and (task not in self.task_names or metric not in metrics):
            raise ValueError(
                f"metric_for_best_model={named!r} is not evaluated; allowed: eval/env/<task>/<metric> with a task of "
                f"{self.task_names} and a metric of {metrics}."
            )
        return task, metric, 1 if args.greater_is_better else -1


def task_names(envs: Sequence[Environment]) -> list[str]:
    """Names for log keys: that of the task, with its options where an earlier one has the same name.

    Raises:
        ValueError: If two environments are the same.
    """
    names: list[str] = []
    kinds = [(env.name, ",".join(f"{name}={value}" for name, value in env.options.items())) for env in envs]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"env must be different tasks, or the same with different options, got {kinds}")
    for name, options in kinds:
        names.append(f"{name}:{options or 'default'}".replace("/", "_") if name in names else name)
    return names


def chat_template_of(trainer: Any) -> dict[str, Any]:
    """What a trainer hands to its chat template; TRL's RLOO has none of its own and takes the tokenizer's."""
    own = {"chat_template": trainer.chat_template} if hasattr(trainer, "chat_template") else {}
    return {**own, **trainer.chat_template_kwargs}
