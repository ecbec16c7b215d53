"""Promise 4: whole groups are kept or dropped, by their raw weighted rewards."""

import pytest
import torch
from algorithms import cases, for_each, replay_of
from conftest import PROMPTS, log_rows
from replay import KEPT, REWARDS, Replay, move_away

ONE_STEP = {"per_device_train_batch_size": 32, "max_steps": 1}


def kept_by(algorithm, args, replay, policy_path, reward_funcs=None):
    """Which prompts were trained on, and with how many completions each."""
    kept = {}

    class KeptPrompts(algorithm.trainer):
        def _compute_loss(self, model, inputs):
            for ids in inputs["prompt_ids"]:
                prompt = self._tokenizer.decode(ids, skip_special_tokens=True)
                kept[prompt] = kept.get(prompt, 0) + 1
            return super()._compute_loss(model, inputs)

    trainer = algorithm.make(
        policy_path, args, reward_funcs or replay, list(replay.rewards), trainer_class=KeptPrompts
    )
    replay.attach(trainer)
    move_away(trainer.model)
    trainer.train()
    return kept


GRPO_SCALES = {
    f"{scale} {aggregation}": {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    for scale in ("group", "batch", "none")
    for aggregation in ("sum_then_normalize", "normalize_then_sum")
}


@cases(
    slow=tuple(f"grpo-{name}" for name in GRPO_SCALES if name != "batch normalize_then_sum"),
    grpo=GRPO_SCALES,
    rloo={
        "kl": {"beta": 100.0},  # a penalty that would order the groups by their divergence
        "clipped": {"reward_clip_range": (0.9, 0.95)},  # to which most groups are alike
        "normalised": {"normalize_advantages": True},
    },
    ppo={"shared": {}, "kl": {"beta": 100.0}},
)
def test_whole_groups_are_kept_by_their_raw_weighted_rewards(algorithm, settings, policy_path, tmp_path):
    """Two reward functions whose weighted sum is REWARDS, with offsets that cancel in it."""
    replay = replay_of(policy_path)

    def first(prompts, **kwargs):
        return [r + 0.5 * len(prompt) for r, prompt in zip(replay.score(prompts), prompts, strict=True)]

    def second(prompts, **kwargs):
        return [-0.25 * len(prompt) for prompt in prompts]

    layout = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 1}
    args = algorithm.args(tmp_path, reward_weights=[1.0, 2.0], **layout, **settings)
    assert kept_by(algorithm, args, replay, policy_path, [first, second]) == dict.fromkeys(KEPT, 4)


def entropy_by_hand(model, tokenizer, prompt, completion) -> float:
    """Mean entropy in nats of the distributions that the completion's tokens were drawn from."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    logits = model(torch.tensor([prompt_ids + completion])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.distributions.Categorical(logits=logits.double()).entropy().mean().item()


def scores_by_hand(score, trainer, replay):
    def per_group(of_row):
        return torch.tensor([[of_row(p, ids) for ids in replay.completions[p]] for p in PROMPTS])

    if score == "length":
        return per_group(lambda prompt, ids: float(len(ids))).mean(dim=1)
    if score.startswith("entropy"):
        with torch.no_grad():
            entropies = per_group(lambda *row: entropy_by_hand(trainer.model, replay.tokenizer, *row))
        return entropies.mean(dim=1) if score == "entropy" else entropies.std(dim=1)
    rewards = torch.tensor([REWARDS[prompt] for prompt in PROMPTS])
    return rewards.std(dim=1) if score == "reward_std" else rewards.sum(dim=1)


@cases(
    slow=("grpo-entropy", "grpo-length", "grpo-reward_std", "grpo-reward_sum", "rloo-length", "ppo-entropy"),
    grpo={
        **{score: {"snr_score": score} for score in ("entropy", "entropy_variance", "length", "reward_std")},
        "reward_sum": {"snr_score": "reward_sum", "snr_strategy": "top_k"},
    },
    rloo={score: {"snr_score": score} for score in ("entropy", "length")},
    ppo={score: {"snr_score": score} for score in ("entropy", "length")},
)
def test_groups_are_scored_by_the_quantity_that_is_named(algorithm, settings, policy_path, tmp_path):
    replay = replay_of(policy_path)
    still = {"critic_lr": 0.0} if algorithm.name == "ppo" else {}
    args = algorithm.args(tmp_path, learning_rate=0.0, **ONE_STEP, **still, **settings)
    trainer = algorithm.make(policy_path, args, replay)
    trainer.train()
    scores = scores_by_hand(settings["snr_score"], trainer, replay)
    row = log_rows(trainer)[0]
    assert row["snr/score_mean"] == pytest.approx(scores.mean().item(), rel=1e-4)
    assert row["snr/score_max"] == pytest.approx(scores.max().item(), rel=1e-4)


@for_each
def test_random_scores_choose_among_the_groups_with_signal(algorithm, policy_path, tmp_path):
    settings = {**ONE_STEP, "snr_score": "random", "snr_strategy": "top_k", "snr_value": 0.25, "max_steps": 2}
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **settings), replay_of(policy_path))
    trainer.train()
    first, second = log_rows(trainer)
    assert first["snr/kept_groups"] == second["snr/kept_groups"] == 2
    assert first["snr/score_mean"] != second["snr/score_mean"]


class WithoutSome(Replay):
    """Prompt 2 has no reward, nor have the winners of prompt 0."""

    def score(self, prompts, **kwargs):
        return [
            None if prompt == PROMPTS[2] or (prompt == PROMPTS[0] and reward == 1.0) else reward
            for reward, prompt in zip(super().score(prompts), prompts, strict=True)
        ]


class OnceInfinite(Replay):
    """Prompt 2 has rewards without a bound."""

    def score(self, prompts, **kwargs):
        scores = zip(super().score(prompts), prompts, strict=True)
        return [float("inf") if prompt == PROMPTS[2] else reward for reward, prompt in scores]


@for_each
def test_completions_without_a_reward_are_left_out_of_the_scores(algorithm, policy_path, tmp_path):
    args = algorithm.args(tmp_path, snr_strategy="nonzero", **ONE_STEP)
    trainer = algorithm.make(policy_path, args, WithoutSome(replay_of(policy_path).tokenizer, REWARDS))
    trainer.train()
    row = log_rows(trainer)[0]
    assert row["snr/kept_groups"] == 3  # prompts 5, 6 and 7
    assert row["snr/zero_variance_fraction"] == pytest.approx(5 / 8)
    assert all(value == value for value in row.values())


@for_each
def test_an_infinite_reward_neither_spoils_the_batch_nor_the_range_of_rewards(algorithm, policy_path, tmp_path):
    args = algorithm.args(tmp_path, snr_strategy="nonzero", **ONE_STEP)
    trainer = algorithm.make(policy_path, args, OnceInfinite(replay_of(policy_path).tokenizer, REWARDS))
    trainer.train()
    row = log_rows(trainer)[0]
    assert row["snr/kept_groups"] == 4  # prompts 0, 5, 6 and 7
    assert row["snr/dropped_all_best"] == 1 / 8
    assert trainer._strategy.reward_range == (0.0, 1.0)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
