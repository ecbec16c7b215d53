"""An exception anywhere in a step, Ctrl-C included, leaves no trace in later evaluations and runs of the trainer."""

import pytest
import torch
from algorithms import GRPO, RLOO, replay_of, slow
from conftest import PROMPTS, apart
from datasets import Dataset

from ragen2_trl.rollout_events import extend

STEPS = {"num_iterations": 2, "max_steps": 4, "max_completion_length": 3, "learning_rate": 0.0, "beta": 0.0}
PILOTS = {"snr_strategy": "nonzero", "snr_pilot_generations": 2, "snr_dynamic_sampling_rounds": 2}
RUNS = {
    "lossless": (GRPO, {"snr_strategy": "lossless"}),
    "pilots and rounds": (GRPO, PILOTS),
    "rloo": slow(RLOO, {"snr_strategy": "lossless"}),
    "all": slow(GRPO, {"snr_strategy": "all"}),
}


class Fault:
    """Raises once, in the second generation, where `place` says: after the method has done its work."""

    def __init__(self, place):
        self.place = place
        self.generations = 0
        self.raised = False

    def watch(self, trainer):
        extend(trainer, "_generate_single_turn", self._counting)
        for place, name in {"log-probs": "_get_per_token_logps_and_entropies", "loss": "compute_loss"}.items():
            if place == self.place:
                extend(trainer, name, self._raising)

    def strike(self, place):
        if place == self.place and self.generations >= 2 and not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    def _counting(self, generate, *args):
        generated = generate(*args)
        self.generations += 1
        self.strike("generation")
        return generated

    def _raising(self, method, *args, **kwargs):
        result = method(*args, **kwargs)
        if torch.is_grad_enabled() == (self.place == "loss"):
            self.strike(self.place)
        return result


def made(algorithm, policy_path, folder, fault=None, **settings):
    def reward(completions, goal, log_extra, log_metric, **kwargs):
        log_metric("goal", sum(goal) / len(goal))
        log_extra("goal", goal)
        if fault is not None:
            fault.strike("reward")
        return [value + number % 2 for number, value in enumerate(goal)]

    def rows(goal):
        return Dataset.from_dict({"prompt": PROMPTS[:4], "goal": [goal] * 4})

    args = algorithm.args(folder, **STEPS, per_device_eval_batch_size=8, **settings)
    trainer = algorithm.make(policy_path, args, reward, rows(0.0), eval_dataset=rows(100.0))
    if fault is not None:
        fault.watch(trainer)
    return trainer


def told(trainer):
    return [(row["step"], row["reward"], row["goal"]) for row in trainer.state.log_history if "reward" in row]


@pytest.mark.parametrize("place", ["generation", "reward", "log-probs", "loss"])
@pytest.mark.parametrize(("algorithm", "settings"), RUNS.values(), ids=RUNS)
def test_evaluations_and_runs_after_ctrl_c_know_nothing_of_it(algorithm, settings, place, policy_path, tmp_path):
    trainer = made(algorithm, policy_path, tmp_path, Fault(place), **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    evaluated = trainer.evaluate()
    table = trainer._logs
    assert set(table["extra"]["goal"]) == {100.0} and len(table["extra"]["goal"]) == len(table["prompt"])
    assert evaluated["eval_reward"] == pytest.approx(100.5) and evaluated["eval_goal"] == pytest.approx(100.0)
    trainer.train()
    assert trainer.state.global_step == 4
    assert {(reward, goal) for _, reward, goal in told(trainer)} == {(0.5, 0.0)}


@pytest.mark.parametrize("algorithm", [GRPO, slow(RLOO)], ids=["grpo", "rloo"])
def test_a_second_run_goes_on_inside_a_generation_as_in_trl(algorithm, policy_path, tmp_path):
    ends, layout = [], {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
    for plain in (True, False):
        # Adam would divide rounding errors by rounding errors where a step moves nothing.
        settings = {**layout, "max_steps": 3, "beta": 0.0, "optim": "sgd", "learning_rate": 0.02}
        settings |= {} if plain else {"snr_strategy": "lossless"}
        replay = replay_of(policy_path)
        trainer = algorithm.make(policy_path, algorithm.args(tmp_path, plain, **settings), replay)
        trainer.train()
        trainer.train()  # a step of the first generation, and two of another
        ends.append(trainer)
    assert apart(*ends) < 5e-6
