"""Dynamic sampling through real training runs: a batch that keeps too little is filled up."""

import pytest
import torch
from conftest import assert_same_parameters, parameters_of
from datasets import Dataset, IterableDataset
from replay import GROUP_SIZE, Recorder, Replay, assert_close, gradients_of
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer
from ragen2_trl.callbacks.rollouts import watch_rollouts
from ragen2_trl.trainers.refilling import PromptStream, round_size

WORDS = ["Go right", "Up", "Down", "Left or right", "Where is the goal", "The lake is frozen", "Go up", "Go left"]
VARIED, FLAT = [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]


def make_replay(policy_path, varied):
    """Replayed completions: the prompts whose numbers are given have reward variance, the others none."""
    rewards = {prompt: VARIED if number in varied else FLAT for number, prompt in enumerate(WORDS)}
    return Replay(AutoTokenizer.from_pretrained(policy_path), rewards)


def train(policy_path, args, replay, prompts=WORDS, callbacks=(), resume=None):
    trainer = SNRFilteredGRPOTrainer(
        policy_path,
        Replay.reward,
        args,
        Dataset.from_dict({"prompt": prompts}),
        rollout_func=replay.rollout,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rows_of(trainer):
    return [row for row in trainer.state.log_history if "snr/refill_rounds" in row]


class Batches(TrainerCallback):
    """Every batch that a trainer's loss sees, and the rows that generation was asked for."""

    def __init__(self):
        self.batches, self.asked = [], []

    def watch(self, trainer):
        compute, sample = trainer._compute_loss, trainer._sample_and_score

        def kept(model, inputs):
            self.batches.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
            return compute(model, inputs)

        def asked(inputs):
            self.asked.append([row["prompt"] for row in inputs])
            return sample(inputs)

        trainer._compute_loss, trainer._sample_and_score = kept, asked


@pytest.mark.parametrize("varied", [{0, 3}, {5}, {1, 2, 3, 4, 5, 6, 7}])
def test_a_batch_is_filled_up_with_kept_groups(policy_path, make_args, varied):
    args = make_args(per_device_train_batch_size=16, snr_refill_rounds=50, max_steps=2, snr_strategy="none")
    trainer = train(policy_path, args, make_replay(policy_path, varied))
    for row in rows_of(trainer):
        assert row["snr/refilled_groups"] == 4
        assert row["snr/prompts_used"] >= 4
    assert trainer.state.num_input_tokens_seen > 0


def test_the_update_is_that_of_grpo_on_the_groups_that_filled_the_batch(policy_path, make_args):
    replay = make_replay(policy_path, {0, 3, 5, 6})
    seen = Batches()
    recorder = Recorder()
    args = make_args(
        per_device_train_batch_size=16,
        snr_refill_rounds=20,
        max_steps=1,
        snr_strategy="none",
        learning_rate=0.0,
        max_grad_norm=0.0,
    )
    trainer = SNRFilteredGRPOTrainer(
        policy_path,
        Replay.reward,
        args,
        Dataset.from_dict({"prompt": WORDS}),
        rollout_func=replay.rollout,
        callbacks=[recorder],
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    seen.watch(trainer)
    trainer.train()
    (batch,) = seen.batches
    assert len(batch["prompt_ids"]) == 16
    texts = trainer.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    groups = [text for text in dict.fromkeys(texts) for _ in range(texts.count(text) // GROUP_SIZE)]
    assert set(groups) <= {WORDS[number] for number in (0, 3, 5, 6)}
    plain = make_args(snr=False, per_device_train_batch_size=16, max_steps=1, learning_rate=0.0, max_grad_norm=0.0)
    expected = gradients_of(GRPOTrainer, policy_path, plain, replay, groups)[0]
    assert_close(recorder.gradients[0], expected)


def test_the_cap_trains_on_what_there_is(policy_path, make_args):
    args = make_args(per_device_train_batch_size=16, snr_refill_rounds=1, max_steps=1, snr_strategy="none")
    trainer = train(policy_path, args, make_replay(policy_path, {5}))
    (row,) = rows_of(trainer)
    assert row["snr/refill_rounds"] == 1
    assert 0 <= row["snr/refilled_groups"] < 4
    assert row["snr/prompts_used"] == 8


def test_prompts_without_variance_end_in_empty_steps_and_not_in_a_hang(policy_path, make_args):
    args = make_args(per_device_train_batch_size=16, snr_refill_rounds=3, max_steps=10, snr_max_empty_steps=2)
    trainer = train(policy_path, args, make_replay(policy_path, set()))
    assert trainer.state.global_step == 2
    for row in rows_of(trainer):
        assert (row["snr/refill_rounds"], row["snr/refilled_groups"], row["snr/prompts_used"]) == (3, 0, 16)


def test_a_full_batch_is_not_refilled_and_trains_as_without(policy_path, make_args):
    replay = make_replay(policy_path, set(range(8)))
    states = []
    for rounds in (0, 5):
        args = make_args(per_device_train_batch_size=16, snr_refill_rounds=rounds, max_steps=3, snr_strategy="none")
        trainer = train(policy_path, args, replay)
        states.append(parameters_of(trainer))
    assert [row["snr/refill_rounds"] for row in rows_of(trainer)] == [0, 0, 0]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def surplus_run(policy_path, make_args, **overrides):
    """Few groups at first, so that a round overshoots: more are kept than there is room for."""
    settings = {"per_device_train_batch_size": 16, "snr_refill_rounds": 20, "max_steps": 6, "snr_strategy": "none"}
    return make_args(**{**settings, **overrides}), make_replay(policy_path, {0, 3, 5})


def test_surplus_groups_wait_for_the_next_step(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args)
    rows = rows_of(train(policy_path, args, replay))
    waiting = [row["snr/waiting_groups"] for row in rows]
    assert any(waiting)
    assert [row["snr/carried_groups"] for row in rows] == [0, *waiting[:-1]]
    assert not any(row["snr/stale_groups"] for row in rows)


def test_groups_older_than_allowed_are_left_behind(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, snr_max_staleness=0)
    rows = rows_of(train(policy_path, args, replay))
    assert any(row["snr/stale_groups"] for row in rows)
    assert not any(row["snr/waiting_groups"] or row["snr/carried_groups"] for row in rows)


def test_a_second_run_of_a_trainer_begins_without_groups_of_the_first(policy_path, make_args):
    """It ends while surplus groups wait, and the next one has another dataset."""
    for steps in range(1, 7):
        args, replay = surplus_run(policy_path, make_args, max_steps=steps)
        trainer = train(policy_path, args, replay)
        if rows_of(trainer)[-1]["snr/waiting_groups"]:
            break
    assert rows_of(trainer)[-1]["snr/waiting_groups"] > 0
    asked = Batches()
    asked.watch(trainer)
    trainer.train_dataset = Dataset.from_dict({"prompt": WORDS[:4]})
    trainer.train()
    first = rows_of(trainer)[0]
    assert first["snr/carried_groups"] == first["snr/stale_groups"] == 0
    assert {prompt for prompts in asked.asked for prompt in prompts} <= set(WORDS[:4])


def test_callbacks_see_the_first_prompts_of_a_step_and_no_round_of_a_refill(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=3)
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": WORDS}), rollout_func=replay.rollout
    )
    seen = []
    watch_rollouts(trainer, lambda sampled: seen.append(sampled.rewards.shape))
    trainer.train()
    assert any(row["snr/refill_rounds"] for row in rows_of(trainer))
    assert seen == [(4, GROUP_SIZE)] * 3


def test_carried_groups_keep_the_log_probs_of_the_policy_that_sampled_them(policy_path, make_args):
    """The importance ratio of each row is that of the weights now to the weights then."""
    args, replay = surplus_run(policy_path, make_args, learning_rate=1e-2)
    seen, then = Batches(), []
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": WORDS}), rollout_func=replay.rollout
    )
    seen.watch(trainer)

    class Weights(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            then.append(parameters_of(trainer))

    trainer.add_callback(Weights())
    trainer.train()
    rows = rows_of(trainer)
    step = next(number for number, row in enumerate(rows) if row["snr/carried_groups"])
    batch = seen.batches[step]
    carried = int(rows[step]["snr/carried_groups"]) * GROUP_SIZE
    old = batch["old_per_token_logps"]
    mask = batch["completion_mask"].bool()
    matches = []
    for weights in (then[step - 1], then[step]):
        trainer.model.load_state_dict(weights, strict=False)
        logps, _ = trainer._logps_and_entropies(batch)
        matches.append([torch.allclose(a[m], b[m], atol=1e-4) for a, b, m in zip(old, logps, mask, strict=True)])
    before, now = matches
    assert sum(before) == carried
    assert sum(now) == len(old) - carried
    assert all(a != b for a, b in zip(before, now, strict=True))


def test_a_resumed_run_continues_with_the_same_prompts_and_the_same_waiting_groups(policy_path, make_args, tmp_path):
    args, replay = surplus_run(policy_path, make_args, save_strategy="steps", save_steps=1)
    whole = train(policy_path, args, replay)
    waiting = [row["snr/waiting_groups"] for row in rows_of(whole)]
    cut = next(number for number, count in enumerate(waiting[:-1], start=1) if count)
    resumed = train(policy_path, args, replay, resume=str(tmp_path / "run" / f"checkpoint-{cut}"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    keys = ("snr/waiting_groups", "snr/carried_groups", "snr/prompts_used")
    assert [[row[key] for key in keys] for row in rows_of(resumed)] == [
        [row[key] for key in keys] for row in rows_of(whole)
    ]


def test_each_round_asks_for_whole_groups_of_prompts_from_the_dataset(policy_path, make_args):
    args, replay = surplus_run(policy_path, make_args, max_steps=2)
    seen = Batches()
    trainer = SNRFilteredGRPOTrainer(
        policy_path, Replay.reward, args, Dataset.from_dict({"prompt": WORDS}), rollout_func=replay.rollout
    )
    seen.watch(trainer)
    trainer.train()
    assert len(seen.asked) > 2
    for asked in seen.asked:
        groups = [asked[i : i + GROUP_SIZE] for i in range(0, len(asked), GROUP_SIZE)]
        assert all(len(set(group)) == 1 and group[0] in WORDS for group in groups)


def test_a_stream_of_prompts_meets_every_row_once_before_any_twice():
    stream = PromptStream(num_rows=7, seed=1)
    drawn = stream.draw(3) + stream.draw(11)
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == list(range(7))
    assert drawn[:7] != drawn[7:]
    assert PromptStream(7, seed=1, drawn=3).draw(11) == drawn[3:]
    assert PromptStream(7, seed=2).draw(7) != drawn[:7]


def test_a_round_is_as_large_as_the_kept_fraction_makes_it():
    sizes = {"limit": 16, "group_size": 4, "num_processes": 1}
    assert round_size(need=4, kept=8, sampled=16, **sizes) == 8
    assert round_size(need=8, kept=1, sampled=16, **sizes) == 16
    assert round_size(need=8, kept=0, sampled=16, **sizes) == 16
    assert round_size(need=1, kept=16, sampled=16, limit=16, group_size=4, num_processes=3) == 3


def test_datasets_without_rows_are_refused(policy_path, make_args):
    dataset = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in WORDS))
    with pytest.raises(ValueError, match="snr_refill_rounds=2 draws further prompts by their row"):
        SNRFilteredGRPOTrainer(
            policy_path, lambda completions, **_: [0.0] * len(completions), make_args(snr_refill_rounds=2), dataset
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"snr_refill_rounds": -1}, "snr_refill_rounds=-1 is out of range"),
        ({"snr_max_staleness": -1}, "snr_max_staleness=-1 is out of range"),
        ({"snr_refill_rounds": 1, "snr_mode": "soft"}, "snr_mode='soft' selects nothing"),
        ({"snr_refill_rounds": 1, "snr_loss_scaling": "sqrt"}, "snr_loss_scaling='sqrt'"),
        ({"snr_refill_rounds": 1, "scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"snr_refill_rounds": 1, "multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
    ],
)
def test_a_bad_setting_is_named(make_args, settings, message):
    with pytest.raises(ValueError, match=message):
        make_args(**settings)
