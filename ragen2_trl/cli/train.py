"""Train a model on an environment with SNR-filtered GRPO, RLOO or PPO.

    ragen2-trl train --recipe frozen_lake_tiny
    ragen2-trl train --model Qwen/Qwen2.5-0.5B-Instruct --env_name frozen_lake --env_args size=5 slip=0.1

    ragen2-trl train --recipe frozen_lake_tiny_ppo

Takes the arguments below together with those of `SNRFilteredGRPOConfig`, or of the algorithm that `--algo` names, and
of `trl.ModelConfig`. A run lives in `runs/<run_name>/`: the model, `log_history.json`, `summary.json` and
`training.png`, and checkpoints while it lasts.
"""

import argparse
import shutil
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from ragen2_trl.callbacks import (
    EnvironmentEvalCallback,
    EpisodeCallback,
    MutualInformationCallback,
    TrainingProgressCallback,
)
from ragen2_trl.callbacks.cost import count_cost
from ragen2_trl.callbacks.environment_eval import chat_template_of
from ragen2_trl.callbacks.run_record import keep_record
from ragen2_trl.cli.arguments import TrainArguments
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.evaluate import evaluate_model
from ragen2_trl.cli.models import check_model, loading, options_of_model
from ragen2_trl.cli.typed import InputError, checked_input, config_files, parse, parser_of, read_configs
from ragen2_trl.columns import ALL_TASKS
from ragen2_trl.envs import Environment
from ragen2_trl.envs.mixture import AnyTask, TaskMixture
from ragen2_trl.filtering import check_choice
from ragen2_trl.messages import Stopped, stopped_by_signals
from ragen2_trl.record.facts import summary
from ragen2_trl.record.files import (
    DIAGNOSTICS,
    EPISODES,
    MEASUREMENTS,
    OUTCOMES,
    write_json,
)
from ragen2_trl.record.lock import alone_in
from ragen2_trl.record.run import run_of
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.rollouts.sampling import held_out_rows
from ragen2_trl.saved_state import replace_whole
from ragen2_trl.tiny import resolve_model
from ragen2_trl.trainers import (
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
    SNRFilteredRLOOConfig,
    SNRFilteredRLOOTrainer,
)
from ragen2_trl.trainers.backends import check_backend
from ragen2_trl.trainers.checkpoints import check_complete, last_complete_checkpoint
from ragen2_trl.trainers.checks import check_enough_prompts
from ragen2_trl.trainers.filtered import SNRFilter

Config: TypeAlias = SNRFilteredGRPOConfig | SNRFilteredRLOOConfig | SNRFilteredPPOConfig | GRPOConfig
Trainer: TypeAlias = SNRFilteredGRPOTrainer | SNRFilteredRLOOTrainer | SNRFilteredPPOTrainer | GRPOTrainer

logger = get_logger(__name__)

ALGORITHMS: dict[str, tuple[type[Trainer], type[Config]]] = {
    "grpo": (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig),
    "rloo": (SNRFilteredRLOOTrainer, SNRFilteredRLOOConfig),
    "ppo": (SNRFilteredPPOTrainer, SNRFilteredPPOConfig),
    "trl_grpo": (GRPOTrainer, SNRFilteredGRPOConfig),  # TRL's own, to compare with: `without_filter`
}


def main(args: list[str] | None = None) -> None:
    """Train, evaluate before and after, and leave model, logs, plot and summary in the run's folder."""
    with stopped_by_signals(), ExitStack() as held:
        _main(args, held)


def _main(args: list[str] | None, held: ExitStack) -> None:
    console = make_console()
    with checked_input():
        algorithm = algorithm_of(args)
        trainer_class, config_class = ALGORITHMS[algorithm]
    parser = parser_of("train", TrainArguments, config_class, ModelConfig)
    script_args, training_args, model_args = _parse(parser, args)
    if algorithm == "trl_grpo" and (unused := without_filter(training_args)):
        console.print(f"algo=trl_grpo has no filter: {', '.join(unused)} are left out.", highlight=False)
    with checked_input():
        env = script_args.make_env()
        if script_args.context != "full" and not env.needs_rollout:
            raise ValueError(f"context={script_args.context!r} needs a task of several turns in text, got {env.name}")
        eval_envs = script_args.make_eval_envs(env)
        run = _run_folder(script_args, training_args)
    with training_args.main_process_first(local=False), checked_input():
        if training_args.process_index == 0:
            held.enter_context(alone_in(run))
        checkpoint = checkpoint_to_resume(run, script_args, training_args)
    trainer = _make_trainer(trainer_class, script_args, training_args, model_args, env)
    if checkpoint is not None:
        with checked_input():
            check_backend(checkpoint, trainer.accelerator)
    progress = TrainingProgressCallback(trainer, console, quiet=True)
    trainer.add_callback(progress)
    if script_args.has_curve:
        with checked_input():
            trainer.add_callback(_held_out_curve(trainer, eval_envs, script_args))
    if trainer.is_world_process_zero():
        console.print(Text(f"{script_args.model} on {env.name}, in {run}"))
        turns = env.max_turns * (script_args.max_turn_tokens or env.max_turn_tokens or 0)
        if turns > (longest := training_args.max_completion_length):
            console.print(f"Episodes are cut at max_completion_length={longest}; {turns} hold all turns of the task.")

    _evaluate(trainer, env, script_args, run / "evaluation_before.json", console)
    named = training_args.resume_from_checkpoint is not None  # and would win over the last one again
    again = f"the same command with `{'--resume_from_checkpoint' if named else '--resume true'}`"
    if isinstance(trainer, SNRFilter):
        trainer.how_to_resume = again
    try:
        _train(trainer, checkpoint)
    except KeyboardInterrupt as stopped:
        progress.close()
        _write_history(trainer, env, run, script_args.figures)
        trainer.create_model_card(run.resolve().name)  # how far it got, and not the last checkpoint
        last = last_complete_checkpoint(run)
        by = f" by {stopped}" if isinstance(stopped, Stopped) else ""
        console.print(
            f"Interrupted{by} at step {trainer.state.global_step}; last complete checkpoint: {last or 'none'}."
        )
        console.print(f"To go on from there: {again}.")
        sys.exit(stopped.code if isinstance(stopped, Stopped) else 130)
    except Exception as error:  # ours tell by themselves
        told = isinstance(trainer, SNRFilter) or not trainer.state.global_step
        if not told and (last := last_complete_checkpoint(run)) is not None:
            error.add_note(f"To go on from {last}: {again}.")
        raise
    finally:
        progress.close()
    trainer.save_model(_internal_call=True)  # the upload comes last: one that is refused costs nothing of a run
    _write_history(trainer, env, run, script_args.figures)
    _evaluate(trainer, env, script_args, run / "evaluation_after.json", console, again=True)
    if trainer.is_world_process_zero():
        write_json(run / "summary.json", summary(run_of(trainer)), indent=2)
        progress.show_table(f"{script_args.model} on {env.name}")
        files = ["Model", "log_history.json", "summary.json", *(["training.png"] if script_args.figures else [])]
        console.print(f"{', '.join(files[:-1])} and {files[-1]} are in {run}", highlight=False, markup=False)
    on_hub = script_args.data is not None and not Path(script_args.data).exists()
    card: dict[str, Any] = {"dataset_name": script_args.data if on_hub else None}
    if training_args.push_to_hub:
        try:
            trainer.push_to_hub(**card)
        except Exception as error:
            logger.debug("The upload", exc_info=True)
            lines = getattr(error, "__notes__", [f"{type(error).__name__}: {error}"])
            raise SystemExit("\n".join(lines)) from None
    else:
        trainer.create_model_card(run.resolve().name, **card)


def algorithm_of(args: list[str] | None) -> str:
    """What `algo` names, on the command line or in the file of `--config`: it says what else can be set."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--algo")
    named, _ = early.parse_known_args(args)
    files, _ = config_files(sys.argv[1:] if args is None else args)
    algo: str = named.algo or read_configs(files).get("algo", "grpo")
    check_choice("algo", algo, tuple(ALGORITHMS))
    return algo


def without_filter(args: GRPOConfig) -> list[str]:
    """Makes a configuration with the filter's settings TRL's own; gives those that had been set.

    A recipe serves for its control then: `--algo trl_grpo` is the only difference.
    """
    settings = [setting for setting in fields(args) if setting.name.startswith("snr_")]
    used = [setting.name for setting in settings if getattr(args, setting.name) != setting.default]
    for setting in settings:
        vars(args).pop(setting.name)
    args.__class__ = GRPOConfig  # a new instance would check and derive again what this one has
    return used


def _parse(parser: TrlParser, args: list[str] | None) -> tuple[Any, ...]:
    try:
        return parse(parser, args)
    except InputError as error:
        if "load_best_model_at_end requires" not in str(error):
            raise
        raise InputError(
            "load_best_model_at_end=True asks transformers to evaluate; allowed: --load_best true with --eval_every, "
            "which loads the best checkpoint by held-out success."
        ) from error


def _run_folder(script_args: TrainArguments, training_args: Config) -> Path:
    if training_args.eval_strategy != "no":
        given = IntervalStrategy(training_args.eval_strategy).value
        raise ValueError(
            f"eval_strategy={given!r} evaluates on a dataset, not on tasks; allowed: 'no', and --eval_every 10 for "
            "held-out success every 10 steps."
        )
    model = check_model(script_args.model)
    if training_args.output_dir == "trainer_output":  # transformers' default
        name = training_args.run_name or f"{script_args.env_name.replace(',', '-')}-{model.rstrip('/').split('/')[-1]}"
        training_args.output_dir = str(Path("runs") / name)
    return Path(str(training_args.output_dir))


def checkpoint_to_resume(run: Path, script_args: TrainArguments, training_args: TrainingArguments) -> Path | None:
    """Where training begins, in a folder without outcomes of an earlier one."""
    checkpoint = _find_checkpoint(run, script_args, training_args)
    for name in OUTCOMES:
        (run / name).unlink(missing_ok=True)
    return checkpoint


def _find_checkpoint(run: Path, script_args: TrainArguments, training_args: TrainingArguments) -> Path | None:
    if training_args.resume_from_checkpoint is not None:
        return check_complete(Path(training_args.resume_from_checkpoint))
    if script_args.resume:
        return last_complete_checkpoint(run)
    leftovers = [*run.glob("checkpoint-*"), *run.glob("evaluation_*.json")]
    if leftovers and not script_args.overwrite:
        raise ValueError(
            f"output_dir={str(run)!r} holds {leftovers[0].name} of an earlier run; allowed: --resume true to continue "
            "it, --overwrite true to replace it, or another --run_name."
        )
    for name in (MEASUREMENTS, EPISODES, DIAGNOSTICS, "completions", "*.safetensors", "*.safetensors.index.json"):
        leftovers += run.glob(name)  # none of it, and no weights, beside those of the run that begins
    for leftover in leftovers:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return None


def _make_trainer(
    trainer_class: type[Trainer],
    script_args: TrainArguments,
    training_args: Config,
    model_args: ModelConfig,
    env: AnyTask,
) -> Trainer:
    options_of_model(training_args, model_args)
    training_args.disable_tqdm = True  # the progress of this command takes its place
    if training_args.num_completions_to_print is None:
        training_args.num_completions_to_print = 0  # log_completions saves them; a wall of them would bury the line
    rollout = {}
    if env.needs_rollout:
        with checked_input():
            plays = TextRollout(env, script_args.max_turn_tokens, **script_args.context_options)
            plays.check_trainer(trainer_class)
        rollout = {"rollout_func": plays}
    with checked_input():
        model = resolve_model(str(script_args.model))
        tasks = env.dataset(script_args.num_prompts, training_args.seed, data=script_args.data)
        check_enough_prompts(tasks, training_args)
    make: Any = trainer_class  # each takes the configuration of its own algorithm
    with loading(str(script_args.model)):
        trainer: Trainer = make(
            model,
            env.reward_funcs,
            training_args,
            tasks,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            **rollout,
        )
    if rollout and not isinstance(trainer, SNRFilter):  # ours attach what plays
        plays.attach(trainer)
    keep_record(trainer).draws = script_args.figures
    trainer.remove_callback(PrinterCallback)
    count_cost(trainer)
    if script_args.mutual_information:
        trainer.add_callback(MutualInformationCallback(trainer, every=script_args.mi_every))
    if script_args.episodes_every > 0:
        trainer.add_callback(EpisodeCallback(trainer, script_args.episodes_every))
    return trainer


def _held_out_curve(trainer: Trainer, envs: list[Environment], script_args: TrainArguments) -> EnvironmentEvalCallback:
    return EnvironmentEvalCallback(
        envs,
        trainer,
        every=script_args.eval_every,
        num_prompts=script_args.eval_prompts,
        num_samples=script_args.eval_samples,
        temperature=script_args.eval_temperature,
        data=script_args.data,
        max_turn_tokens=script_args.max_turn_tokens,
        load_best=script_args.load_best,
        stop_below=script_args.stop_below,
        stop_patience=script_args.stop_patience,
        context_options=script_args.context_options,
    )


def _train(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train, from `checkpoint` if there is one; a checkpoint of the last step is loaded and left as it is."""
    args: Any = trainer.args
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if 0 < args.max_steps <= state.global_step:
            # A run killed after its last step. `Trainer.train` looks at max_steps only after one step more.
            trainer._load_from_checkpoint(str(checkpoint))
            trainer.state = state
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                trainer._load_best_model()
            return
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _success_metric(env: AnyTask) -> str:
    return f"env/{ALL_TASKS if isinstance(env, TaskMixture) else env.name}/success"


def _evaluate(
    trainer: Trainer, env: AnyTask, script_args: TrainArguments, path: Path, console: Console, again: bool = False
) -> None:
    """Writes metrics on held-out tasks into `path`, unless a resumed run has measured them before."""
    if script_args.has_curve or (path.exists() and not again):  # the curve has both
        return
    if script_args.eval_prompts == 0 or trainer.accelerator.num_processes > 1 or env.shows_images:
        # A sharded model cannot generate on one process: `ragen2-trl evaluate` measures it afterwards. It does not
        # show pictures, though.
        return
    if not again:
        with checked_input():  # fewer tasks than asked for are told in a line
            held_out_rows(env, script_args.eval_prompts, script_args.eval_samples, 0, script_args.data)
    args: Any = trainer.args
    model: Any = trainer.model
    if not console.is_terminal:  # where no bar tells what takes the time
        console.print(f"Evaluating {'after' if again else 'before'} training, on {script_args.eval_prompts} tasks.")
    metrics = evaluate_model(
        model,
        trainer._tokenizer,
        env,
        num_prompts=script_args.eval_prompts,
        num_samples=script_args.eval_samples,
        temperature=args.temperature,
        max_new_tokens=args.max_completion_length,
        data=script_args.data,
        max_turn_tokens=script_args.max_turn_tokens,
        chat_template_kwargs=chat_template_of(trainer),
        context_options=script_args.context_options,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, metrics, indent=2)


def _write_history(trainer: Trainer, env: AnyTask, run: Path, with_figure: bool) -> None:
    if not trainer.is_world_process_zero():
        return
    history = trainer.state.log_history
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "log_history.json", history, indent=1)
    if with_figure and any(row.get("reward") is not None for row in history):
        from ragen2_trl.report import plot_training  # matplotlib, where something is drawn

        replace_whole(run / "training.png", plot_training(history, _success_metric(env)).savefig)
