"""Trainers of each algorithm on replayed completions, for `backends.py`."""

from collections.abc import Collection

from datasets import Dataset
from replay import GROUP_SIZE, REWARDS, Replay
from transformers import AutoTokenizer

from ragen2_trl import (
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
    SNRFilteredRLOOConfig,
    SNRFilteredRLOOTrainer,
)

TRAINERS = {
    "grpo": (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig),
    "rloo": (SNRFilteredRLOOTrainer, SNRFilteredRLOOConfig),
    "ppo": (SNRFilteredPPOTrainer, SNRFilteredPPOConfig),
}


class ReplayedTurns(Replay):
    """Completions of five tokens or more are of two turns, with a reward each and two of the environment's tokens
    between them."""

    def rollout(self, prompts, trainer):
        played = super().rollout(prompts, trainer)
        masks = [[1] * len(ids) for ids in played["completion_ids"]]
        for mask in masks:
            if len(mask) >= 5:
                mask[2:4] = 0, 0
        turn_rewards = [[0.1 * len(mask), -0.2] for mask in masks]
        return {**played, "env_mask": masks, "turn_rewards": turn_rewards}


def make_trainer(
    policy_path: str,
    settings: dict,
    prompts: list[str],
    algorithm: str = "grpo",
    turns: bool = False,
    equal_lengths: bool = False,
    flat_steps: Collection[int] = (),
    **kwargs,
):
    """A trainer that samples nothing.

    Args:
        policy_path: folder of the policy.
        settings: of its configuration.
        prompts: of the dataset.
        algorithm: of `TRAINERS`.
        turns: whether episodes have several turns, which RLOO does not know.
        equal_lengths: of all completions.
        flat_steps: optimizer steps without reward variance.
        **kwargs: for the trainer.
    """
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    replay = (ReplayedTurns if turns else Replay)(tokenizer, REWARDS, equal_lengths)
    rewards = {
        (prompt, tuple(ids)): reward
        for prompt, completions in replay.completions.items()
        for ids, reward in zip(completions, REWARDS[prompt], strict=True)
    }

    def reward(prompts, completion_ids, trainer_state, **columns):
        flat = trainer_state.global_step in flat_steps
        own = zip(prompts, completion_ids, strict=True)
        return [0.0 if flat else rewards[prompt, tuple(ids)] for prompt, ids in own]

    trainer_class, config_class = TRAINERS[algorithm]
    rollout = {} if algorithm == "rloo" else {"rollout_func": replay.rollout}
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = trainer_class(policy_path, reward, config_class(**settings), dataset, **rollout, **kwargs)
    if algorithm == "rloo":
        _replay_single_turns(trainer, replay)
    return trainer


def _replay_single_turns(trainer, replay: Replay) -> None:
    """TRL's RLOO takes no rollout function."""
    prompts = {tuple(replay.tokenizer(prompt)["input_ids"]): prompt for prompt in replay.completions}

    def replayed(prompt_ids, images, multimodal_fields):
        first = trainer.accelerator.process_index * len(prompt_ids)
        members = [number % GROUP_SIZE for number in range(first, first + len(prompt_ids))]
        own = zip(prompt_ids, members, strict=True)
        return [replay.completions[prompts[tuple(ids)]][member] for ids, member in own]

    trainer._generate_single_turn = replayed
