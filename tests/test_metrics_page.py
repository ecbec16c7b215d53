"""The registry of metrics leaves none out, and docs/metrics.md is made from it."""

import re

import pytest
from conftest import RUN
from datasets import Dataset
from measured_runs import length_reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import (
    CostCallback,
    MutualInformationCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
)
from ragen2_trl.metrics import FAMILIES, METRICS, metric
from scripts import draw_lossless
from scripts.make_metrics_page import PAGE, table, with_tables


def test_the_committed_page_is_what_the_registry_generates():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page
    assert set(re.findall(r"<!-- metrics: (\w+) -->", page)) == {"shown", *FAMILIES}


def test_no_key_is_two_metrics():
    names = [re.sub(r"\{k\}", "1", one.name) for one in METRICS]
    assert len(names) == len(set(names))
    places = {"scope": "trajectory/turn_1", "task": "lake", "bound": "", "form": "seq"}
    places |= {"side": "low", "extreme": "min"}
    for one in METRICS:
        assert metric(one.name.format(k=1, **places)) is one


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
    trainer.add_callback(CostCallback(trainer))
    trainer.train()
    ours = logged(trainer) - of_trl
    for key in ("mi/pooled_steps", "mi/regime/collapsed", "snr/predicted_variance", "cost/seconds"):
        assert key in ours
    assert sorted(key for key in ours if metric(key) is None) == []


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
    assert shown.keys == re.findall(r"^\| `([^`]+)` \|", table("shown"), re.MULTILINE)


def test_every_bar_of_the_chart_is_a_stored_ratio():
    stored, (axes,) = draw_lossless.measured(), draw_lossless.draw().axes
    drawn = [round(bar.get_width(), 2) for bar in axes.patches]
    shapes = draw_lossless.SHAPES
    assert drawn == [stored[shape, dead][0] for dead in draw_lossless.DEAD for shape in shapes] and len(drawn) == 15
