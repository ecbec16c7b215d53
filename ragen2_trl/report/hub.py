"""Held-out metrics are pushed to the card of a model on the Hub."""

from collections.abc import Mapping

from huggingface_hub import HfApi, metadata_update
from huggingface_hub.repocard_data import eval_results_to_model_index

from ragen2_trl.record.files import DIAGNOSTICS, json_text
from ragen2_trl.report.card import HELD_OUT_SUCCESS, eval_result, file_url


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
