"""The arguments of each command, with their help texts.

`--help` needs nothing but this module, which imports neither torch nor transformers nor a task: it answers at once.
The modules of the commands import these at their top, while `cli.main` shows a status line and Python looks for no
garbage among them; with arguments beside them, each of their functions would import its own.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen2_trl.cli.typed import in_a_line, option, parser_of

if TYPE_CHECKING:
    from ragen2_trl.envs import Environment
    from ragen2_trl.envs.mixture import AnyTask

COMMANDS = {
    "train": "train a model on an environment with GRPO, RLOO or PPO, filtered or as TRL has it",
    "evaluate": "success, pass@k and reward on held-out tasks, with confidence intervals",
    "warm-start": "supervised fine-tuning on demonstrations of an environment",
    "diagnose": "whether a model's reasoning depends on its prompt",
    "health": "what training is doing (learning, flat, drifting, failing) and what to do, from the log of a run",
    "what-if": "which remedy for groups without signal pays, from the log of a training",
    "envs": "the tasks: names, options and presets",
    "recipes": "settings that ship with the package, for `train --recipe` and `accelerate launch`",
    "report": "one HTML file that compares runs and opens offline",
    "check-trl": "whether the TRL that is installed has all that the trainers lean on",
    "check-sandbox": "which defences against model-written programs hold on this machine",
}
# The configurations whose fields a command takes beside its own.
FURTHER = {
    "train": "SNRFilteredGRPOConfig (snr_* are the filter's; --algo has its own) and trl.ModelConfig",
    "warm-start": "trl.SFTConfig and trl.ModelConfig",
}


def command_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command's own arguments, without those of the configurations that it takes as well."""
    purpose = f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}."
    if command not in ARGUMENTS:
        parser = argparse.ArgumentParser(f"ragen2-trl {command}", description=purpose, allow_abbrev=False)
        if command in PLAIN:
            PLAIN[command](parser.add_argument)
        return in_a_line(parser)
    others = FURTHER.get(command)
    more = f"And those of {others}: --help_all shows them, which takes some seconds to load." if others else None
    own = parser_of(command, ARGUMENTS[command], description=purpose, epilog=more)
    own.add_argument("--config", nargs="+", help="YAML files of arguments; later files and the command line win.")
    if others:
        own.add_argument("--recipe", nargs="+", help="The same by names that `ragen2-trl recipes` lists.")
    return own


def parse_plain(command: str, args: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command without a configuration.

    Raises:
        InputError: If one is not known or has no allowed value.
    """
    return command_parser(command).parse_args(args)


def _report(add: Callable[..., Any]) -> None:
    runs = "The output_dir of a run or of a diagnosis, or a folder of episodes."
    add("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    add("--output", type=Path, default=Path("report.html"), help="HTML file to write (default: report.html here).")


def _health(add: Callable[..., Any]) -> None:
    add(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="Logs, each of a run: the console output of TRL, verl, RAGEN or OpenRLHF in a file; trainer_state.json, "
        "log_history.json, ms-swift's logging.jsonl; a CSV of W&B, a TensorBoard or Trackio file; or an output_dir.",
    )
    add(
        "--key",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=SIGNAL",
        help="A further log key, * for a part between slashes, and the quantity it holds: valid, valid_thinking, "
        "success, held_out_success, reward, reward_std, zero_variance, kept, clipped, length, entropy, grad_norm, "
        "clip_ratio.",
    )
    completions = "Completions of a row that does not log their number, for the limits of validity (default: 16)."
    add("--completions", type=int, help=completions)
    add("--json", type=Path, metavar="FILE", help="File for states and findings as JSON; /dev/stdout prints them.")


def _pair(text: str) -> tuple[str, str]:
    key, equals, signal = text.rpartition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=SIGNAL")
    return key, signal


def _what_if(add: Callable[..., Any]) -> None:
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="The output_dir of a TRL run with log_completions=True, or of a run of this package; a folder of "
        "*.parquet, *.jsonl (verl's rollout dumps) or *.csv; or such a file of prompt, completion and reward. No "
        "model is loaded.",
    )
    add("--num_generations", type=int, help="Completions of a prompt; default: inferred from equal prompts.")
    add("--groups", type=int, help="Prompts of a generation batch; default: inferred from steps.")
    add("--rewards", nargs="+", default=[], metavar="COLUMN", help="Columns with the rewards of one function each.")
    add(
        "--reward_weights",
        nargs="+",
        type=float,
        default=[],
        metavar="WEIGHT",
        help="Their weights, in the order of reward_funcs without --rewards; default: those of a run of this package, "
        "else 1.",
    )
    add("--micro_batch", type=int, help="per_device_train_batch_size; default: from the trainer's state.")
    add("--tokenizer", help="Path or Hub id, to count tokens; default: characters, scaled by the logged mean length.")
    share = "Share of a step's time that sampling takes, 0 to 1, which TRL does not log (default: 0.5)."
    add("--sampling_share", type=float, default=0.5, help=share)
    add("--seed", type=int, default=0, help="Seed of the bootstrap and the replays (default: 0).")
    add("--json", type=Path, metavar="FILE", help="File for all numbers as JSON; /dev/stdout prints them.")


def _envs(add: Callable[..., Any]) -> None:
    add("name", nargs="?", metavar="NAME", help="A task, for its options and what its presets set.")


def _recipes(add: Callable[..., Any]) -> None:
    add("name", nargs="?", metavar="NAME", help="One of them, to print its file.")


# Commands without a configuration.
PLAIN = {"report": _report, "health": _health, "what-if": _what_if, "envs": _envs, "recipes": _recipes}


def parse_env_args(env_args: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Options from `key=value` strings, JSON objects, or the mapping that a YAML file gives.

    Values are read as JSON where they are JSON, `True` and `False` as well, and are strings elsewhere.

    Raises:
        ValueError: If an item is neither a pair nor a JSON object.

    >>> parse_env_args(["size=5", "observation=both", '{"slip": 0.1}'])
    {'size': 5, 'observation': 'both', 'slip': 0.1}
    """
    options: dict[str, Any] = dict(env_args) if isinstance(env_args, Mapping) else {}
    for item in () if isinstance(env_args, Mapping) else env_args:
        key, equals, value = item.partition("=")
        if item.lstrip().startswith("{"):
            options.update(json.loads(item))
        elif equals:
            options[key] = _json_or_text(value)
        else:
            raise ValueError(f"env_args must be `key=value` pairs or a JSON object, got {item!r}")
    if "name" in options:
        raise ValueError(f"env_args must leave the task to env_name, got name={options['name']!r} in env_args")
    return options


def options_by_task(
    options: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options of all tasks, and by task those of one: `{"sokoban.size": 7, "multi_turn": True}`."""
    for_all: dict[str, Any] = {}
    for_one: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        name, dot, own = key.partition(".")
        if dot and name not in for_one:
            raise ValueError(f"env_args must name one of the tasks {list(names)} before the dot, got {key!r}")
        (for_one[name] if dot else for_all)[own if dot else key] = value
    for name, own_options in for_one.items():
        if twice := sorted(set(own_options) & set(for_all)):
            raise ValueError(f"env_args must give {twice} for all tasks or for {name}, got both")
    return for_all, for_one


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return value


@dataclass
class EnvironmentArguments:
    """Which task to play. It is not called `env`, which TrlParser keeps for environment variables."""

    env_name: str = option(
        "frozen_lake",
        "Task, by its name in `make_env` or as `module:Class`; several with commas between, as `sokoban,frozen_lake`.",
    )
    env_args: list[str] = option(
        [],
        "Options of the task: `key=value` pairs or one JSON object; in YAML a mapping will do. Of several "
        "tasks, `task.key=value` is for one of them and `key=value` for all.",
    )
    env_weights: list[float] = option(
        [], "With several tasks, their shares of the prompts, in their order; default: equal ones."
    )

    multi_turn: bool = option(False, "Play in several turns, also where a task does not need them.")
    data: str | None = option(None, "Hub id or local path of the tasks; default: the task makes its own.")
    dataset: str | None = option(
        None, "Instead of a task: Hub id or local path of rows with `prompt`, rewarded by `--reward`."
    )
    reward: list[str] = option(
        [], "Reward functions for `--dataset`, as TRL takes them: `module:function`, one or several."
    )
    success_at: float = option(1.0, "With `--dataset`: the first reward from which on a prompt counts as solved.")

    def make_env(self) -> "AnyTask":
        """The task with its options, the mixture of several, or the dataset with its rewards."""
        from ragen2_trl.envs import TaskMixture, make_env  # not to ask for help

        if self.dataset is not None:
            return self._own_data()
        if self.reward:
            raise ValueError(f"reward={self.reward} needs a dataset, got None")

        options = parse_env_args(self.env_args)
        if self.multi_turn:
            options["multi_turn"] = True
        names = [name.strip() for name in self.env_name.split(",")]
        if len(names) == 1:
            if self.env_weights:
                raise ValueError(f"env_weights must be empty for one task ({self.env_name}), got {self.env_weights}")
            return make_env(self.env_name, **options)
        for_all, for_one = options_by_task(options, names)
        return TaskMixture([make_env(name, **for_all, **for_one[name]) for name in names], self.env_weights or None)

    def _own_data(self) -> "Environment":
        from ragen2_trl.envs.own_data import DatasetEnvironment, load_own_data
        from ragen2_trl.names import named_object

        given = {"env_args": self.env_args, "env_weights": self.env_weights, "data": self.data}
        if others := [name for name, value in given.items() if value] + ["multi_turn"] * self.multi_turn:
            raise ValueError(f"{others[0]} must be left out with dataset={self.dataset!r}: it is for tasks by name")
        if not self.reward:
            raise ValueError(f"reward must be 'module:function' for dataset={self.dataset!r}, got none")
        functions = [named_object(name, "reward") for name in self.reward]
        rows, held_out = load_own_data(str(self.dataset))
        return DatasetEnvironment(rows, functions, held_out, self.success_at, name=Path(str(self.dataset)).stem)


@dataclass
class PlayArguments(EnvironmentArguments):
    """Which task to play, and what of an episode a turn is sampled from."""

    context: str = option(
        "full",
        "What a turn is sampled from: 'full' (all turns so far), 'last' (the last turns) or 'memory' (one "
        "message that tells the answers of earlier turns). Each turn is trained as it was sampled.",
    )
    context_turns: int | None = option(None, "Turns that 'last' shows or 'memory' tells, the present one included.")
    drop_oldest_turns: bool = option(False, "Where the context is full, leave out its oldest turns and go on.")

    @property
    def context_options(self) -> dict[str, Any]:
        """For `TextRollout`."""
        return {name: getattr(self, name) for name in ("context", "context_turns", "drop_oldest_turns")}


@dataclass
class SamplingArguments(PlayArguments):
    """Which model plays how many held-out tasks, and how it is sampled."""

    model: str = option("tiny", "`tiny`, `tiny-sokoban`, `tiny-countdown`, `smollm2`, a path or a Hub id.")
    num_prompts: int = option(256, "Number of held-out tasks.")
    num_samples: int = option(8, "Completions per task.")
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy.")
    max_new_tokens: int | None = option(
        None, "Longest completion in tokens, all turns included; default: 128 a turn, or the task's own."
    )
    max_turn_tokens: int | None = option(None, "Longest turn in tokens.")
    chat_template_kwargs: dict | str | None = option(
        None, "JSON for the chat template, such as '{\"enable_thinking\": false}'."
    )
    batch_size: int = option(128, "Completions generated at once.")
    seed: int = option(0, "Seed of the tasks and of the sampling.")

    def __post_init__(self) -> None:
        given = self.chat_template_kwargs
        self.chat_template_kwargs = _json_or_text(given) if isinstance(given, str) else given
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {given!r}")

    @property
    def sampling(self) -> dict[str, Any]:
        """For `evaluate_model` and `sample_trajectories`."""
        of_all = ("num_prompts", "num_samples", "seed", "data", "temperature", "max_new_tokens", "batch_size")
        return {
            name: getattr(self, name)
            for name in (*of_all, "max_turn_tokens", "chat_template_kwargs", "context_options")
        }


@dataclass
class EvaluateArguments(SamplingArguments):
    """What to evaluate, on how many held-out tasks, and how to sample."""

    model: str = option(
        "tiny", "`tiny`, a path or a Hub id; `oracle` for the task's solver, `random` for the random baseline."
    )
    num_samples: int = option(8, "Completions per task; pass@k is reported up to it.")
    output: str | None = option(None, "JSON file for the metrics.")
    episodes: str | None = option(None, "Folder for the episodes, as Parquet and JSONL; `report` shows them.")
    push_to_hub: str | None = option(
        None, "Model on the Hub, such as me/my_run, whose card gets the metrics in its model index."
    )


@dataclass
class DiagnoseArguments(SamplingArguments):
    """Whose reasoning to look at, in which completions, and where to write what was found."""

    model: str = option(
        "",
        "`tiny` (the default), `tiny-sokoban`, `tiny-countdown`, `smollm2`, a path or a Hub id. With "
        "`--completions`, which it scores, it must be named: the model that wrote them.",
    )
    num_prompts: int = option(16, "Number of held-out tasks.")
    num_samples: int = option(4, "Completions per task.")
    batch_size: int = option(16, "Completions generated at once, and saved as soon as they are.")
    temperature: float = option(1.0, "Of the sampling, above 0; reasoning is scored at the same.")
    control: bool = option(
        False, "Also score reasoning that was sampled without the observation, which must come out at chance."
    )
    answer: bool = option(
        False, "Also score answers after the prompts and reasoning of others: do they use their own?"
    )
    completions: str | None = option(
        None,
        "Instead of sampling: `prompt` and `completion` as Parquet, JSON, lines of JSON or CSV, as TRL "
        "saves with `log_completions=True` and verl dumps them, or a folder of those or of a run, of which up to "
        "8 files become a path. Warning: `--model` scores all of them, and the numbers are those of the run only for "
        "the file of the step that "
        "its weights are of. Or the file that this command saved.",
    )
    prompts: str | None = option(None, "Instead of a task: a file or Hub id of rows with `prompt` to sample for.")
    output_dir: str = option("runs/diagnosis", "Folder for the results.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model and self.completions is not None:
            raise ValueError(
                f"model=None cannot score completions={self.completions!r}; allowed: the path or Hub id of the model "
                "that wrote them"
            )
        self.model = self.model or "tiny"
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 (greedy reasoning never varies), got {self.temperature!r}")
        if self.control and self.completions is not None:
            raise ValueError("control must be False with completions, because their tasks are not known, got True")

    def make_env(self) -> "AnyTask":
        """The task, or prompts without one, which are worth nothing."""
        if self.prompts is None:
            return super().make_env()
        from ragen2_trl.envs.own_data import DatasetEnvironment, load_own_data

        rows, held_out = load_own_data(self.prompts, "prompts")
        every = rows if held_out is None else held_out
        return DatasetEnvironment(every, _worth_nothing, every, name=Path(self.prompts).stem)


def _worth_nothing(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@dataclass
class TrainArguments(PlayArguments):
    """What to train, on how many tasks, and how to measure it before and after."""

    algo: str = option("grpo", "grpo, rloo or ppo, with the filter; trl_grpo is TRL's own GRPOTrainer.")
    model: str | None = option(None, "`tiny` (ships with the package), a path or a Hub id.")
    num_prompts: int = option(4096, "Number of training tasks.")
    eval_prompts: int = option(256, "Held-out tasks played before and after training; 0 for no evaluation at all.")
    eval_samples: int = option(4, "Completions per held-out task.")
    eval_every: int = option(
        0,
        "Play them at step 0, every so many steps and at the end, for a curve; checkpoints of the best "
        "success are kept. 0: only before and after, at the temperature of training.",
    )
    eval_temperature: float = option(
        0.5, "Of the curve's sampling, as in the paper; 0 is greedy, with eval_samples 1."
    )
    eval_envs: list[str] = option(
        [], "Further tasks with a curve, a name and its options in one string each, such as 'sokoban multi_turn=true'."
    )
    load_best: bool = option(False, "End with the weights of the best held-out success.")
    stop_below: float | None = option(None, "End training when held-out success stays below it, for instance 0.01.")
    stop_patience: int = option(5, "For so many evaluations in a row.")
    max_turn_tokens: int | None = option(
        None, "Longest turn in tokens, where there are several; `max_completion_length` covers all of them."
    )
    resume: bool = option(False, "Continue from the last complete checkpoint of the run, if it has one.")
    mutual_information: bool = option(True, "Measure whether reasoning depends on its prompt, see `--mi_every`.")
    mi_every: int | None = option(
        None, "Optimizer steps between measurements; default: those of `logging_steps`, at least 10."
    )
    episodes_every: int = option(
        10, "Save the episodes of a step, at least so many steps apart, for the report; 0 never."
    )
    figures: bool = option(True, "Draw figures of the run when training ends.")
    overwrite: bool = option(False, "Delete the checkpoints of an earlier run of that name.")

    def __post_init__(self) -> None:
        if self.mi_every is not None and self.mi_every < 1:
            raise ValueError(f"mi_every must be at least 1, got {self.mi_every}")
        if self.eval_every < 0:
            raise ValueError(f"eval_every must be at least 0, got {self.eval_every!r}")
        if self.mi_every is not None and not self.mutual_information:
            raise ValueError(f"mi_every={self.mi_every} needs mutual_information, got {self.mutual_information}")
        asked = {"eval_envs": self.eval_envs, "load_best": self.load_best, "stop_below": self.stop_below}
        alone = [name for name, value in asked.items() if value not in ([], False, None)]
        if alone and not self.has_curve:
            raise ValueError(
                f"{alone[0]} needs held-out success over the steps: eval_every and eval_prompts must be above 0, got "
                f"{self.eval_every} and {self.eval_prompts}"
            )

    @property
    def has_curve(self) -> bool:
        """Whether held-out tasks are played while training."""
        return self.eval_every > 0 and self.eval_prompts > 0

    def make_eval_envs(self, env: "AnyTask") -> "list[Environment]":
        """What has a curve: the trained task, or each of several, and those of `eval_envs`."""
        from ragen2_trl.envs import TaskMixture, make_env

        words = [task.split() or [task] for task in self.eval_envs]
        trained = list(env.environments.values()) if isinstance(env, TaskMixture) else [env]
        return [*trained, *(make_env(name, **parse_env_args(options)) for name, *options in words)]


@dataclass
class WarmStartArguments(EnvironmentArguments):
    """What to learn from, and whether to begin with untrained weights."""

    model: str | None = option(None, "`tiny` (ships with the package), a path or a Hub id.")
    num_demonstrations: int = option(10_000, "Number of demonstrations.")
    demonstrations_seed: int = option(0, "Seed of the demonstrations.")
    mix: list[str] = option(
        [],
        "Further tasks to learn from, as many demonstrations of each: a name and its options in one "
        "string, such as 'sokoban multi_turn=true observation=coordinates'.",
    )
    from_scratch: bool = option(False, "Begin with untrained weights; only with `--model tiny`.")


ARGUMENTS: dict[str, type] = {
    "train": TrainArguments,
    "evaluate": EvaluateArguments,
    "warm-start": WarmStartArguments,
    "diagnose": DiagnoseArguments,
}
