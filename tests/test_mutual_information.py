"""The callback through real training runs: what it measures, when, and what it leaves alone."""

import math

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from measured_runs import ROW, length_reward, rloo_args, rows_of, run, warnings_of
from replay import GROUP_SIZE, KEPT, REWARDS, Replay
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer, RLOOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer, information_metrics
from ragen2_trl.instrument import judge
from ragen2_trl.instrument.verdict import MIN_STEPS_BETWEEN
from ragen2_trl.record.facts import facts
from ragen2_trl.record.run import run_of
from ragen2_trl.record.saved_measurement import read_measurement
from ragen2_trl.report.figures import points_of
from ragen2_trl.report.page import render_report


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer, SNRFilteredGRPOTrainer])
def test_training_with_the_callback_is_bit_identical_to_training_without(
    trainer_class, policy_path, prompts, make_args
):
    states = []
    for callback in (False, {"every": 1}):
        make = rloo_args if trainer_class is RLOOTrainer else (lambda make_args: make_args())
        args = make(make_args) if trainer_class is not GRPOTrainer else make_args(snr=False)
        trainer, _ = run(trainer_class, policy_path, args, prompts, callback=callback)
        states.append((parameters_of(trainer), torch.get_rng_state(), trainer.model.training))
        mi = rows_of(trainer)
        assert len(mi) == (0 if callback is False else 3)
    assert_same_parameters(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    assert states[0][2] == states[1][2]


def naive_metrics(model, tokenizer, replay, temperature):
    """Every pair in full, one at a time."""
    rows, index, lengths = [], [], []
    prompts = [tokenizer(prompt)["input_ids"] for prompt in replay.rewards]
    for number, prompt in enumerate(replay.rewards):
        for completion in replay.completions[prompt]:
            row = []
            for ids in prompts:
                with torch.no_grad():
                    logits = model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1] / temperature
                row.append(logits.log_softmax(-1)[range(len(completion)), completion].sum())
            rows.append(torch.stack(row))
            index.append(number)
            lengths.append(len(completion))
    return information_metrics(torch.stack(rows), torch.tensor(lengths), torch.tensor(index))


def test_it_measures_all_rollouts_with_the_weights_that_sampled_them(policy_path, make_args):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    replay = Replay(tokenizer, REWARDS)
    for group in replay.completions.values():  # no white space, which counts as no reasoning at either end
        group[:] = [[40 + token % 100 for token in completion] for completion in group]
    args = make_args(per_device_train_batch_size=32, max_steps=1, temperature=0.7, learning_rate=0.1)
    trainer, _ = run(
        SNRFilteredGRPOTrainer,
        policy_path,
        args,
        Dataset.from_dict({"prompt": PROMPTS}),
        Replay.reward,
        {"every": 1},
        rollout_func=replay.rollout,
    )
    (row,) = rows_of(trainer)
    assert row["snr/kept_groups"] == len(KEPT) < len(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(policy_path).eval()
    expected = naive_metrics(model, tokenizer, replay, temperature=0.7)
    assert expected["num_completions"] == len(PROMPTS) * GROUP_SIZE
    for key, value in expected.items():
        assert row[f"mi/first_turn/{key}"] == pytest.approx(value, abs=1e-4), key


def test_the_numbers_share_the_row_of_trls_metrics_and_are_finite(policy_path, prompts, make_args):
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False), prompts, callback={"every": 1})
    for row in rows_of(trainer):
        assert {"reward", "entropy", "mi/seconds", "mi/tokens", "mi/valid_thinking_rate"} <= row.keys()
        assert all(math.isfinite(value) for key, value in row.items() if key.startswith("mi/"))
        assert row["mi/tokens"] > 0
        assert row["mi/first_turn/num_prompts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "every", "expected"),
    [
        ({"logging_steps": 1, "max_steps": MIN_STEPS_BETWEEN + 2}, None, [1, MIN_STEPS_BETWEEN + 1]),
        ({"logging_steps": 4, "max_steps": 17}, None, [4, 16]),
        ({"logging_steps": 4, "logging_first_step": True, "max_steps": 12}, None, [1, 12]),
        ({"logging_steps": 1, "max_steps": 6}, 3, [3, 6]),
        # One generation for three optimizer steps: the first of them that is due decides.
        ({"logging_steps": 2, "max_steps": 6, "steps_per_generation": 3}, 2, [2, 4]),
    ],
)
def test_it_measures_at_the_steps_that_the_settings_ask_for(
    policy_path, prompts, make_args, settings, every, expected
):
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False, **settings), prompts, callback={"every": every})
    assert [row["step"] for row in rows_of(trainer)] == expected


def test_a_row_holds_the_latest_measurement_of_its_steps_and_the_card_tells_of_it(policy_path, prompts, make_args):
    args = make_args(snr=False, logging_steps=5, max_steps=5)
    trainer, measuring = run(GRPOTrainer, policy_path, args, prompts, callback={"every": 2})
    told = run_of(trainer)
    saved = [read_measurement(path) for path in told.measurements]
    assert [one.step for one in saved] == [2, 4]
    (row,) = rows_of(trainer)
    logged = {key: row[f"mi/first_turn/{key}"] for key in saved[0].metrics}
    assert logged == pytest.approx(saved[1].metrics)
    assert logged["mi_seq"] != pytest.approx(saved[0].metrics["mi_seq"])
    assert row["mi/first_turn/retrieval_accuracy"] == measuring.evidence[-1].retrieval_accuracy
    (fact,) = (fact for fact in facts(told) if fact.key == "mi/first_turn/retrieval_accuracy")
    assert (fact.last.step, fact.last.number) == (4, pytest.approx(saved[1].metrics["retrieval_accuracy"]))


def test_reasonings_are_subsampled_and_prompts_only_above_their_bound(policy_path, prompts, make_args):
    args = make_args(snr=False, per_device_train_batch_size=32, max_steps=1)
    few, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": 1, "num_completions": 5})
    (row,) = rows_of(few)
    assert (row["mi/first_turn/num_completions"], row["mi/first_turn/num_prompts"]) == (5, 8)
    few, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": 1, "max_prompts": 3})
    (row,) = rows_of(few)
    assert (row["mi/first_turn/num_completions"], row["mi/first_turn/num_prompts"]) == (12, 3)


class TwoTurns:
    """Two turns a completion, with an answer of the environment between them that differs from member to member."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def rollout(self, prompts, trainer):
        prompt_ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        generator = torch.Generator().manual_seed(trainer.state.global_step)
        completion_ids, masks = [], []
        for number in range(len(prompts)):
            turns = torch.randint(1, 200, (2, 4), generator=generator).tolist()
            answer = [201 + number % GROUP_SIZE, 205]
            completion_ids.append(turns[0] + answer + turns[1])
            masks.append([1] * 4 + [0] * 2 + [1] * 4)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": masks}


def test_turns_are_compared_within_their_position(policy_path, prompts, make_args):
    rollout = TwoTurns(AutoTokenizer.from_pretrained(policy_path)).rollout
    args = make_args(per_device_train_batch_size=32, max_steps=1, max_completion_length=16)
    trainer, _ = run(SNRFilteredGRPOTrainer, policy_path, args, prompts, callback={"every": 1}, rollout_func=rollout)
    (row,) = rows_of(trainer)
    first, second = (row[f"mi/trajectory/turn_{turn}/num_completions"] for turn in (1, 2))
    assert first + second == row["mi/trajectory/num_completions"] == 32  # every trajectory gives one of its turns
    # Later contexts hold what came before, so that each is a prompt of its own; first ones are shared by a group.
    assert row["mi/trajectory/turn_2/retrieval_chance"] == pytest.approx(1 / second)
    assert row["mi/trajectory/turn_1/retrieval_chance"] >= 1 / 8
    assert row["mi/first_turn/num_completions"] == 32


def test_one_turn_a_completion_logs_no_trajectory_scope(policy_path, prompts, make_args):
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False, max_steps=1), prompts, callback={"every": 1})
    assert not [key for row in rows_of(trainer) for key in row if key.startswith("mi/trajectory")]


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
def test_a_resumed_run_logs_what_the_uninterrupted_run_logs(policy_path, prompts, make_args, tmp_path, flag):
    overrides = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    overrides["restore_callback_states_from_checkpoint"] = flag
    whole, watching = run(SNRFilteredGRPOTrainer, policy_path, make_args(**overrides), prompts, callback={"every": 1})
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    resumed, again = run(
        SNRFilteredGRPOTrainer, policy_path, make_args(**overrides), prompts, callback={"every": 1}, resume=checkpoint
    )
    pairs = zip(rows_of(whole), rows_of(resumed), strict=True)
    for expected, row in pairs:
        for key, value in expected.items():
            if key.startswith("mi/") and key != "mi/seconds":
                assert row[key] == pytest.approx(value, abs=1e-6), key
    assert again.ema["first_turn"].values == pytest.approx(watching.ema["first_turn"].values)
    assert [finding.regime for finding in judge(again.evidence)] == [
        finding.regime for finding in judge(watching.evidence)
    ]
    ema_differs = [
        row["mi/first_turn/mi_zscore_ema_seq"] != row["mi/first_turn/mi_zscore_seq"] for row in rows_of(whole)
    ]
    assert ema_differs == [False, True, True, True]


def test_groups_with_different_prompts_are_named_and_measured_by_prompt(policy_path, prompts, make_args, caplog):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)

    def rollout(prompts, trainer):
        prompt_ids = [[*tokenizer(text)["input_ids"], number] for number, text in enumerate(prompts)]
        completion_ids = [[5, 6, 7 + number] for number in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    args = make_args(max_steps=1)
    trainer, _ = run(SNRFilteredGRPOTrainer, policy_path, args, prompts, callback={"every": 1}, rollout_func=rollout)
    assert any("group 0 have 4 different prompts" in text for text in warnings_of(caplog))
    assert rows_of(trainer)[0]["mi/first_turn/num_prompts"] == 8


def test_evaluation_is_not_measured(policy_path, prompts, make_args):
    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = True

    args = make_args(snr=False, max_steps=1, per_device_eval_batch_size=8)
    trainer = GRPOTrainer(
        policy_path, length_reward, args=args, train_dataset=prompts, eval_dataset=prompts, callbacks=[Evaluate()]
    )
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    evaluated = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert evaluated
    assert not [key for row in evaluated for key in row if "mi/" in key]


def test_what_is_saved_has_each_prompt_once(policy_path, make_args):
    repeated = Dataset.from_dict({"prompt": [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[0]] * 4})
    args = make_args(snr=False, max_steps=1, per_device_train_batch_size=16, shuffle_dataset=False)
    trainer, _ = run(GRPOTrainer, policy_path, args, repeated, callback={"every": 1})
    (path,) = run_of(trainer).measurements
    saved = read_measurement(path)
    assert len(saved.prompts) == len(set(saved.prompts)) == saved.cross_logps.shape[1] == 2
    own = saved.cross_logps.gather(1, saved.prompt_index[:, None]).squeeze(1)
    hits = (own == saved.cross_logps.amax(dim=1)).float().mean().item()
    assert hits == pytest.approx(saved.metrics["retrieval_accuracy"], abs=0.01)  # own columns are still the own ones


def test_why_nothing_was_measured_is_kept_for_the_report(policy_path, make_args):
    same = Dataset.from_dict({"prompt": [PROMPTS[0]] * 8})
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False, max_steps=1), same, callback={"every": 1})
    assert "two different ones are needed" in run_of(trainer).silence
    page = render_report([run_of(trainer)])
    assert "two different ones are needed" in page and "add_callback" not in page


def test_a_measurement_is_of_one_step_wherever_it_is_told(policy_path, prompts, make_args, tmp_path):
    """The first that trains on its completions; its row, of several steps, has the number of the last."""
    args = make_args(steps_per_generation=2, logging_steps=4, max_steps=8)
    trainer, _ = run(SNRFilteredGRPOTrainer, policy_path, args, prompts, callback={"every": 4})
    assert [row["step"] for row in rows_of(trainer)] == [4, 8]
    told = run_of(trainer)
    (fact,) = (fact for fact in facts(told) if fact.key == ROW)
    for steps in (
        [evidence.step for evidence in told.evidence],
        [read_measurement(path).step for path in told.measurements],
        [step for step, _ in told.points(ROW)],
        [step for step, _ in points_of(told.rows, ROW)],
        [fact.first.step, fact.last.step],
    ):
        assert steps == [3, 7]


# Generations of one group, as TRL's defaults have them
ONE_GROUP = {"per_device_train_batch_size": 4, "max_steps": 12}


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])
def test_prompts_of_successive_generations_are_pooled_until_there_are_enough(
    trainer_class, policy_path, prompts, make_args, caplog
):
    args = make_args(snr=trainer_class is not GRPOTrainer, **ONE_GROUP)
    callback = {"every": 1, "min_prompts": 5}
    trainer, _ = run(trainer_class, policy_path, args, prompts, callback=callback)
    rows = rows_of(trainer)
    assert [row["step"] for row in rows] == [5, 10]
    for row in rows:
        assert row["mi/pooled_steps"] == 4
        assert row["mi/first_turn/num_completions"] + row["mi/completions_without_reasoning"] == 5 * GROUP_SIZE
        assert row["mi/first_turn/num_prompts"] >= 4  # a new epoch may begin with the last prompt of the one before
    (line,) = [text for text in warnings_of(caplog) if "mi/pooled_steps" in text]
    assert "generation_batch_size=20" in line and "4 optimizer steps" in line
    for path, row in zip(run_of(trainer).measurements, rows, strict=True):
        saved = read_measurement(path)
        assert saved.rewards.shape == (5, GROUP_SIZE) and len(saved.scores) == 5
        if trainer_class is not GRPOTrainer:
            kept = [log["snr/kept_groups"] == 1 for log in trainer.state.log_history[row["step"] - 5 : row["step"]]]
            assert saved.kept.tolist() == kept


@pytest.mark.parametrize("resume", [False, True])
def test_what_stands_beside_a_pooled_measurement_is_of_all_that_was_measured(
    resume, policy_path, prompts, make_args, tmp_path
):
    shares = iter([0.0, 1.0, 0.2, 1.0, 0.2])  # of success, generation by generation; two again after a resume

    def reward(completion_ids, trainer_state, log_metric, **kwargs):
        log_metric("env/lake/success", next(shares))
        return length_reward(completion_ids)

    settings = {**ONE_GROUP, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    arguments = (GRPOTrainer, policy_path, make_args(snr=False, **settings), prompts, reward)
    trainer, measuring = run(*arguments, {"every": 3, "min_prompts": 3})
    if resume:
        checkpoint = str(tmp_path / "run" / "checkpoint-1")
        trainer, measuring = run(*arguments, {"every": 3, "min_prompts": 3}, resume=checkpoint)
    (evidence,) = measuring.evidence
    assert evidence.success == pytest.approx(0.4)
    cut = [row["completions/clipped_ratio"] for row in trainer.state.log_history[:3]]
    assert evidence.clipped_ratio == pytest.approx(sum(cut) / 3)


def test_a_pooled_measurement_is_that_of_one_generation_where_weights_stand_still(policy_path, make_args):
    """Eight generations of a group, and one of eight groups."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    replay = Replay(tokenizer, REWARDS)
    measured = []
    for rows, steps in ((4, 8), (32, 1)):
        args = make_args(per_device_train_batch_size=rows, max_steps=steps, learning_rate=0.0, shuffle_dataset=False)
        dataset = Dataset.from_dict({"prompt": PROMPTS})
        callback = {"every": 1, "min_prompts": 8}
        trainer, _ = run(
            GRPOTrainer if rows == 4 else SNRFilteredGRPOTrainer,
            policy_path,
            args,
            dataset,
            Replay.reward,
            callback,
            rollout_func=replay.rollout,
        )
        (row,) = rows_of(trainer)
        measured.append({key: value for key, value in row.items() if key.startswith(("mi/first", "mi/groups"))})
    assert measured[0] == pytest.approx(measured[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("save_steps", [3, 7])
def test_a_run_resumed_within_a_pool_measures_what_the_uninterrupted_one_measures(
    policy_path, prompts, make_args, tmp_path, save_steps
):
    settings = {**ONE_GROUP, "save_strategy": "steps", "save_steps": save_steps, "learning_rate": 1e-3}
    arguments = (SNRFilteredGRPOTrainer, policy_path, make_args(**settings), prompts)
    whole, _ = run(*arguments, callback={"every": 1, "min_prompts": 5})
    checkpoint = tmp_path / "run" / f"checkpoint-{save_steps}"
    resumed, _ = run(*arguments, callback={"every": 1, "min_prompts": 5}, resume=str(checkpoint))
    assert [row["step"] for row in rows_of(whole)] == [5, 10]
    for expected, row in zip(rows_of(whole), rows_of(resumed), strict=True):
        measured = {key for key in expected if key.startswith("mi/") and key != "mi/seconds"}
        assert {key: row[key] for key in measured} == pytest.approx({key: expected[key] for key in measured}, abs=1e-6)
    # The trainer's state goes to the Hub with the model card: what a model wrote is not in it.
    assert "completion_ids" not in (checkpoint / "trainer_state.json").read_text()


def test_a_run_too_short_to_be_measured_is_told_before_it_begins(policy_path, prompts, make_args, caplog):
    args = make_args(snr=False, per_device_train_batch_size=4, max_steps=3)
    trainer, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": 1, "min_prompts": 8})
    (line,) = [text for text in warnings_of(caplog) if "will not be measured" in text]
    for part in ("samples 3 prompts", "min_prompts=8", "generation_batch_size=32"):
        assert part in line
    assert rows_of(trainer) == []
    assert "takes 8 prompts, and 3 are sampled" in run_of(trainer).silence


@pytest.mark.parametrize(
    ("settings", "every", "said"),
    [
        ({"logging_steps": 100}, None, "logging_strategy='steps', logging_steps=100"),
        ({"logging_strategy": "no"}, None, "logging_strategy='no'"),
        ({}, 3, "every=3"),
    ],
)
def test_a_run_none_of_whose_steps_asks_for_a_measurement_is_told_so_and_its_report_too(
    policy_path, prompts, make_args, caplog, settings, every, said
):
    args = make_args(snr=False, max_steps=2, **settings)
    trainer, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": every})
    (line,) = [text for text in warnings_of(caplog) if "will not be measured" in text]
    assert f"none of the 2 optimizer steps asks for it ({said})" in line
    assert run_of(trainer).silence == f"no optimizer step so far has asked for it ({said})"
    page = render_report([run_of(trainer)])
    assert "no optimizer step so far has asked for it" in page and "add_callback" not in page


def test_a_run_that_is_measured_at_its_last_step_is_not_told_that_it_will_not_be(
    policy_path, prompts, make_args, caplog
):
    args = make_args(snr=False, max_steps=2, logging_steps=2)
    trainer, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": None})
    assert not [text for text in warnings_of(caplog) if "not be measured" in text]
    assert run_of(trainer).silence == "" and len(rows_of(trainer)) == 1
