"""The callback through real training runs: what it measures, when, and what it leaves alone."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import ROW, length_reward, rloo_args, rows_of, run, warnings_of
from replay import GROUP_SIZE, KEPT, REWARDS, Replay
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer, information_metrics
from ragen2_trl.callbacks import mutual_information
from ragen2_trl.callbacks.mutual_information import group_metrics
from ragen2_trl.instrument import budget
from ragen2_trl.instrument.budget import Texts, affordable, expected_tokens
from ragen2_trl.instrument.diagnosis import SCOPES, Measurement, Sampling
from ragen2_trl.instrument.verdict import MIN_STEPS_BETWEEN, judge
from ragen2_trl.record.facts import facts
from ragen2_trl.record.run import run_of
from ragen2_trl.record.saved_measurement import read_measurement
from ragen2_trl.report.figures import points_of
from ragen2_trl.report.page import render_report
from ragen2_trl.rollout_events import Rollout, listen


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
        assert not [key for key in row if key.startswith("mi/trajectory")]  # with one turn a completion


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
        ({"logging_steps": 2}, None, None),  # which measures at the last one
    ],
)
def test_a_run_none_of_whose_steps_asks_for_a_measurement_is_told_so_and_its_report_too(
    policy_path, prompts, make_args, caplog, settings, every, said
):
    args = make_args(snr=False, max_steps=2, **settings)
    trainer, _ = run(GRPOTrainer, policy_path, args, prompts, callback={"every": every})
    lines = [text for text in warnings_of(caplog) if "not be measured" in text]
    assert [f"none of the 2 optimizer steps asks for it ({said})" in line for line in lines] == [True] * (
        said is not None
    )
    assert len(rows_of(trainer)) == (said is None)
    silence = run_of(trainer).silence
    assert (silence == "") == (said is None) and (said or "") in silence
    if said:
        page = render_report([run_of(trainer)])
        assert "no optimizer step so far has asked for it" in page and "add_callback" not in page


# What the callback warns of and refuses, and the collapses that it recognises.


def test_an_exception_inside_scoring_propagates(policy_path, prompts, make_args, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("scoring broke")

    monkeypatch.setattr("ragen2_trl.instrument.diagnosis.cross_score", broken)
    with pytest.raises(RuntimeError, match="scoring broke"):
        run(GRPOTrainer, policy_path, make_args(snr=False), prompts, callback={"every": 1})


@pytest.mark.parametrize(
    ("prompt", "completion", "reason"),
    [
        ("same", [5, 6, 7], "all 2 prompts are the same"),
        ("own", [], "no completion has reasoning"),
        ("long", [5, 6, 7], "context of 256 tokens"),
    ],
)
def test_what_cannot_be_measured_is_said_once_and_leaves_no_number(
    policy_path, make_args, caplog, prompt, completion, reason
):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)

    def rollout(prompts, trainer):
        ids = {"same": [9, 9], "own": None, "long": [9] * 300}[prompt]
        prompt_ids = [ids or tokenizer(text)["input_ids"] for text in prompts]
        if prompt == "long":
            prompt_ids = [[*ids, number // GROUP_SIZE] for number in range(len(prompts))]
        end = [tokenizer.eos_token_id]
        completion_ids = [[*completion, *end] for _ in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer, _ = run(
        SNRFilteredGRPOTrainer,
        policy_path,
        make_args(max_steps=2),
        dataset,
        callback={"every": 1},
        rollout_func=rollout,
    )
    silent = [text for text in warnings_of(caplog) if "not measured" in text]
    assert len(silent) == 1
    assert reason in silent[0] and reason in run_of(trainer).silence
    for row in trainer.state.log_history:
        assert not [key for key in row if key.startswith("mi/first_turn")]
        assert all(math.isfinite(value) for key, value in row.items() if key.startswith("mi/"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"num_completions": 1}, "num_completions must be at least 2"),
        ({"max_prompts": 1}, "max_prompts must be at least 2"),
        ({"scopes": ("first",)}, "scopes='first' is not supported; allowed values: first_turn, trajectory, answer\\."),
        ({"scopes": ()}, "scopes must name at least one"),
        ({"stop_on": "collapse"}, "stop_on='collapse' is not supported; allowed values: template_even"),
    ],
)
def test_a_bad_setting_is_named(policy_path, prompts, make_args, settings, message):
    trainer = GRPOTrainer(policy_path, length_reward, args=make_args(snr=False), train_dataset=prompts)
    with pytest.raises(ValueError, match=message):
        MutualInformationCallback(trainer, **settings)


def test_a_trainer_that_does_not_sample_is_refused(policy_path, tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")
    trainer = SFTTrainer(policy_path, args=args, train_dataset=Dataset.from_dict({"text": ["Go right"]}))
    with pytest.raises(TypeError, match="SFTTrainer has no _generate_and_score_completions"):
        listen(trainer, on_rollout=lambda batch, rewards: None)


ASKED_FOR = "template_even_if_success_rises"


class Drift:
    """In place of a measurement: reasoning depends on its prompt for two measurements, and then no longer."""

    def __init__(self, before, trials):
        self.before, self.trials, self.count = before, float(trials), 0

    def __call__(self, *args):
        self.count += 1
        accuracy = 0.9 if self.count <= 2 else 0.1
        changed = {"retrieval_accuracy": accuracy, "retrieval_chance": 0.1, "num_completions": self.trials}
        return replace(self.before, metrics=self.before.metrics | changed)


@pytest.mark.parametrize(("stop_on", "trials"), [(None, 64), (ASKED_FOR, 64), (ASKED_FOR, 2)])
def test_drift_into_template_collapse_warns_once_and_stops_where_asked_to(
    policy_path, prompts, make_args, monkeypatch, caplog, stop_on, trials
):
    separable = torch.tensor([[-10.0, -30.0], [-30.0, -10.0]])
    lengths, own = torch.tensor([5, 5]), torch.tensor([0, 1])
    metrics = information_metrics(separable, lengths, own)
    before = Measurement(metrics, separable, lengths, own, trajectories=[0, 4], columns=[0, 4])
    monkeypatch.setattr(mutual_information, "measure_first_turn", Drift(before, trials))
    callback = {"every": 1, "stop_on": stop_on}
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False, max_steps=6), prompts, callback=callback)
    told = trials == 64  # with two reasoning traces nothing can be told, and nothing ends
    assert trainer.state.global_step == (4 if told and stop_on else 6)
    warnings = [text for text in warnings_of(caplog) if "become a template" in text]
    assert len(warnings) == told
    if told:
        for part in (
            "Step 4: ",
            "since step 3 ",
            "chance 0.1",
            "retrieval accuracy 0.1",
            "best retrieval accuracy 0.9",
        ):
            assert part in warnings[0]
        rows = [row["mi/regime/collapsed"] for row in rows_of(trainer)]
        assert rows == [0.0] * 3 + [1.0] * (1 if stop_on else 3)
        assert [row.get("mi/regime/depends_on_prompt") for row in rows_of(trainer)][:2] == [1.0] * 2


def test_groups_without_variance_are_told_apart_by_whether_completions_differ():
    rollout = Rollout(
        prompt_ids=[[1]] * 6,
        completion_ids=[[5], [5], [5], [6], [5], [6]],
        tool_masks=[None] * 6,
        rewards=torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]),
        turn_samples=[[]] * 6,
    )
    assert group_metrics(rollout) == pytest.approx(
        {"mi/groups/identical_completions": 1 / 3, "mi/groups/equal_rewards": 1 / 3, "mi/groups/zero_variance": 2 / 3}
    )


# A measurement costs a share of the update and no more: fewer tokens of each trace first, then fewer prompts.


OF_BUDGET = {f"Question {number}": (0.0, 1.0) * 2 for number in range(16)}


def texts(context=2_000, turn=500.0, num_prompts=64, num_turns=1):
    number = 2 * num_prompts
    return Texts([context] * number, [turn] * number, [round(turn * num_turns)] * number, num_turns, num_prompts)


@given(st.integers(1, 4_000), st.floats(1, 4_000), st.integers(2, 200), st.integers(1, 6), st.floats(0, 1e8))
def test_a_sampling_is_within_the_budget_or_the_least_there_is(context, turn, num_prompts, num_turns, tokens):
    of, whole = texts(context, turn, num_prompts, num_turns), Sampling()
    chosen = affordable(SCOPES, whole, of, tokens)
    cost = expected_tokens(SCOPES, chosen, of)
    least = (chosen.max_tokens or turn) <= 128 and min(chosen.max_prompts, num_prompts) <= 16
    assert cost <= max(tokens, budget.ALWAYS) or least
    assert (chosen.max_tokens or 128) >= 128 and chosen.max_prompts >= 16
    if chosen.max_prompts < whole.max_prompts:  # traces come first
        assert (chosen.max_tokens or turn) <= 128
    if chosen != whole:
        assert expected_tokens(SCOPES, whole, of) > max(tokens, budget.ALWAYS)


def test_at_small_sizes_nothing_changes():
    for of in (texts(100, 60.0, 32), texts(200, 100.0, 16), texts(60, 64.0, 16, num_turns=5)):
        assert affordable(SCOPES, Sampling(), of, budget=0.0) == Sampling()


def test_a_budget_for_both_scopes_is_spent_on_both():
    of = texts(num_turns=5)
    first, both = (affordable(scopes, Sampling(), of, 1.2e6) for scopes in (SCOPES[:1], SCOPES))
    assert expected_tokens(SCOPES, first, of) > 1.2e6 >= expected_tokens(SCOPES, both, of)


def test_columns_of_a_trajectory_are_cut_though_prompts_are_few():
    of = texts(60, 64.0, 16, num_turns=2)
    of = replace(of, **{name: getattr(of, name) * 4 for name in ("contexts", "turns", "completions")})
    assert expected_tokens(SCOPES, Sampling(), of) > budget.ALWAYS
    assert expected_tokens(SCOPES, affordable(SCOPES, Sampling(), of, 0.0), of) <= budget.ALWAYS


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(budget, "ALWAYS", 0)
    monkeypatch.setattr(budget, "LEAST_TOKENS", 4)
    monkeypatch.setattr(budget, "LEAST_PROMPTS", 4)


def measured(policy_path, args, share, cut=None, **callback):
    """A run on the same completions each time, or on their first tokens."""
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), OF_BUDGET)
    for group in replay.completions.values():  # no white space, which counts as no reasoning at either end
        group[:] = [[40 + token % 100 for token in ids][:cut] for ids in group]
    rollout = {"reward": Replay.reward, "rollout_func": replay.rollout}
    callback = {"every": 1, "budget": share, **callback}
    dataset = Dataset.from_dict({"prompt": list(OF_BUDGET)})
    return run(GRPOTrainer, policy_path, args, dataset, callback=callback, **rollout)[0]


def test_a_run_scores_what_its_budget_pays_for_and_trains_as_without(policy_path, make_args, caplog, small_limits):
    args = make_args(snr=False, per_device_train_batch_size=64, max_steps=2)
    ends = {share: measured(policy_path, args, share) for share in (None, 10.0, 0.05, 1e-9)}
    for trainer in ends.values():
        assert_same_parameters(parameters_of(trainer), parameters_of(ends[None]))
    whole, ample, part, least = ([row["mi/tokens"] for row in rows_of(trainer)] for trainer in ends.values())
    assert whole == ample and all(few <= some < many for few, some, many in zip(least, part, whole, strict=True))
    for row in rows_of(ends[1e-9]):  # chance and bound are those of four prompts
        assert row["mi/first_turn/num_prompts"] == 4
        assert row["mi/first_turn/retrieval_chance"] == pytest.approx(1 / 4)
        assert row["mi/first_turn/mi_upper_bound"] == pytest.approx(math.log(4))
        assert row["mi/first_turn/num_completions"] == 16
    told = [text for text in warnings_of(caplog) if "budget=None scores all" in text]
    assert len(told) == 2  # once a run
    assert "the first 4 tokens of each trace under at most 4 prompts" in told[1]


def test_a_cut_trace_is_scored_as_if_it_ended_there(policy_path, make_args, small_limits):
    args = make_args(snr=False, per_device_train_batch_size=64, max_steps=1)
    cut, short = (
        rows_of(measured(policy_path, args, share, cut=tokens, max_prompts=4))[0]
        for share, tokens in ((1e-9, None), (None, 4))
    )
    for key in ("mi_seq", "conditional_entropy_token", "retrieval_accuracy"):
        assert cut[f"mi/first_turn/{key}"] == pytest.approx(short[f"mi/first_turn/{key}"], abs=1e-5)


def test_a_budget_without_tokens_is_refused(policy_path, make_args):
    with pytest.raises(ValueError, match="budget must be above 0, or None"):
        measured(policy_path, make_args(snr=False), 0.0)
