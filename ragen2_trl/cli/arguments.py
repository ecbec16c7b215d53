"""The arguments of each command, with their help texts.

`--help` needs nothing but this module, which imports neither torch nor transformers nor a task: it answers at once.
The modules of the commands import these at their top, while `cli.main` shows a status line and Python looks for no
garbage among them; with arguments beside them, each of their functions would import its own.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen2_trl.cli.typed import parser_of

if TYPE_CHECKING:
    from ragen2_trl.envs import Environment
    from ragen2_trl.envs.mixture import AnyTask


def show_help(command: str) -> None:
    """Print a command's own arguments, without those of the configurations that it takes as well."""
    if command in PARSERS:
        PARSERS[command]().print_help()
        return
    others = FURTHER.get(command)
    more = f"And those of {others}: --help_all shows them, which takes some seconds to load." if others else None
    parser = parser_of(command, ARGUMENTS[command], epilog=more)
    parser.add_argument(
        "--config", nargs="+", help="YAML files with any of the arguments; later files and the command line win."
    )
    if others:
        parser.add_argument(
            "--recipe", nargs="+", help="The same with files of the package, by names that `ragen2-trl recipes` lists."
        )
    parser.print_help()


def report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ragen2-trl report", description="Compare runs in one HTML file that opens offline.", allow_abbrev=False
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="The output_dir of a run or of a diagnosis, or a folder of episodes.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="HTML file to write (default: report.html here)."
    )
    return parser


def health_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ragen2-trl health",
        description="What a training is doing, since when and why, from its log alone: TRL's trainer_state.json or "
        "log_history.json, ms-swift's logging.jsonl, or what verl and RAGEN print (step:N - key:value - …).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("logs", nargs="+", type=Path, metavar="LOG", help="Files, each the log of a run, or output_dirs of runs.")
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
    add(
        "--completions",
        type=int,
        default=16,
        help="Completions of a row that does not log their number, for the limits of validity (default: 16).",
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    key, equals, signal = text.rpartition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=SIGNAL")
    return key, signal


def what_if_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ragen2-trl what-if",
        description="Which remedy for groups without signal would have paid on the data of a training, estimated from "
        "its log: no model is loaded. Gain is reward variance of trained rows for each unit of cost, 1 for plain TRL.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="The output_dir of a TRL run with log_completions=True, or of a run of this package; a folder of "
        "*.parquet, *.jsonl (verl's rollout dumps) or *.csv; or such a file of prompt, completion and reward.",
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
    add(
        "--sampling_share",
        type=float,
        default=0.5,
        help="Share of a step's time that sampling takes, 0 to 1, which TRL does not log (default: 0.5).",
    )
    add("--seed", type=int, default=0, help="Seed of the bootstrap and the replays (default: 0).")
    add("--json", type=Path, metavar="FILE", help="File for all numbers as JSON; /dev/stdout prints them.")
    return parser


def envs_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ragen2-trl envs", description="The tasks: their names, options and presets.", allow_abbrev=False
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="A task, for its options and what its presets set.")
    return parser


def recipes_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ragen2-trl recipes",
        description="The recipes and the configurations of `accelerate launch` that ship with the package.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="One of them, to print its file.")
    return parser


def trl_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        "ragen2-trl check-trl",
        description="Whether the TRL that is installed has the methods, parameters and keys that the trainers lean "
        "on. Ends with code 1 where it lacks one.",
        allow_abbrev=False,
    )


def sandbox_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        "ragen2-trl check-sandbox",
        description="Which defences against model-written programs hold on this machine, tried with a program.",
        allow_abbrev=False,
    )


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
        raise ValueError(f"env_args must be options of the task, which env_name names, got name={options['name']!r}")
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

    env_name: str = field(
        default="frozen_lake",
        metadata={
            "help": "Task, by its name in `make_env` or as `module:Class`; several with commas between, as "
            "`sokoban,frozen_lake`."
        },
    )
    env_args: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Options of the task: `key=value` pairs or one JSON object; in YAML a mapping will do. Of several "
            "tasks, `task.key=value` is for one of them and `key=value` for all."
        },
    )
    env_weights: list[float] = field(
        default_factory=list,
        metadata={"help": "With several tasks, their shares of the prompts, in their order; default: equal ones."},
    )

    multi_turn: bool = field(
        default=False, metadata={"help": "Play in several turns, also where a task does not need them."}
    )
    data: str | None = field(
        default=None, metadata={"help": "Hub id or local path of the tasks; default: the task makes its own."}
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Instead of a task: Hub id or local path of rows with `prompt`, rewarded by `--reward`."},
    )
    reward: list[str] = field(
        default_factory=list,
        metadata={"help": "Reward functions for `--dataset`, as TRL takes them: `module:function`, one or several."},
    )
    success_at: float = field(
        default=1.0, metadata={"help": "With `--dataset`: the first reward from which on a prompt counts as solved."}
    )

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
            raise ValueError(f"{others[0]} is for tasks by name; with dataset={self.dataset!r} it must be left out")
        if not self.reward:
            raise ValueError(f"reward must be 'module:function' for dataset={self.dataset!r}, got none")
        functions = [named_object(name, "reward") for name in self.reward]
        rows, held_out = load_own_data(str(self.dataset))
        return DatasetEnvironment(rows, functions, held_out, self.success_at, name=Path(str(self.dataset)).stem)


@dataclass
class PlayArguments(EnvironmentArguments):
    """Which task to play, and what of an episode a turn is sampled from."""

    context: str = field(
        default="full",
        metadata={
            "help": "What a turn is sampled from: 'full' (all turns so far), 'last' (the last turns) or 'memory' (one "
            "message that tells the answers of earlier turns). Each turn is trained as it was sampled."
        },
    )
    context_turns: int | None = field(
        default=None, metadata={"help": "Turns that 'last' shows or 'memory' tells, the present one included."}
    )
    drop_oldest_turns: bool = field(
        default=False, metadata={"help": "Where the context is full, leave out its oldest turns and go on."}
    )

    @property
    def context_options(self) -> dict[str, Any]:
        """For `TextRollout`."""
        return {name: getattr(self, name) for name in ("context", "context_turns", "drop_oldest_turns")}


@dataclass
class SamplingArguments(PlayArguments):
    """Which model plays how many held-out tasks, and how it is sampled."""

    model: str = field(
        default="tiny", metadata={"help": "`tiny`, `tiny-sokoban`, `tiny-countdown`, `smollm2`, a path or a Hub id."}
    )
    num_prompts: int = field(default=256, metadata={"help": "Number of held-out tasks."})
    num_samples: int = field(default=8, metadata={"help": "Completions per task."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": "Longest completion in tokens, all turns included; default: 128 a turn, or the task's own."},
    )
    max_turn_tokens: int | None = field(default=None, metadata={"help": "Longest turn in tokens."})
    chat_template_kwargs: dict | None = field(
        default=None, metadata={"help": "JSON for the chat template, such as '{\"enable_thinking\": false}'."}
    )
    batch_size: int = field(default=128, metadata={"help": "Completions generated at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the tasks and of the sampling."})


@dataclass
class EvaluateArguments(SamplingArguments):
    """What to evaluate, on how many held-out tasks, and how to sample."""

    model: str = field(
        default="tiny",
        metadata={
            "help": "`tiny`, a path or a Hub id; `oracle` for the task's solver, `random` for the random baseline."
        },
    )
    num_samples: int = field(default=8, metadata={"help": "Completions per task; pass@k is reported up to it."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the metrics."})
    episodes: str | None = field(
        default=None,
        metadata={"help": "Folder for the episodes, as Parquet and JSONL; `report` shows them."},
    )
    push_to_hub: str | None = field(
        default=None,
        metadata={"help": "Model on the Hub, such as me/my_run, whose card gets the metrics in its model index."},
    )


@dataclass
class DiagnoseArguments(SamplingArguments):
    """Whose reasoning to look at, in which completions, and where to write what was found."""

    model: str = field(
        default="",
        metadata={
            "help": "`tiny` (the default), `tiny-sokoban`, `tiny-countdown`, `smollm2`, a path or a Hub id. With "
            "`--completions`, which it scores, it must be named: the model that wrote them."
        },
    )
    num_prompts: int = field(default=16, metadata={"help": "Number of held-out tasks."})
    num_samples: int = field(default=4, metadata={"help": "Completions per task."})
    batch_size: int = field(
        default=16, metadata={"help": "Completions generated at once, and saved as soon as they are."}
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Of the sampling, above 0; reasoning is scored at the same."}
    )
    control: bool = field(
        default=False,
        metadata={
            "help": "Also score reasoning that was sampled without the observation, which must come out at chance."
        },
    )
    answer: bool = field(
        default=False,
        metadata={"help": "Also score answers after the prompts and reasoning of others: do they use their own?"},
    )
    completions: str | None = field(
        default=None,
        metadata={
            "help": "Instead of sampling: `prompt` and `completion` as Parquet, JSON, lines of JSON or CSV, as TRL "
            "saves with `log_completions=True` and verl dumps them, or a folder of those or of a run, of which up to "
            "8 files become a path. Warning: "
            "`--model` scores all of them, and the numbers are those of the run only for the file of the step that "
            "its weights are of. Or the file that this command saved."
        },
    )
    prompts: str | None = field(
        default=None, metadata={"help": "Instead of a task: a file or Hub id of rows with `prompt` to sample for."}
    )
    output_dir: str = field(default="runs/diagnosis", metadata={"help": "Folder for the results."})

    def __post_init__(self) -> None:
        if not self.model and self.completions is not None:
            raise ValueError(
                f"model must be named for completions={self.completions!r}, which it scores, got none; allowed: the "
                "path or Hub id of the model that wrote them"
            )
        self.model = self.model or "tiny"
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 (greedy reasoning never varies), got {self.temperature!r}")
        if self.control and self.completions is not None:
            raise ValueError("control must be False with completions, whose tasks are not known, got True")

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

    algo: str = field(
        default="grpo", metadata={"help": "grpo, rloo or ppo, with the filter; trl_grpo is TRL's own GRPOTrainer."}
    )
    model: str | None = field(default=None, metadata={"help": "`tiny` (ships with the package), a path or a Hub id."})
    num_prompts: int = field(default=4096, metadata={"help": "Number of training tasks."})
    eval_prompts: int = field(
        default=256, metadata={"help": "Held-out tasks played before and after training; 0 for no evaluation at all."}
    )
    eval_samples: int = field(default=4, metadata={"help": "Completions per held-out task."})
    eval_every: int = field(
        default=0,
        metadata={
            "help": "Play them at step 0, every so many steps and at the end, for a curve; checkpoints of the best "
            "success are kept. 0: only before and after, at the temperature of training."
        },
    )
    eval_temperature: float = field(
        default=0.5, metadata={"help": "Of the curve's sampling, as in the paper; 0 is greedy, with eval_samples 1."}
    )
    eval_envs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Further tasks with a curve, a name and its options in one string each, such as 'sokoban "
            "multi_turn=true'."
        },
    )
    load_best: bool = field(default=False, metadata={"help": "End with the weights of the best held-out success."})
    stop_below: float | None = field(
        default=None, metadata={"help": "End training when held-out success stays below it, for instance 0.01."}
    )
    stop_patience: int = field(default=5, metadata={"help": "For so many evaluations in a row."})
    max_turn_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longest turn in tokens, where there are several; `max_completion_length` covers all of them."
        },
    )
    resume: bool = field(
        default=False, metadata={"help": "Continue from the last complete checkpoint of the run, if it has one."}
    )
    mutual_information: bool = field(
        default=True, metadata={"help": "Measure whether reasoning depends on its prompt, see `--mi_every`."}
    )
    mi_every: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between measurements; default: those of `logging_steps`, at least 10."},
    )
    episodes_every: int = field(
        default=10,
        metadata={"help": "Save the episodes of a step, at least so many steps apart, for the report; 0 never."},
    )
    gradients_every: int = field(
        default=0, metadata={"help": "Log gradients by reward variance at step 1 and multiples of it; 0 never."}
    )
    gradients_entropy_coef: float | None = field(
        default=None, metadata={"help": "Measure the entropy bonus's gradient as if it had this coefficient."}
    )
    figures: bool = field(default=True, metadata={"help": "Draw figures of the run when training ends."})
    overwrite: bool = field(default=False, metadata={"help": "Delete the checkpoints of an earlier run of that name."})

    def __post_init__(self) -> None:
        if self.mi_every is not None and self.mi_every < 1:
            raise ValueError(f"mi_every must be at least 1, got {self.mi_every}")
        if self.eval_every < 0:
            raise ValueError(f"eval_every must be at least 0, got {self.eval_every!r}")
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

    model: str | None = field(default=None, metadata={"help": "`tiny` (ships with the package), a path or a Hub id."})
    num_demonstrations: int = field(default=10_000, metadata={"help": "Number of demonstrations."})
    demonstrations_seed: int = field(default=0, metadata={"help": "Seed of the demonstrations."})
    mix: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Further tasks to learn from, as many demonstrations of each: a name and its options in one "
            "string, such as 'sokoban multi_turn=true observation=coordinates'."
        },
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Begin with untrained weights; only with `--model tiny`."}
    )


ARGUMENTS = {
    "train": TrainArguments,
    "evaluate": EvaluateArguments,
    "warm-start": WarmStartArguments,
    "diagnose": DiagnoseArguments,
}
# Commands without a configuration.
PARSERS = {
    "report": report_parser,
    "check-trl": trl_parser,
    "check-sandbox": sandbox_parser,
    "envs": envs_parser,
    "recipes": recipes_parser,
    "health": health_parser,
    "what-if": what_if_parser,
}
# The configurations whose fields a command takes beside its own.
FURTHER = {
    "train": "SNRFilteredGRPOConfig (snr_* are the filter's; --algo has its own) and trl.ModelConfig",
    "warm-start": "trl.SFTConfig and trl.ModelConfig",
}
