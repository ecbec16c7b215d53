"""A trainer tells the state of its training, ends where it is asked to, and trains on as if nobody watched."""

import json

import pytest
from conftest import assert_same_parameters, parameters_of
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer, TrainingHealthCallback, cli
from ragen2_trl.instrument import Health, health
from ragen2_trl.instrument.findings import training_finding
from ragen2_trl.record.run import read_run
from ragen2_trl.report.card import inline
from ragen2_trl.report.page import render_report


def reward(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]


class FailsFrom:
    """Calls every answer valid until a step, and none afterwards."""

    def __init__(self, step):
        self.step, self.trainer, self.texts = step, None, []

    def __call__(self, text):
        self.texts.append(text)
        return self.trainer.state.global_step < self.step


SLOW = pytest.mark.slow


def make_trainer(policy_path, prompts, args, trainer_class=GRPOTrainer, fails_from=8, **settings):
    trainer = trainer_class(policy_path, reward, args=args, train_dataset=prompts)
    valid = FailsFrom(fails_from)
    valid.trainer = trainer
    trainer.add_callback(TrainingHealthCallback(trainer, valid=valid, **settings))
    return trainer


def told(caplog):
    texts = [record.message for record in caplog.records if "failing since" in record.message]
    return [text for text in texts if "Training has ended" not in text]


def writes(text_at):
    """A `rollout_func` whose completions are a text of the step, with an end unless the text is cut."""

    def write(prompts, trainer):
        tokenizer = trainer.processing_class
        text, ends = text_at(trainer.state.global_step)
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * ends
        ids = ids[: trainer.args.max_completion_length]
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": [ids for _ in prompts], "logprobs": None}

    return write


def alternates(completions, **kwargs):
    """Rewards that vary in every group and have the same mean in every step."""
    return [float(number % 2) for number in range(len(completions))]


def always(value):
    return lambda completions, **kwargs: [value] * len(completions)


def names_letters(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def thinks_until(step):
    return writes(lambda at: ("<think>Go up.</think>Up" if at < step else "<think>Go up.", True))


# Each state: steps, rewards, completions if they are written for it, settings, and what its sentence names.
STATES = {
    "cold start": (6, always(0.0), None, {}, "nothing_to_learn", 5, "same reward, 0"),
    "all solved": (6, always(1.0), None, {}, "nothing_to_learn", 5, "same reward, 1"),
    "all cut": (6, always(0.0), writes(lambda at: ("Go up " * 9, False)), {}, "nothing_to_learn", 5, "length limit"),
    "lost format": (13, alternates, thinks_until(10), {"max_completion_length": 40}, "failing", 13, "valid answers"),
    "drift": (
        13,
        alternates,
        writes(lambda at: ("Go up " * (4 if at < 10 else 30), True)),
        {"max_completion_length": 200},
        "drifting",
        13,
        "Mean length rose",
    ),
    "learning": (45, names_letters, None, {"max_completion_length": 6}, "learning", None, "Mean reward"),
    "no rise": (
        60,
        alternates,
        None,
        {"max_completion_length": 2, "learning_rate": 0.0},
        "no_rise",
        60,
        "60 generations",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW if STATES[case][0] > 6 else ()) for case in STATES])
def test_each_state_is_reached_by_training(policy_path, prompts, make_args, caplog, tmp_path, capsys, case):
    """And log, record, card, report and command tell the same."""
    steps, rewards, write, settings, name, since, why = STATES[case]
    args = make_args(max_steps=steps, **settings)
    trainer = SNRFilteredGRPOTrainer(policy_path, rewards, args=args, train_dataset=prompts, rollout_func=write)
    trainer.train()
    run = read_run(tmp_path / "run")
    found = run.findings[0]
    assert found == training_finding(health(trainer.state.log_history).state)
    assert found.name == name and since in (None, found.since) and why.lower() in found.sentence.lower()
    begun = run.health.history[-1]
    assert any(f"{begun.title} since step {begun.since}" in record.message for record in caplog.records)
    trainer.create_model_card()
    card, page = (tmp_path / "run" / "README.md").read_text(), render_report([run])
    assert inline(begun.title) in card and begun.title in page
    cli.main(["health", str(tmp_path / "run")])
    assert begun.title in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("stop_on", "last"),
    [pytest.param((), 13, marks=SLOW), pytest.param(("drifting", "no_rise"), 13, marks=SLOW), (("failing",), 11)],
)
def test_failing_training_is_told_once_and_ends_only_where_asked_to(
    policy_path, prompts, make_args, caplog, stop_on, last
):
    trainer = make_trainer(policy_path, prompts, make_args(snr=False, max_steps=13), stop_on=stop_on)
    trainer.train()
    assert trainer.state.global_step == last
    (text,) = told(caplog)
    assert "since step 11" in text and "health/valid_rate" in text
    assert any("Training stops after step 11" in record.message for record in caplog.records) == (last == 11)
    assert health(trainer.state.log_history).state.since == 11


def test_a_cold_start_is_not_ended_as_failing(policy_path, prompts, make_args):
    args = make_args(snr=False, max_steps=25)
    trainer = GRPOTrainer(policy_path, always(0.0), args=args, train_dataset=prompts)
    callback = TrainingHealthCallback(trainer, stop_on=("failing",))
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 25 and callback.health.state.name == "nothing_to_learn"


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])
def test_training_ends_after_five_generations_that_teach_nothing_and_not_after_five_steps(
    policy_path, prompts, make_args, trainer_class
):
    args = make_args(snr=trainer_class is not GRPOTrainer, max_steps=12, num_iterations=2)
    trainer = trainer_class(policy_path, always(0.0), args=args, train_dataset=prompts)
    trainer.add_callback(TrainingHealthCallback(trainer, stop_on=("nothing_to_learn",)))
    trainer.train()
    assert trainer.state.global_step == 9


def test_rows_have_the_number_of_completions_and_the_share_of_valid_ones(policy_path, prompts, make_args):
    trainer = make_trainer(policy_path, prompts, make_args(snr=False, max_steps=3), fails_from=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["health/completions"] for row in rows] == [8.0] * 3
    assert [row["health/valid_rate"] for row in rows] == [1.0, 1.0, 0.0]


@pytest.mark.slow
def test_training_is_the_same_whether_it_is_watched_or_not(policy_path, prompts, make_args):
    plain = GRPOTrainer(policy_path, reward, args=make_args(snr=False), train_dataset=prompts)
    plain.train()
    watched = make_trainer(policy_path, prompts, make_args(snr=False))
    watched.train()
    assert_same_parameters(parameters_of(plain), parameters_of(watched))


@pytest.mark.slow
def test_a_resumed_run_is_watched_as_if_it_had_not_been_interrupted(policy_path, prompts, make_args, tmp_path, caplog):
    args = make_args(snr=False, max_steps=13, save_strategy="steps", save_steps=10)
    make_trainer(policy_path, prompts, args).train()
    whole = told(caplog)
    caplog.clear()
    make_trainer(policy_path, prompts, args).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert told(caplog) == whole and len(whole) == 1
    saved = json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())
    watch = Health()
    for row in saved["log_history"]:
        watch.update(row)
    assert saved["stateful_callbacks"]["ragen2_health"]["health"] == watch.state_dict()


def test_trainers_with_the_filter_watch_by_themselves_and_once(policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, reward, args=make_args(), train_dataset=prompts)
    watching = [one for one in trainer.callback_handler.callbacks if isinstance(one, TrainingHealthCallback)]
    assert len(watching) == 1 and not watching[0].stop_on
    own = TrainingHealthCallback(trainer, valid=lambda text: True)
    trainer.add_callback(own)
    trainer.train()
    assert watching[0].health.state == Health().state and len(own.health.state_dict()["watches"]) > 0


@pytest.mark.parametrize(("text", "rate"), [("<think>Go up.</think>Up", 1.0), ("<think>Go up.", None), ("Up", None)])
def test_without_an_environment_valid_is_reasoning_that_is_closed(policy_path, prompts, make_args, text, rate):
    args = make_args(snr=False, max_steps=2)
    trainer = GRPOTrainer(
        policy_path, reward, args=args, train_dataset=prompts, rollout_func=writes(lambda at: (text, False))
    )
    trainer.add_callback(TrainingHealthCallback(trainer))
    trainer.train()
    rates = [row.get("health/valid_rate") for row in trainer.state.log_history if "reward" in row]
    assert rates == [rate, rate]


@pytest.mark.parametrize("stop_on", ["failing", ("failing", "nonsense")])
def test_what_may_end_training_is_checked(policy_path, prompts, make_args, stop_on):
    trainer = GRPOTrainer(policy_path, reward, args=make_args(snr=False), train_dataset=prompts)
    if "nonsense" in stop_on:
        with pytest.raises(ValueError, match=r"'nonsense'.*failing"):
            TrainingHealthCallback(trainer, stop_on=stop_on)
    else:
        assert TrainingHealthCallback(trainer, stop_on=stop_on).stop_on == {"failing"}


@pytest.mark.parametrize(("settings", "steps"), [({}, 1), ({"num_iterations": 2}, 2)])
def test_steps_that_reuse_a_generation_are_known_from_the_arguments(policy_path, prompts, make_args, settings, steps):
    trainer = GRPOTrainer(policy_path, reward, args=make_args(snr=False, **settings), train_dataset=prompts)
    callback = TrainingHealthCallback(trainer)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.health.steps_per_generation == steps
