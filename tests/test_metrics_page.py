"""The reference of metrics, docs/metrics.md, leaves none out."""

import re
from pathlib import Path

import pytest
from conftest import RUN
from datasets import Dataset
from measured_runs import length_reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import (
    CostCallback,
    GradientSNRCallback,
    MutualInformationCallback,
    RewardVarianceStopCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
)

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented() -> list[re.Pattern]:
    """The keys in the first column of its tables, under each of the prefixes that the table's head names."""
    keys, prefixes = [], [""]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            prefixes = [""]
            continue
        first = line.split("|")[1]
        names = re.findall(r"`([^`]+)`", first)
        if first.strip().startswith("key"):
            prefixes = names or [""]
        else:
            keys += [prefix + name for prefix in prefixes for name in names]
    return [re.compile(re.sub(r"<\w+>", "[^/]+", re.sub(r"([.@])", r"\\\1", key))) for key in keys]


def logged(trainer) -> set[str]:
    return {key for row in trainer.state.log_history for key in row}


@pytest.fixture(scope="module")
def of_trl(policy_path, tmp_path_factory):
    """What TRL's own trainer logs, of which the page has a choice."""
    args = GRPOConfig(**{**RUN, "output_dir": str(tmp_path_factory.mktemp("trl")), "max_steps": 1})
    trainer = GRPOTrainer(policy_path, length_reward, args, Dataset.from_dict({"prompt": ["Up", "Down"]}))
    trainer.train()
    return logged(trainer)


@pytest.mark.parametrize(
    ("trainer_class", "config", "settings"),
    [
        (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig, {"snr_dynamic_sampling_rounds": 1}),
        (SNRFilteredPPOTrainer, SNRFilteredPPOConfig, {"value_head": "shared"}),
    ],
    ids=["grpo", "ppo"],
)
def test_every_metric_that_is_logged_is_in_the_reference(
    trainer_class, config, settings, of_trl, policy_path, prompts, tmp_path
):
    args = config(**{**RUN, "output_dir": str(tmp_path), "max_steps": 3}, snr_prompt_selection=True, **settings)
    trainer = trainer_class(policy_path, length_reward, args, prompts)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=3))
    trainer.add_callback(RewardVarianceStopCallback(trainer, start_generations=1))
    trainer.add_callback(GradientSNRCallback(trainer, num_buckets=2))
    trainer.add_callback(CostCallback(trainer))
    trainer.train()
    ours = logged(trainer) - of_trl
    for key in ("mi/pooled_steps", "mi/regime/collapsed", "snr/predicted_variance", "cost/seconds", "grad/batch_norm"):
        assert key in ours
    known = documented()
    assert sorted(key for key in ours if not any(one.fullmatch(key) for one in known)) == []


class Shown(TrainerCallback):
    """What trackers and the console get of the filter, of reasoning and of health."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "mi/tokens" in state.log_history[-1]:
            self.keys = [key for key in logs if key.startswith(("mi/", "snr/", "health/"))]


def test_what_is_shown_by_default_is_what_the_page_says(policy_path, prompts, tmp_path):
    args = SNRFilteredGRPOConfig(**{**RUN, "output_dir": str(tmp_path), "max_steps": 2})
    trainer = SNRFilteredGRPOTrainer(policy_path, length_reward, args, prompts, callbacks=[shown := Shown()])
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=3))
    trainer.train()
    table = PAGE.read_text(encoding="utf-8").partition("| shown by default |")[2].partition("\n\n")[0]
    assert shown.keys == re.findall(r"`([^`]+)`", table)
