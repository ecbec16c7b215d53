"""Promise 8: lossless is TRL. Parameters are the plain trainer's at any step, for a part of the update's compute."""

import pytest
import torch
from algorithms import GRPO, LOSSES, PPO, RLOO, replay_of, slow
from conftest import PROMPTS, apart, log_rows, parameters_of
from datasets import Dataset
from replay import REWARDS, Replay
from test_trl_fidelity import mixture_of_experts
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredGRPOTrainer

LOSSLESS = {"snr_strategy": "lossless"}
# 32 rows, of which 21 have an advantage. Adam, clipping and weight decay: what a wrong scale cannot hide behind.
TRAINING = {"beta": 0.0, "weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "constant"}
# Two passes over four optimizer steps a generation, each of two micro-batches of four rows.
SEVERAL = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 8,
    "num_iterations": 2,
}
OF_ONE = {"per_device_train_batch_size": 8, "steps_per_generation": 1}
LAYOUTS = {
    "one row per device": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
    "out of step": {**SEVERAL, "gradient_accumulation_steps": 3},
    "several generations a step": {**OF_ONE, "gradient_accumulation_steps": 4},
    "a shorter step ends each epoch": {**OF_ONE, "gradient_accumulation_steps": 3},
    "padded": {**SEVERAL, "pad_to_multiple_of": 8},
}


class InFloat64:
    """TRL's losses with nothing in them rounded to float32, as its fused head does."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "advantages": batch["advantages"].double()}

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        logits = model(input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(dim=-1)
        own = logps.gather(2, input_ids[:, -logits_to_keep:, None]).squeeze(2)
        return own, -(logps.exp() * logps).sum(dim=2).detach(), None


def model_in_float64(tokenizer):
    """Without a float32 inside, and with learned positions, which a shift of padding would change."""
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ids, initializer_range=0.2)).double()


class HalfOfThemEnd(Replay):
    """The others are cut at the length limit."""

    def __init__(self, tokenizer, *args):
        super().__init__(tokenizer, *args)
        for completions in self.completions.values():
            for completion in completions[::2]:
                completion[-1] = tokenizer.eos_token_id


class FlatAtTimes(Replay):
    """Every second generation has no reward variance."""

    generations = 0

    def score(self, prompts, **kwargs):
        self.generations += 1
        return [0.0] * len(prompts) if self.generations % 2 == 0 else super().score(prompts)


def trained(algorithm, policy_path, folder, plain, *, double=True, replay=Replay, above=(), after=(), **settings):
    """A trainer after its steps. `above` are classes put before it, `after` what is set when all is checked."""
    replay = replay(replay_of(policy_path).tokenizer, REWARDS)
    args = algorithm.args(folder, plain, **{"learning_rate": 1e-4, **TRAINING, **settings})
    for name, value in after:
        setattr(args, name, value)
    bases = (*above, *((InFloat64,) if double else ()), algorithm.plain_trainer if plain else algorithm.trainer)
    trainer = algorithm.make(
        model_in_float64(replay.tokenizer) if double else policy_path,
        args,
        replay,
        trainer_class=type("Trainer", bases, {}),
        processing_class=replay.tokenizer,
    )
    trainer.train()
    return trainer


def assert_lossless(algorithm, policy_path, folder, bound=1e-12, **settings):
    plain = trained(algorithm, policy_path, folder, True, **settings)
    ours = trained(algorithm, policy_path, folder, False, **LOSSLESS, **settings)
    assert apart(ours, plain) < bound
    before = model_in_float64(ours._tokenizer) if ours.model.dtype == torch.float64 else None
    if before is not None:
        assert not [p for p, q in zip(before.parameters(), ours.model.parameters(), strict=True) if torch.equal(p, q)]
    for row, of_plain in zip(log_rows(ours), log_rows(plain), strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):  # summed in float32 by the trainer
            assert row[name] == pytest.approx(of_plain[name], rel=1e-5, abs=1e-6), name
    return ours


ALGORITHMS = [(GRPO, {"loss_type": loss_type}) for loss_type in LOSSES] + [(RLOO, {})]
IDS = [*LOSSES, "rloo"]
each = pytest.mark.parametrize(("algorithm", "settings"), ALGORITHMS, ids=IDS)


@each
def test_lossless_ends_with_the_parameters_of_trl(algorithm, settings, policy_path, tmp_path):
    ours = assert_lossless(algorithm, policy_path, tmp_path, **SEVERAL, **settings, max_steps=5)
    assert all(row["snr/update_compute_fraction"] < 0.9 for row in log_rows(ours))


@pytest.mark.parametrize(("layout", "loss_type"), zip(LAYOUTS, ["dapo", "bnpo"] * 3, strict=False))
def test_lossless_is_trl_in_every_layout(layout, loss_type, policy_path, tmp_path):
    assert_lossless(GRPO, policy_path, tmp_path, **LAYOUTS[layout], loss_type=loss_type, max_steps=3)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_lossless_is_trl_where_truncated_completions_are_masked(loss_type, policy_path, tmp_path):
    masked = {"mask_truncated_completions": True, "replay": HalfOfThemEnd}
    assert_lossless(GRPO, policy_path, tmp_path, **SEVERAL, **masked, loss_type=loss_type, max_steps=3)


@pytest.mark.parametrize(("algorithm", "settings"), [(GRPO, {"loss_type": "bnpo"}), (RLOO, {})], ids=["grpo", "rloo"])
def test_a_step_without_any_advantage_is_taken_as_trl_takes_it(algorithm, settings, policy_path, tmp_path):
    """With a gradient of zero: momentum and weight decay move the weights, from one row of the batch."""
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 4, **settings}
    ours = assert_lossless(algorithm, policy_path, tmp_path, replay=FlatAtTimes, **settings)
    computed = [row["snr/update_compute_fraction"] for row in log_rows(ours)]
    assert [share < 0.05 for share in computed] == [False, True, False, True]
    assert [row["grad_norm"] == 0 for row in log_rows(ours)] == [False, True, False, True]
    assert log_rows(ours)[-1]["snr/empty_steps"] == 0
    left_out = trained(algorithm, policy_path, tmp_path, False, replay=FlatAtTimes, snr_strategy="nonzero", **settings)
    assert apart(ours, left_out) > 1e-6


class CountsRows:
    """How many rows go through the model for an update."""

    rows_computed = 0

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        if torch.is_grad_enabled():
            self.rows_computed += len(input_ids)
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)


@pytest.mark.parametrize("layout", [SEVERAL, LAYOUTS["out of step"]], ids=["in step", "out of step"])
def test_only_rows_with_an_advantage_are_computed(layout, policy_path, tmp_path):
    settings = {**layout, "max_steps": 16 // layout["gradient_accumulation_steps"]}
    above, both = (CountsRows,), []
    for plain in (True, False):
        own = {} if plain else LOSSLESS
        both.append(trained(GRPO, policy_path, tmp_path, plain, above=above, **own, **settings).rows_computed)
    passes = settings["max_steps"] * layout["gradient_accumulation_steps"] / 8
    assert both[0] == passes * 32
    assert both[1] <= passes * (32 - 11) + settings["max_steps"]  # and one row of a step without any


class PaysFlatGroups:
    """A subclass of a user: its advantages are not only of rewards."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["advantages"][::3] += 0.25
        return batch


@pytest.mark.parametrize(("double", "bound"), [(True, 1e-12), (False, 5e-6)], ids=["float64", "float32"])
def test_advantages_of_a_subclass_are_those_that_count(double, bound, policy_path, tmp_path):
    settings = {**SEVERAL, "above": (PaysFlatGroups,), "max_steps": 5}
    assert_lossless(GRPO, policy_path, tmp_path, bound, double=double, **settings)


class Ratios:
    """vLLM's importance weights, of any rollout."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ratio = 0.5 + batch["completion_ids"].double() / 400
        return {**batch, "importance_sampling_ratio": ratio * batch["completion_mask"] + 1 - batch["completion_mask"]}

    def _compute_loss(self, model, inputs):
        self.use_vllm, self.vllm_importance_sampling_correction = True, True
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


def test_importance_weights_of_vllm_stay_with_their_rows(policy_path, tmp_path, monkeypatch):
    monkeypatch.setattr("ragen2_trl.trainers.checks.overridden", lambda trainer_class: set())  # its loss is TRL's
    assert_lossless(GRPO, policy_path, tmp_path, **SEVERAL, above=(Ratios,), loss_type="dapo", max_steps=3)


def parity(prompts, completions, **kwargs):
    """Some prompts never succeed; the others by what is sampled."""
    return [
        len(text) % 2 * float(PROMPTS.index(prompt) % 2) for prompt, text in zip(prompts, completions, strict=True)
    ]


@pytest.mark.parametrize("max_steps", [5, slow(50)])
def test_in_float32_and_sampling_for_itself_it_stays_within_rounding(max_steps, policy_path, tmp_path):
    """The bound that the documentation states: a hundredth of one step of Adam, whose rate is 1e-3."""
    trainers = []
    for plain in (True, False):
        settings = {
            **SEVERAL,
            **TRAINING,
            "max_steps": max_steps,
            "learning_rate": 1e-3,
            **({} if plain else LOSSLESS),
        }
        trainer = GRPO.make(policy_path, GRPO.args(tmp_path, plain, **settings), parity, PROMPTS)
        trainer.train()
        trainers.append(trainer)
    assert apart(*trainers) < 1e-5
    assert log_rows(trainers[1])[0]["snr/kept_fraction"] < 0.7


# What is refused, and why


WITHOUT_ADVANTAGE = [PROMPTS[1], PROMPTS[3]]
REFUSED = {
    "kl": (GRPO, {"beta": 0.1}),
    "entropy bonus": (GRPO, {"entropy_coef": 0.02}),
    "adaptive entropy bonus": (GRPO, {"use_adaptive_entropy": True, "entropy_coef_min": 0.01, "entropy_target": 9.0}),
    "entropy quantile": (GRPO, {"top_entropy_quantile": 0.5}),
}


# What gives rows of flat groups an advantage.
CENTRED = {
    "kl in the reward": (RLOO, {"beta": 0.1}),
    "normalised": (RLOO, {"normalize_advantages": True}),
    "normalised sums": (GRPO, {"multi_objective_aggregation": "normalize_then_sum"}),
}


@pytest.mark.parametrize(("algorithm", "settings"), (REFUSED | CENTRED).values(), ids=REFUSED | CENTRED)
def test_what_acts_on_rows_without_advantage_is_refused_as_it_would_end_elsewhere(
    algorithm, settings, policy_path, tmp_path
):
    """Of CENTRED in float64, where lossless ends within 1e-12 of TRL; but for KL, whose reference model has a name."""
    with pytest.raises(ValueError) as refused:
        algorithm.args(tmp_path, **TRAINING | settings, **LOSSLESS)
    field, value = next(iter(settings.items()))
    assert all(part in str(refused.value) for part in (f"{field}={value!r}", "'lossless'", "allowed"))
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_steps": 3}
    settings = {**settings, **layout, "double": field in ("normalize_advantages", "multi_objective_aggregation")}
    plain = trained(algorithm, policy_path, tmp_path, True, **settings)
    forced = trained(algorithm, policy_path, tmp_path, False, after=LOSSLESS.items(), **settings)
    assert apart(forced, plain) > (1e-6 if settings["double"] else 1e-5)


def test_ppo_is_refused_as_its_critic_learns_from_every_row(policy_path, tmp_path):
    with pytest.raises(ValueError, match=r"snr_strategy='lossless'.*critic"):
        PPO.args(tmp_path, **LOSSLESS)
    everything = {"snr_strategy": "all", "critic_lr": 1e-2, "max_steps": 1}
    args = PPO.args(tmp_path, **everything, per_device_train_batch_size=8)
    trainer = PPO.make(policy_path, args, replay_of(policy_path), WITHOUT_ADVANTAGE)
    before = trainer.model.critic.head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.critic.head.weight)


def test_load_balancing_of_experts_is_refused_as_it_acts_on_every_row(policy_path, tmp_path):
    moved = []
    for coefficient in (0.0, 0.1):
        model, tokenizer = mixture_of_experts(policy_path)
        before = parameters_of(type("T", (), {"model": model}))
        args = GRPO.args(tmp_path, True, max_steps=1, router_aux_loss_coef=coefficient)
        flat = lambda prompts, **kwargs: [0.0] * len(prompts)  # noqa: E731
        rows = Dataset.from_dict({"prompt": WITHOUT_ADVANTAGE})
        trainer = GRPOTrainer(model, flat, args, rows, processing_class=tokenizer)
        trainer.train()
        moved.append(any(not torch.equal(before[name], value) for name, value in parameters_of(trainer).items()))
    assert moved == [False, True]
    args = GRPO.args(tmp_path, router_aux_loss_coef=0.1, **LOSSLESS)
    with pytest.raises(ValueError, match=r"'lossless'.*router_aux_loss_coef=0.1"):
        SNRFilteredGRPOTrainer(model, flat, args, rows, processing_class=tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"snr_value": 0.5},
        {"snr_score": "random"},
        {"snr_score_reward": "score"},
        {"snr_dynamic_sampling_rounds": 1},
        {"snr_prompt_selection": True},
        {"snr_selector": "ragen2_trl.filtering:zero_variance"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_another_training_are_refused_by_name(settings, tmp_path):
    for algorithm in (GRPO, RLOO):
        with pytest.raises(ValueError) as refused:
            algorithm.args(tmp_path, **LOSSLESS, **{"beta": 0.0, **settings})
        assert all(part in str(refused.value) for part in (*settings, "lossless"))


def test_a_loss_of_ones_own_is_refused(policy_path, tmp_path):
    own = type("Own", (SNRFilteredGRPOTrainer,), {"_compute_loss": lambda self, model, inputs: 0.0})
    rows = Dataset.from_dict({"prompt": PROMPTS})
    with pytest.raises(TypeError, match=r"snr_strategy='lossless'.*Own.*_compute_loss"):
        own(policy_path, parity, GRPO.args(tmp_path, **LOSSLESS), rows)
