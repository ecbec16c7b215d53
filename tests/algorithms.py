"""The three filtered trainers, each with the one it is compared with. All promises are made for each of them.

`for_each` runs a test for each, `cases` for named settings of each. A run costs a third of a second of one core.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import RUN
from datasets import Dataset
from replay import REWARDS, Recorder, Replay, move_away
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ragen2_trl import (
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
    SNRFilteredRLOOConfig,
    SNRFilteredRLOOTrainer,
)


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A filtered trainer, and the plain one that the kept groups alone are trained with.

    Args:
        name: In the ids of tests.
        trainer, config: With the filter.
        plain_trainer, plain_config: TRL's, or for PPO, which TRL does not have any more, the same ones.
        without_filter: Settings that make them so.
    """

    name: str
    trainer: type
    config: type
    plain_trainer: type
    plain_config: type
    without_filter: dict[str, Any] = field(default_factory=dict)

    def args(self, folder: Any, plain: bool = False, **settings: Any) -> Any:
        own = self.without_filter if plain else {}
        config = self.plain_config if plain else self.config
        return config(**{"output_dir": str(folder), **RUN, **own, **settings})

    def make(
        self, policy: Any, args: Any, rewards: Any, prompts: Any = None, *, trainer_class: Any = None, **kwargs: Any
    ) -> Any:
        """A trainer on replayed completions (`rewards` is a `Replay`), or on its own (a reward function)."""
        replays = isinstance(rewards, Replay)
        if trainer_class is None:
            trainer_class = self.trainer if isinstance(args, self.config) else self.plain_trainer
        prompts = list(rewards.rewards) if prompts is None else prompts
        dataset = Dataset.from_dict({"prompt": prompts}) if isinstance(prompts, (list, tuple)) else prompts
        trainer = trainer_class(policy, rewards.score if replays else rewards, args, dataset, **kwargs)
        if replays:
            rewards.attach(trainer)
        return trainer

    def gradients(self, policy: Any, args: Any, replay: Replay, prompts: Any = None, **kwargs: Any) -> list[dict]:
        """Those of each optimizer step, at weights that are not the reference policy's."""
        recorder = Recorder()
        trainer = self.make(policy, args, replay, prompts, callbacks=[recorder], **kwargs)
        move_away(trainer.model)
        trainer.train()
        return recorder.gradients

    def plain_gradient(self, policy: str, prompts: Any, equal_lengths: bool = False, **settings: Any) -> dict:
        """The gradient of the plain trainer on groups of REWARDS, in one micro-batch. Computed once."""
        return _plain_gradient(self, policy, tuple(prompts), equal_lengths, tuple(sorted(settings.items())))


@cache
def _plain_gradient(algorithm: Algorithm, policy: str, prompts: Any, equal_lengths: bool, settings: Any) -> dict:
    rows = {"per_device_train_batch_size": len(prompts) * RUN["num_generations"], "max_steps": 1}
    args = algorithm.args(Path(policy).parent / "plain", plain=True, **{**rows, **STILL, **dict(settings)})
    (gradient,) = algorithm.gradients(policy, args, replay_of(policy, equal_lengths=equal_lengths), prompts)
    return gradient


@cache
def _tokenizer(policy: str) -> Any:
    return AutoTokenizer.from_pretrained(policy)


def replay_of(policy: str, rewards: Any = None, equal_lengths: bool = False) -> Replay:
    return Replay(_tokenizer(policy), REWARDS if rewards is None else rewards, equal_lengths)


def length_reward(completions, **columns):
    return [len(completion) / 10 for completion in completions]


# Gradients are compared at weights that do not move, so that several steps see the same policy.
STILL = {"learning_rate": 0.0, "max_grad_norm": 0.0}

ALGORITHMS = {
    "grpo": Algorithm("grpo", SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig, GRPOTrainer, GRPOConfig),
    "rloo": Algorithm("rloo", SNRFilteredRLOOTrainer, SNRFilteredRLOOConfig, RLOOTrainer, RLOOConfig),
    "ppo": Algorithm(
        "ppo",
        SNRFilteredPPOTrainer,
        SNRFilteredPPOConfig,
        SNRFilteredPPOTrainer,
        SNRFilteredPPOConfig,
        without_filter={"snr_strategy": "all"},
    ),
}
GRPO, RLOO, PPO = ALGORITHMS.values()
LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]  # of GRPO

for_each = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def cases(slow: tuple[str, ...] = (), **of_each: dict[str, dict[str, Any]]) -> Any:
    """`cases(grpo={"kl": {"beta": 0.1}}, ...)`: `algorithm` and `settings`, with ids as `grpo-kl`. Those whose ids are
    in `slow` are marked so; each promise keeps one for each algorithm that is not."""
    params = [
        pytest.param(
            ALGORITHMS[name],
            settings,
            id=f"{name}-{case}",
            marks=[pytest.mark.slow] if f"{name}-{case}" in slow else [],
        )
        for name, named in of_each.items()
        for case, settings in named.items()
    ]
    return pytest.mark.parametrize(("algorithm", "settings"), params)
