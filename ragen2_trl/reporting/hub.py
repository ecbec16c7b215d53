"""Tasks and held-out metrics are pushed to the Hub, each with a card that says what they are."""

from collections.abc import Mapping

from datasets import Dataset, DatasetDict
from huggingface_hub import DatasetCard, HfApi, metadata_update
from huggingface_hub.repocard_data import eval_results_to_model_index

from ragen2_trl.envs import Environment
from ragen2_trl.redaction import MARKUP_ENDS, hide_credentials
from ragen2_trl.reporting.card import HELD_OUT_SUCCESS, code, eval_result, file_url
from ragen2_trl.reporting.files import DIAGNOSTICS, json_text
from ragen2_trl.reporting.settings import public

PAPER = "[arXiv 2604.06268](https://arxiv.org/abs/2604.06268)"


def push_dataset(
    env: Environment,
    repo_id: str,
    *,
    train: int | None = 4096,
    test: int | None = 256,
    seed: int = 0,
    data: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Push an environment's tasks to the Hub, with a card that says what they are and how to train on them.

    Args:
        env: The task.
        repo_id: Where to, `name` or `namespace/name`; replaced if it exists.
        train: Tasks of the split `train`; `None` for all there are, where tasks come from data.
        test: The same for the split `test`.
        seed: Which stream of tasks to draw from.
        data: Where tasks come from; see [`~ragen2_trl.envs.Environment.dataset`].
        private: Whether a new repository is private.
        token: For the Hub; default: the one of `hf auth login`.

    Returns:
        Address of the data set.

    Raises:
        ValueError: As `Environment.dataset` does, and for tasks that can be played beside their data alone.
        HfHubHTTPError: If the Hub refuses.
    """
    splits = {split: env.dataset(number, seed, split, data) for split, number in (("train", train), ("test", test))}
    for name, value in next(iter(splits["test"]), {}).items():
        if data is not None and value == data:
            raise ValueError(
                f"data={public(data)!r} stands in each of its tasks ({name}), which nobody else could play; allowed: "
                "data that tasks are made of, and not read from while they are played"
            )
    repo_id = HfApi(token=token).create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    DatasetDict(splits).push_to_hub(repo_id, token=token)
    card = DatasetCard.load(repo_id, token=token)  # with what `datasets` has written of columns and splits
    card.data.pretty_name = f"{env.name} tasks"
    card.data.tags = ["ragen2", "trl"]
    card.data.task_categories = ["reinforcement-learning"]
    if data is None:
        card.data.license = "apache-2.0"
    card.text = hide_credentials(_describe(env, splits, repo_id, seed, data), MARKUP_ENDS)
    card.push_to_hub(repo_id, token=token, commit_message="Card")
    return f"https://huggingface.co/datasets/{repo_id}"


def publish_metrics(
    repo_id: str, task: str, metrics: Mapping[str, float], *, dataset: str | None = None, token: str | None = None
) -> None:
    """Add held-out metrics to the card of a model on the Hub, and the file that they can be checked in.

    Numbers of the same task that are there from an earlier call are replaced.

    Args:
        repo_id: The model's repository.
        task: Name of the environment.
        metrics: Of `ragen2-trl evaluate` or [`~ragen2_trl.cli.evaluate.evaluate_model`]; `success` (fraction), and of
            `return` and `pass@k` what there is.
        dataset: Id of the tasks on the Hub, if they are there.
        token: For the Hub; default: the one of `hf auth login`.

    Raises:
        ValueError: If `metrics` has no `success`.
        HfHubHTTPError: If the Hub refuses.
    """
    if "success" not in metrics:
        raise ValueError(f"metrics must hold 'success', as `ragen2-trl evaluate` writes it, got {sorted(metrics)}")
    path = f"{DIAGNOSTICS}/evaluation_{task}.json"
    content = json_text(dict(metrics), indent=2).encode()
    api = HfApi(token=token)
    api.upload_file(repo_id=repo_id, path_or_fileobj=content, path_in_repo=path, commit_message=f"Metrics on {task}")
    url = file_url(repo_id, path)
    names = {"success": ("success_rate", HELD_OUT_SUCCESS), "return": ("mean_return", "Held-out return")}
    names |= {key: (key, f"Held-out {key}") for key in metrics if key.startswith("pass@") and "_" not in key}
    results = [eval_result(dataset or task, "test", *names[key], metrics[key], url) for key in names if key in metrics]
    index = eval_results_to_model_index(repo_id.split("/")[-1], results)
    metadata_update(repo_id, {"model-index": index}, overwrite=True, token=token)


def _describe(env: Environment, splits: Mapping[str, Dataset], repo_id: str, seed: int, data: str | None) -> str:
    """The card's text. Rules and an example stand in a block of code: they may hold anything."""
    options = "".join(f", {name}={value!r}" for name, value in public(dict(env.options)).items())
    made = f'make_env("{env.qualified_name}"{options})'
    source = "Made by its generator" if data is None else f"They come from {code(str(public(data)))}"
    counts = ", ".join(f"{len(rows)} of the split `{split}`" for split, rows in splits.items())
    columns = ", ".join(f"`{name}`" for name in splits["train"].column_names if name != "prompt")
    system, user = (message["content"].replace("```", "'''") for message in env.prompt(splits["train"][0]))
    several = ", rollout_func=TextRollout(env)" if env.needs_rollout else ""
    if env.protocol == "tools":
        several = ", environment_factory=env.environment_factory"
    lines = [
        f"# {env.name} tasks",
        "",
        f"Tasks for training language models as agents, in {code(made)} of ragen2-trl: {counts}. {source}, with seed "
        f"{seed}. No task of one split appears in the other.",
        "",
        "## Rules",
        "",
        *("```text", system, "```", ""),
        f"Turns of an episode: {env.max_turns}. Actions that count in a turn: up to {env.max_actions}.",
        "",
        "## The first task",
        "",
        *("```text", user, "```", ""),
        "## Columns",
        "",
        f"`prompt` is what a model is shown first; {columns} are what the rewards need.",
        "",
        "## Train on them",
        "",
        "```python",
        "from datasets import load_dataset",
        "from ragen2_trl import SNRFilteredGRPOTrainer" + (", TextRollout" if "TextRollout" in several else ""),
        "from ragen2_trl.envs import make_env",
        "",
        f"env = {made}",
        f'tasks = load_dataset("{repo_id}", split="train")',
        f'trainer = SNRFilteredGRPOTrainer("a/model", env.reward_funcs, train_dataset=tasks{several})',
        "trainer.train()",
        "```",
        "",
        f"After {PAPER}.",
        "",
    ]
    return "\n".join(lines)
