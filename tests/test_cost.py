"""What a training has cost: counts equal those of a naive count, and survive a resume."""

import pytest
import torch
from algorithms import ALGORITHMS, _tokenizer
from dynamic_samplings import FIRST, FLAT, VARIED, PilotReplay
from peft import LoraConfig
from test_ppo import ppo_args
from trl import GRPOTrainer, RLOOTrainer

from ragen2_trl import CostCallback, MutualInformationCallback, SNRFilteredGRPOTrainer, SNRFilteredPPOTrainer
from ragen2_trl.rollout_events import listen


def half(completions, **kwargs):
    """Differs within some groups only, so that a filter drops the others."""
    return [float(len(str(completion)) % 3 == 0) for completion in completions]


def rows_of(trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if "cost/seconds" in row]


class Naive:
    """Counts beside the callback: tokens by the masks of what is generated, positions in the loss's own forward."""

    def __init__(self, trainer):
        self.sampled = self.completions = self.positions = self.rows = 0
        generate, logps = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

        def counted_generate(*args, **kwargs):
            generated = generate(*args, **kwargs)
            self.sampled += sum(len(ids) for ids in generated[0])
            self.completions += len(generated[0])
            return generated

        def counted_logps(model, input_ids, *args, **kwargs):
            self.positions += input_ids.shape[0] * input_ids.shape[1] * torch.is_grad_enabled()
            self.rows += len(input_ids) * torch.is_grad_enabled()
            return logps(model, input_ids, *args, **kwargs)

        trainer._generate_single_turn = counted_generate
        trainer._get_per_token_logps_and_entropies = counted_logps


@pytest.mark.parametrize(
    ("trainer_class", "settings"),
    [
        (SNRFilteredGRPOTrainer, {"snr_value": 0.5}),
        (SNRFilteredGRPOTrainer, {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 2}),
        (GRPOTrainer, {"snr": False}),
    ],
    ids=["filter", "dynamic sampling", "trl"],
)
def test_costs_are_those_of_a_naive_count(trainer_class, settings, policy_path, prompts, make_args):
    trainer = trainer_class(policy_path, half, make_args(max_steps=3, **settings), prompts)
    trainer.add_callback(CostCallback(trainer))
    naive = Naive(trainer)
    # Its forward passes are not the training's.
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    last = rows_of(trainer)[-1]
    assert last["cost/sampled_tokens"] == naive.sampled > 0
    assert last["cost/sampled_completions"] == naive.completions
    assert last["cost/plain_completions"] == 3 * trainer.args.generation_batch_size <= naive.completions
    assert last["cost/update_tokens"] == naive.positions > 0
    if trainer_class is GRPOTrainer:  # which announces no passes
        assert "cost/update_positions" not in last and "cost/update_rows" not in last
    else:
        assert 0 < last["cost/update_rows"] == naive.rows < last["cost/sampled_completions"]
        assert last["cost/update_positions"] == naive.positions <= last["cost/plain_update_positions"]
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert last["cost/update_flops"] == 6 * size * naive.positions
    assert last["cost/cpu_seconds"] > 0 and last["cost/seconds"] > 0


def test_rows_count_once_however_often_updates_pass_over_them(policy_path, prompts, make_args):
    trainer = SNRFilteredGRPOTrainer(policy_path, half, make_args(max_steps=4, num_iterations=2), prompts)
    naive = Naive(trainer)
    trainer.train()
    assert rows_of(trainer)[-1]["cost/update_rows"] == naive.rows / 2 > 0


def test_frozen_parameters_cost_no_gradient_of_their_own(policy_path, prompts, make_args):
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = SNRFilteredGRPOTrainer(policy_path, half, make_args(max_steps=1), prompts, peft_config=lora)
    trainer.add_callback(CostCallback(trainer))
    naive = Naive(trainer)
    trainer.train()
    parameters = list(trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in parameters) - trained
    last = rows_of(trainer)[-1]
    assert frozen > trained > 0
    assert last["cost/update_flops"] == (6 * trained + 4 * frozen) * naive.positions > 0


@pytest.mark.parametrize("value_head", ["shared", "separate"])
def test_a_critic_costs_what_its_own_backbone_computes(value_head, policy_path, prompts, make_args):
    trainer = SNRFilteredPPOTrainer(policy_path, half, ppo_args(make_args, value_head=value_head), prompts)
    trainer.add_callback(CostCallback(trainer))
    naive = Naive(trainer)
    trainer.train()
    own = set(map(id, trainer.critic.parameters()))
    policy = sum(parameter.numel() for parameter in trainer.model.parameters() if id(parameter) not in own)
    critic = sum(parameter.numel() for parameter in trainer.critic.parameters()) if value_head == "separate" else 0
    last = rows_of(trainer)[-1]
    assert last["cost/update_tokens"] == (2 if critic else 1) * naive.positions > 0
    assert last["cost/update_flops"] == 6 * (policy + critic) * naive.positions


def test_a_resumed_run_goes_on_with_the_costs_of_its_checkpoint(policy_path, prompts, make_args, tmp_path):
    def make(folder, **settings):
        args = make_args(
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
            **settings,
        )
        trainer = SNRFilteredGRPOTrainer(policy_path, half, args, prompts)
        trainer.add_callback(CostCallback(trainer))
        return trainer

    whole = make("whole", max_steps=4)
    whole.train()
    begun = make("begun", max_steps=2)  # only now: it sets the seed
    begun.train()
    (before,) = [row for row in rows_of(begun) if row["step"] == 2]
    resumed = make("begun", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    for name in ("sampled_tokens", "sampled_completions", "update_positions", "update_tokens", "update_flops"):
        values = [[row[f"cost/{name}"] for row in rows_of(trainer)] for trainer in (whole, resumed)]
        assert values[0] == values[1] == sorted(values[0])
    assert rows_of(resumed)[2]["cost/cpu_seconds"] > before["cost/cpu_seconds"]


def test_what_callbacks_measure_costs_training_nothing(policy_path, prompts, make_args):
    """Neither its time nor its forward passes: here both are the whole of what happens."""

    def measure(sampled) -> None:
        trainer.model(input_ids=torch.zeros(2, 50, dtype=torch.long)).logits.sum().backward()
        trainer.model.zero_grad()
        seen.append(sum(costs._own.values()))

    trainer = SNRFilteredGRPOTrainer(policy_path, half, make_args(max_steps=1), prompts)
    costs, seen = CostCallback(trainer), []
    trainer.add_callback(costs)
    listen(trainer, on_rollout=lambda sampled: (measure(sampled), measure(sampled)))
    trainer.train()
    assert seen[0] == seen[1] > 0


# Passes of the update, those for old and reference log-probs included

OLD_LOGPS = {"num_iterations": 2, "beta": 0.1, "max_steps": 4, "snr_share_prompts": False}
EQUAL = [f"Go up {number}" for number in range(8)]  # as long as one another, so that pilots choose no width


@pytest.fixture
def computed(monkeypatch):
    """Positions of all passes of TRL's for log-probs, padding included, in a list of one number."""
    counted = [0]
    for trainer_class in (GRPOTrainer, RLOOTrainer):

        def logps(self, model, input_ids, *args, plain=trainer_class._get_per_token_logps_and_entropies, **kwargs):
            counted[0] += input_ids.numel()
            return plain(self, model, input_ids, *args, **kwargs)

        monkeypatch.setattr(trainer_class, "_get_per_token_logps_and_entropies", logps)
    return counted


def one_a_group(groups):
    kept = torch.zeros(groups.rewards.shape, dtype=torch.bool)
    kept[:, 0] = True
    return kept


WAYS = {
    "all": {"snr_strategy": "all"},
    "selector": {"selector": one_a_group},
    "column": {"snr_score_reward": "solved", "snr_strategy": "nonzero"},
    "filter": {"snr_strategy": "nonzero"},
    "entropy": {"snr_score": "entropy", "snr_value": 0.5},
    "lossless": {"snr_strategy": "lossless", "beta": 0.0},
    "listener": {"snr_strategy": "nonzero", "all_rows": True},
    "pilots": {"snr_strategy": "nonzero", "snr_pilot_generations": FIRST},
    "rounds": {"snr_strategy": "nonzero", "snr_dynamic_sampling_rounds": 1},
}


CASES = [("grpo", way) for way in WAYS] + [("rloo", way) for way in ("all", "filter", "pilots")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_positions_are_those_of_all_passes_and_plain_ones_those_of_trl(name, way, computed, policy_path, tmp_path):
    algorithm, own = ALGORITHMS[name], dict(WAYS[way])
    given, listens = {"selector": own.pop("selector")} if "selector" in own else {}, own.pop("all_rows", False)
    rewards = {prompt: VARIED if number % 4 == 0 else FLAT for number, prompt in enumerate(EQUAL)}
    found = {}
    for plain in (True, False):
        replay = PilotReplay(_tokenizer(policy_path), rewards, equal_lengths=True)

        def score(prompts, completion_ids, log_extra, replay=replay, **columns):
            scored = replay.score(prompts, completion_ids)
            log_extra("solved", scored)
            return scored

        settings = {**OLD_LOGPS, "per_device_train_batch_size": 32, **own}
        settings = {key: value for key, value in settings.items() if not (plain and key.startswith("snr_"))}
        trainer = algorithm.make(
            policy_path, algorithm.args(tmp_path, plain, **settings), score, EQUAL, **({} if plain else given)
        )
        replay.attach(trainer)
        if listens and not plain:
            listen(trainer, on_rollout=lambda rollout: None, all_rows=lambda: True)
        computed[0] = 0
        trainer.train()
        found[plain] = computed[0]
    last = rows_of(trainer)[-1]
    assert last["cost/plain_update_positions"] == found[True] > 0
    assert last["cost/update_positions"] == found[False] > 0
    if way == "all":
        assert [row["snr/update_compute_fraction"] for row in rows_of(trainer)] == [1.0] * 4
