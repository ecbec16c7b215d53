"""What scripts of users do with the Hub, run as clients of its double: `hub_scenarios.py FOLDER POLICY NAME...`.

Each scenario trains the tiny policy in a folder of its name. The last line printed is what they tell, as JSON.
"""

import json
import logging
import os
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
from cards import OURS, STOCK, arguments, length_reward
from datasets import load_dataset
from huggingface_hub import ModelCard, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ragen2_trl import MutualInformationCallback
from ragen2_trl.callbacks import run_record
from ragen2_trl.envs import make_env
from ragen2_trl.reporting.hub import publish_metrics, push_dataset

draw = run_record.write_figures
SHORT = {"max_steps": 2, "save_steps": 1}  # two checkpoints


class At(TrainerCallback):
    """Does something before a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def make(trainer_class, name, figures=False, namespace="tester", min_prompts=2, **overrides):
    run_record.write_figures = draw if figures else lambda run: run
    env = make_env("bandit")
    hub = {"push_to_hub": True, "hub_model_id": f"{namespace}/{name}", "hub_token": None, "hub_always_push": True}
    args = arguments(trainer_class, FOLDER / name, **hub | overrides)
    rewards = [*env.reward_funcs, length_reward]
    trainer = trainer_class(POLICY, rewards, args=args, train_dataset=env.dataset(8))
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=min_prompts))
    return trainer


def push(trainer, **card):
    """The name of the error, if there is one."""
    try:
        trainer.push_to_hub(**card)
    except Exception as error:  # noqa: BLE001 - its name is what is asked for
        return type(error).__name__
    return "ok"


@contextmanager
def no_login():
    token = os.environ.pop("HF_TOKEN")
    try:
        yield token
    finally:
        os.environ["HF_TOKEN"] = token


def healthy():
    """Checkpoints, the final push and TRL's log of completions; then the repository in another folder."""
    trainer = make(
        OURS, "healthy", figures=True, log_completions=True, log_completions_hub_repo="tester/logs", save_total_limit=1
    )
    trainer.train()
    trainer.push_to_hub(dataset_name="tester/tasks")
    trainer.commit_scheduler.trigger().result()
    trainer.commit_scheduler.stop()
    folder = snapshot_download("tester/healthy", local_dir=FOLDER / "clone")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    trained = trainer.model.state_dict()
    publish_metrics("tester/healthy", "bandit", {"success": 0.25, "return": 0.5, "pass@2": 0.3, "pass@2_ci_low": 0})
    publish_metrics("tester/healthy", "bandit", {"success": 0.75, "return": 0.5, "pass@2": 0.8, "pass@2_ci_low": 0})
    card = ModelCard.load("tester/healthy")
    return {
        "same weights": all(torch.equal(value, trained[name]) for name, value in model.state_dict().items()),
        "same ids": tokenizer("Go right")["input_ids"] == trainer.processing_class("Go right")["input_ids"],
        "clone": [vars(result) for result in ModelCard.load(Path(folder) / "README.md").data.eval_results],
        "index": [
            [result.metric_type, result.dataset_split, result.metric_value] for result in card.data.eval_results
        ],
        "verified": [result.verified for result in card.data.eval_results],
        "rows": [row for row in trainer.state.log_history if "reward" in row],
        "logs": load_dataset("tester/logs", split="train").num_rows,
    }


def stock():
    """TRL's own trainer, with a token that only its arguments know."""
    with no_login() as token:
        trainer = make(STOCK, "stock", hub_token=token, hub_private_repo=True, hub_strategy="checkpoint")
        trainer.train()
        return push(trainer)


def checkpoints():
    """Ours, with checkpoints on the Hub."""
    trainer = make(OURS, "checkpoints", hub_strategy="checkpoint")
    trainer.train()
    return push(trainer)


def pooled():
    """TRL's own trainer, whose generations are too small to be measured alone, with all checkpoints on the Hub."""
    trainer = make(STOCK, "pooled", min_prompts=4, max_steps=1, save_steps=1, hub_strategy="all_checkpoints")
    trainer.train()
    return push(trainer)


def tasks():
    env = make_env("frozen_lake", size=5)
    url = push_dataset(env, "tester/tasks", train=6, test=3, seed=7)
    back = load_dataset("tester/tasks")
    same = {split: back[split].to_list() == env.dataset(len(back[split]), 7, split).to_list() for split in back}
    push_dataset(env, "tester/tasks", train=4, test=3)
    return {"url": url, "same": same, "again": load_dataset("tester/tasks", split="train").num_rows}


def flaky():
    trainer = make(OURS, "flaky", **SHORT)
    trainer.train()
    return trainer.state.global_step


def dropped():
    trainer = make(OURS, "dropped", **SHORT)
    trainer.train()
    return trainer.state.global_step


def full():
    trainer = make(OURS, "full", hub_private_repo=True, **SHORT)
    trainer.train()
    return [trainer.state.global_step, push(trainer)]


def slow():
    """The upload of the second checkpoint begins before that of the first, and of its figures, has ended."""
    trainer = make(OURS, "slow", figures=True, **SHORT)
    trainer.train()
    return push(trainer)


def foreign():
    trainer = make(OURS, "foreign", max_steps=2)
    trainer.train()
    return push(trainer)


def forbidden():
    try:
        make(OURS, "forbidden", namespace="others")
    except Exception as error:  # noqa: BLE001 - its name is what is asked for
        return [type(error).__name__, str(error)]
    return None


def offline():
    """The Hub goes away in the middle and stays away."""
    endpoint = urlsplit(os.environ["HF_ENDPOINT"])

    def go_offline():
        (FOLDER / "close").touch()
        with_hub = True
        while with_hub:
            time.sleep(0.1)
            with socket.socket() as connection:
                with_hub = connection.connect_ex((endpoint.hostname, endpoint.port)) == 0

    trainer = make(OURS, "offline", hub_always_push=False)
    trainer.add_callback(At(1, go_offline))
    trainer.train()
    return [trainer.state.global_step, push(trainer)]


if __name__ == "__main__":
    FOLDER, POLICY = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    told = {}
    for scenario in sys.argv[3:]:
        sys.stderr.write(f"--- {scenario}\n")
        told[scenario] = globals()[scenario]()
    sys.stdout.write(json.dumps(told, default=str))
