"""Listening to a trainer's sampling: who is told, in which order, until when, and what rewards are told."""

import pytest
import torch
from algorithms import replay_of
from conftest import PROMPTS, RUN
from datasets import Dataset
from replay import GROUP_SIZE, Replay
from trl import GRPOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer
from ragen2_trl.callbacks.pooling import what_layout_means
from ragen2_trl.rollout_events import extend, group_rewards, listen

both = pytest.mark.parametrize("trainer_class", [GRPOTrainer, SNRFilteredGRPOTrainer])


def make(trainer_class, policy_path, make_args, dataset=None, rollout_func=None, **settings):
    args = make_args(snr=trainer_class is SNRFilteredGRPOTrainer, **settings)
    dataset = Dataset.from_dict({"prompt": PROMPTS}) if dataset is None else dataset
    rollout_func = rollout_func or replay_of(policy_path).rollout
    return trainer_class(policy_path, Replay.reward, args, dataset, rollout_func=rollout_func)


@both
def test_a_listener_hears_nothing_after_it_is_removed(trainer_class, policy_path, make_args):
    trainer = make(trainer_class, policy_path, make_args)
    told = {name: [] for name in ("on_rows", "on_generated", "on_rollout")}
    stays = []
    listener = listen(trainer, **{name: lambda *heard, name=name: told[name].append(heard) for name in told})
    other = listen(trainer, on_rollout=stays.append)
    trainer.train()
    steps = RUN["max_steps"]
    assert [len(heard) for heard in (*told.values(), stays)] == [steps] * 4
    listener.remove()
    listener.remove()  # does nothing more
    trainer.train()
    assert [len(heard) for heard in (*told.values(), stays)] == [steps] * 3 + [2 * steps]
    other.remove()
    trainer.train()
    assert len(stays) == 2 * steps


@both
def test_listeners_are_told_once_each_in_the_order_they_came(trainer_class, policy_path, make_args):
    """Some come before callbacks that listen as well, some after, and one of them while training runs."""
    trainer = make(trainer_class, policy_path, make_args)
    heard = []

    def note(name, rollout):
        heard.append((name, trainer.state.global_step, tuple(rollout.rewards.shape)))
        if name == "first" and trainer.state.global_step == 1:
            listen(trainer, on_rollout=lambda rollout: note("late", rollout))

    listen(trainer, on_rollout=lambda rollout: note("first", rollout))
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    listen(trainer, on_rollout=lambda rollout: note("second", rollout))
    listen(trainer, on_rows=lambda rows: None)
    listen(trainer, on_rollout=lambda rollout: note("third", rollout))
    trainer.train()
    shape = (RUN["per_device_train_batch_size"] // GROUP_SIZE, GROUP_SIZE)
    named = [("first", "second", "third"), ("first", "second", "third"), ("first", "second", "third", "late")]
    expected = [(name, step, shape) for step, names in enumerate(named) for name in names]
    assert heard == expected
    assert any("mi/seconds" in row for row in trainer.state.log_history)


def test_both_trainers_tell_of_the_same_rollout(policy_path, make_args):
    told = []
    for trainer_class in (GRPOTrainer, SNRFilteredGRPOTrainer):
        trainer = make(trainer_class, policy_path, make_args, max_steps=1)
        listen(trainer, on_rollout=told.append)
        trainer.train()
    plain, filtered = told
    assert plain.prompt_ids == filtered.prompt_ids
    assert plain.completion_ids == filtered.completion_ids
    assert torch.equal(plain.rewards, filtered.rewards)
    assert len(filtered.batch["prompt_ids"]) == len(filtered.prompt_ids)  # before any row is dropped


def test_rewards_without_a_finite_sum_are_not_numbers():
    inf, nan = torch.inf, torch.nan
    per_func = torch.tensor([[1.0, 2.0], [inf, 0.0], [-inf, 1.0], [inf, -inf], [nan, nan], [nan, 4.0]])
    sums = group_rewards(per_func, torch.tensor([1.0, 0.5]), 2)
    assert sums.isnan().tolist() == [[False, True], [True, True], [True, False]]
    assert sums[0, 0] == 2.0 and sums[2, 1] == 2.0
    assert not group_rewards(per_func[[0, 5]], torch.tensor([1.0, 0.5]), 2).isnan().any()


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        """Raise the count."""
        self.count += number
        return self.count


def test_an_extension_can_be_taken_off():
    counter, other = Counter(), Counter()
    take_off = extend(counter, "add", lambda add, number: -add(2 * number))
    assert counter.add(1) == -2 and counter.add.__doc__ == Counter.add.__doc__
    assert other.add(1) == 1
    take_off()
    assert counter.add(1) == 3
    assert "add" not in vars(counter)
    take_off()
    assert counter.add(1) == 4


def test_extensions_come_off_from_the_outside_in_and_leave_what_was_there():
    counter = Counter()
    counter.add = lambda number: 100 + number  # a method of its own, as subclasses set them
    own = counter.add
    inner = extend(counter, "add", lambda add, number: add(number) + 1000)
    outer = extend(counter, "add", lambda add, number: add(number) + 10_000)
    inner()  # another is around it
    assert counter.add(1) == 11_101
    outer()
    assert counter.add(1) == 1101
    inner()
    assert counter.add is own


@pytest.mark.parametrize("column", [None, "image", "images"])
def test_a_dataset_with_images_is_given_no_advice_on_its_layout(column, policy_path, make_args):
    """Their completions are not measured, whatever the layout."""
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = make(GRPOTrainer, policy_path, make_args, dataset)
    if column is not None:  # which a processor of texts would refuse
        trainer.train_dataset = dataset.add_column(column, [None] * len(PROMPTS))
    advice = what_layout_means(trainer, min_prompts=64)
    assert advice is None if column else "generation_batch_size=" in advice
