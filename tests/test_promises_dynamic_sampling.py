"""Dynamic sampling: the promises hold for batches that were filled up with the groups of further prompts."""

import torch
from algorithms import STILL, cases, for_each
from conftest import assert_same_parameters, parameters_of
from datasets import Dataset
from dynamic_samplings import WORDS, Seen, replay_with, rows_of
from replay import GROUP_SIZE, Recorder, assert_close, move_away
from transformers import TrainerCallback

# Few groups at first, so that a round overshoots: more are kept than there is room for.
SURPLUS = {
    "snr_dynamic_sampling_rounds": 20,
    "snr_strategy": "nonzero",
    "per_device_train_batch_size": 16,
    "max_steps": 6,
}


def surplus_run(algorithm, policy_path, tmp_path, **settings):
    args = algorithm.args(tmp_path, **{**SURPLUS, **settings})
    return algorithm.make(policy_path, args, replay_with(policy_path, {0, 3, 5}))


@cases(
    slow=("ppo-shared",),
    grpo={"kl": {"beta": 0.1}},
    rloo={"kl": {"beta": 0.1}},
    ppo={"shared": {"beta": 0.1, "critic_lr": 0.0}, "separate": {"value_head": "separate", "critic_lr": 0.0}},
)
def test_the_update_is_the_plain_one_on_the_groups_that_filled_the_batch(algorithm, settings, policy_path, tmp_path):
    replay = replay_with(policy_path, {0, 3, 5, 6})
    recorder = Recorder()
    settings = {**STILL, **settings, "per_device_train_batch_size": 16, "max_steps": 1}
    args = algorithm.args(tmp_path, **{**SURPLUS, **settings})
    trainer = algorithm.make(policy_path, args, replay, callbacks=[recorder])
    move_away(trainer.model)
    seen = Seen(trainer)
    trainer.train()
    (batch,) = seen.batches
    assert len(batch["prompt_ids"]) == 16 and len(seen.asked) > 1
    texts = trainer.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    groups = [text for text in dict.fromkeys(texts) for _ in range(texts.count(text) // GROUP_SIZE)]
    assert set(groups) <= {WORDS[number] for number in (0, 3, 5, 6)}
    plain_args = algorithm.args(tmp_path, plain=True, **settings)
    assert_close(recorder.gradients[0], algorithm.gradients(policy_path, plain_args, replay, groups)[0])


def old_logps(batch, logps):
    """Per token for GRPO and PPO, per completion for RLOO."""
    mask = batch["completion_mask"].bool()
    if "old_logps" in batch:
        return [[a, b] for a, b in zip(batch["old_logps"], (logps * mask).sum(dim=1), strict=True)]
    return [[a[m], b[m]] for a, b, m in zip(batch["old_per_token_logps"], logps, mask, strict=True)]


def old_values(batch, values):
    mask = batch["completion_mask"].bool()
    return [[a[m], b[m]] for a, b, m in zip(batch["old_values"], values, mask, strict=True)]


@cases(
    slow=("ppo-separate",),
    grpo={"default": {}},
    rloo={"default": {}},
    ppo={"shared": {"critic_lr": 1e-2}, "separate": {"critic_lr": 1e-2, "value_head": "separate"}},
)
def test_carried_groups_keep_what_the_policy_that_sampled_them_made_of_them(
    algorithm, settings, policy_path, tmp_path
):
    """The importance ratio of each row is that of the weights now to the weights then, and so are old values."""
    trainer = surplus_run(algorithm, policy_path, tmp_path, **settings)
    move_away(trainer.model)
    seen, then = Seen(trainer), []

    class Weights(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            then.append(parameters_of(trainer))

    trainer.add_callback(Weights())
    trainer.train()
    rows = rows_of(trainer)
    step = next(number for number, row in enumerate(rows) if row["snr/carried_groups"])
    batch = seen.batches[step]
    carried = int(rows[step]["snr/carried_groups"]) * GROUP_SIZE
    pairs = []
    for weights in (then[step - 1], then[step]):
        trainer.model.load_state_dict(weights, strict=False)
        pairs.append([old_logps(batch, trainer._log_probs.now(batch))])
        if algorithm.name == "ppo":
            pairs[-1].append(old_values(batch, trainer._values(batch)))
    for before, now in zip(*pairs, strict=True):
        before, now = ([torch.allclose(a, b, atol=1e-4) for a, b in of_rows] for of_rows in (before, now))
        assert sum(before) == carried
        assert sum(now) == len(batch["prompt_ids"]) - carried
        assert all(a != b for a, b in zip(before, now, strict=True))


@cases(
    slow=("ppo-shared",),
    grpo={"default": {}},
    rloo={"default": {}},
    ppo={"shared": {"critic_lr": 1e-2}, "separate": {"value_head": "separate", "critic_lr": 1e-2}},
)
def test_a_resumed_run_continues_with_the_same_prompts_and_the_same_waiting_groups(
    algorithm, settings, policy_path, tmp_path
):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, **settings}
    whole = surplus_run(algorithm, policy_path, tmp_path, **settings)
    whole.train()
    waiting = [row["snr/waiting_groups"] for row in rows_of(whole)]
    assert waiting[0] > 0
    resumed = surplus_run(algorithm, policy_path, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
    keys = ("snr/waiting_groups", "snr/carried_groups", "snr/prompts_used")
    kept = [[[row[key] for key in keys] for row in rows_of(trainer)] for trainer in (whole, resumed)]
    assert kept[0] == kept[1]


@for_each
def test_a_second_run_of_a_trainer_begins_without_groups_of_the_first(algorithm, policy_path, tmp_path):
    """It ends while surplus groups wait, and the next one has another dataset."""
    for steps in range(1, 7):
        trainer = surplus_run(algorithm, policy_path, tmp_path, max_steps=steps)
        trainer.train()
        if rows_of(trainer)[-1]["snr/waiting_groups"]:
            break
    assert rows_of(trainer)[-1]["snr/waiting_groups"] > 0
    seen = Seen(trainer)
    trainer.train_dataset = Dataset.from_dict({"prompt": WORDS[:4]})
    trainer.train()
    first = rows_of(trainer)[0]
    assert first["snr/carried_groups"] == first["snr/stale_groups"] == 0
    assert {prompt for prompts in seen.asked for prompt in prompts} <= set(WORDS[:4])


@for_each
def test_prompts_without_variance_end_in_empty_steps_and_not_in_a_hang(algorithm, policy_path, tmp_path):
    settings = {
        "snr_dynamic_sampling_rounds": 3,
        "max_steps": 10,
        "snr_max_empty_steps": 2,
        "per_device_train_batch_size": 16,
    }
    trainer = algorithm.make(policy_path, algorithm.args(tmp_path, **settings), replay_with(policy_path, set()))
    start = parameters_of(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert_same_parameters(start, parameters_of(trainer))
    for row in rows_of(trainer):
        assert (row["snr/sampling_rounds"], row["snr/trained_groups"], row["snr/prompts_used"]) == (3, 0, 16)
