"""`python -m ragen2_trl.openenv --env_name sokoban --env_args size=7 --port 8000`: serves a task."""

from dataclasses import dataclass, field

import uvicorn
from transformers import HfArgumentParser

from ragen2_trl.cli.arguments import EnvironmentArguments
from ragen2_trl.envs import TaskMixture, task_class
from ragen2_trl.envs.tasks import SPLITS
from ragen2_trl.openenv.server import DEFAULT_NUM_TASKS, make_server


@dataclass
class ServeArguments(EnvironmentArguments):
    """What to serve, and where."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; there is no authentication."})
    port: int = field(default=8000, metadata={"help": "Port to listen on."})
    num_tasks: int | None = field(
        default=None, metadata={"help": f"Tasks of each split; default: {DEFAULT_NUM_TASKS:,}, or all of `--data`."}
    )
    seed: int = field(default=0, metadata={"help": "Order of the tasks."})
    splits: list[str] = field(default_factory=lambda: list(SPLITS), metadata={"help": "Splits to serve."})
    max_sessions: int = field(default=256, metadata={"help": "Episodes at the same time, of all trainers together."})


def main(args: list[str] | None = None) -> None:
    """Serves a task until it is interrupted; for tools where it has some, unless `--env_args protocol=text`."""
    parser = HfArgumentParser(ServeArguments, prog="python -m ragen2_trl.openenv")  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses(args)
    try:
        server = server_of(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    server.run()


def server_of(arguments: ServeArguments) -> uvicorn.Server:
    """The server that the arguments ask for.

    Raises:
        ValueError: If an argument is outside its range.
    """
    if "," not in arguments.env_name and task_class(arguments.env_name).tools is not None:
        arguments.env_args = ["protocol=tools", *arguments.env_args]
    env = arguments.make_env()
    if isinstance(env, TaskMixture):
        raise ValueError(f"env_name must be one task, got {arguments.env_name!r}")
    return make_server(
        env,
        arguments.host,
        arguments.port,
        arguments.num_tasks,
        arguments.seed,
        arguments.data,
        arguments.splits,
        arguments.max_sessions,
    )


if __name__ == "__main__":
    main()
