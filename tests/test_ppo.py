"""PPO on TRL's rollouts: its update against a slow double loop, and its settings."""

import math

import pytest
import torch
from algorithms import length_reward
from conftest import PROMPTS, assert_same_parameters, parameters_of
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from replay import REWARDS, Replay
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from ragen2_trl import SNRFilteredPPOConfig, SNRFilteredPPOTrainer, TextRollout
from ragen2_trl.envs import make_env
from ragen2_trl.tiny import TINY_SOKOBAN_PATH
from ragen2_trl.trainers.ppo import actor_critic
from ragen2_trl.trainers.ppo import advantages as mathematics
from ragen2_trl.trainers.ppo.critic import FOLDER, WEIGHTS


def ppo_args(make_args, **settings):
    """Those of `make_args`, as PPO's."""
    plain = make_args(snr=False)
    names = ("output_dir", "num_generations", "max_completion_length", "logging_steps", "report_to", "use_cpu", "bf16")
    common = {name: getattr(plain, name) for name in (*names, "gradient_checkpointing", "disable_tqdm", "seed")}
    ours = {"per_device_train_batch_size": 32, "max_steps": 1, "save_strategy": "no"}
    return SNRFilteredPPOConfig(**{**common, **ours, "learning_rate": 1e-2, "critic_lr": 1e-2, **settings})


class Turns(Replay):
    """Every third token is the environment's, and every turn has a reward."""

    def rollout(self, prompts, trainer):
        output = super().rollout(prompts, trainer)
        masks = [[int(place % 3 != 2) for place in range(len(ids))] for ids in output["completion_ids"]]
        turns = [[0.25, -0.5, 0.125][: 1 + len(ids) // 4] for ids in output["completion_ids"]]
        return {**output, "env_mask": masks, "turn_rewards": turns}


class SingleTokens(Replay):
    def rollout(self, prompts, trainer):
        output = super().rollout(prompts, trainer)
        return {**output, "completion_ids": [ids[:1] for ids in output["completion_ids"]]}


class Recording(SNRFilteredPPOTrainer):
    """Keeps what reached the loss, what it came to, and the weights after each step."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.seen.append((inputs, loss.item()))
        return loss


class Weights(TrainerCallback):
    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: value.detach().clone() for name, value in model.named_parameters()})


def trained(policy_path, args, replay_class=Replay, **kwargs):
    replay = replay_class(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    dataset, weights = Dataset.from_dict({"prompt": PROMPTS}), Weights()
    trainer = Recording(
        policy_path, Replay.reward, args, dataset, rollout_func=replay.rollout, callbacks=[weights], **kwargs
    )
    trainer.seen, trainer.replay, trainer.weights = [], replay, weights.after
    give_opinions(trainer.critic)
    trainer.train()
    return trainer


@torch.no_grad()
def give_opinions(critic):
    """A critic begins with values of 0."""
    critic.head.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(3))


def slow_advantages(rewards, values, own, gamma, lam):
    """Of one row, in Python's floats."""
    advantages, following = [0.0] * len(own), None
    for t in reversed([t for t, is_own in enumerate(own) if is_own]):
        value_after = 0.0 if following is None else values[following]
        advantage_after = 0.0 if following is None else advantages[following]
        advantages[t] = rewards[t] + gamma * value_after - values[t] + gamma * lam * advantage_after
        following = t
    return advantages


def slow_rewards(trainer, inputs, row, own):
    """Return and turn rewards of a row, told by its prompt and its first token, on the tokens that earned them."""
    prompt = trainer._tokenizer.decode(inputs["prompt_ids"][row], skip_special_tokens=True)
    length = int(inputs["completion_mask"][row].sum())
    written = inputs["completion_ids"][row][:length].tolist()
    member = next(m for m, ids in enumerate(trainer.replay.completions[prompt]) if ids[:length] == written)
    ends = [t for t, is_own in enumerate(own) if is_own and (t + 1 == len(own) or not own[t + 1])]
    rewards = [0.0] * len(own)
    if isinstance(trainer.replay, Turns):
        for end, reward in zip(ends, [0.25, -0.5, 0.125][: 1 + length // 4], strict=False):
            rewards[end] += reward
    rewards[ends[-1]] += trainer.replay.rewards[prompt][member] - sum(rewards)
    return rewards


@pytest.mark.slow
@pytest.mark.parametrize("value_head", ["shared", "separate"])
@pytest.mark.parametrize(("replay_class", "beta"), [(Replay, 0.0), (Replay, 0.3), (Turns, 0.3), (SingleTokens, 0.0)])
def test_the_update_is_that_of_a_double_loop_over_rows_and_tokens(
    replay_class, beta, value_head, policy_path, make_args
):
    """The second pass over a generation batch: its weights are no longer those that sampled, so that clips bite. The
    weights that sampled are those of the reference policy."""
    gamma, lam, clip, coef = 0.95, 0.9, 0.05, 0.3
    settings = {
        "gamma": gamma,
        "gae_lambda": lam,
        "value_clip": clip,
        "value_coef": coef,
        "value_head": value_head,
        "beta": beta,
    }
    args = ppo_args(make_args, **settings, num_iterations=2, max_steps=2, max_grad_norm=0.0)
    trainer = trained(policy_path, args, replay_class)
    (inputs, _), (_, loss) = trainer.seen
    own = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
    assert len(own) == 16  # of the four kept groups
    values = inputs["old_values"].double().tolist()
    raw = [
        slow_advantages(slow_rewards(trainer, inputs, row, mask), values[row], mask, gamma, lam)
        for row, mask in enumerate(own.tolist())
    ]
    flat = torch.tensor(raw, dtype=torch.float64)[own]
    mean, deviation = flat.mean().item(), (flat.var().item() + 1e-8) ** 0.5

    trainer.model.load_state_dict(trainer.weights[0], strict=False)
    with torch.no_grad(), trainer.critic.listening() as heard:
        logps = trainer._log_probs.now(inputs).double().tolist()
    width = inputs["completion_ids"].size(1)
    new_values = torch.cat(heard)[:, -width - 1 : -1].double().tolist()
    old = inputs["old_per_token_logps"].double().tolist()
    policy_loss = value_loss = divergence = 0.0
    clipped = 0
    for row, t in own.nonzero().tolist():
        advantage, target = (raw[row][t] - mean) / deviation, raw[row][t] + values[row][t]
        assert inputs["advantages"][row][t].item() == pytest.approx(advantage, abs=1e-5)
        assert inputs["returns"][row][t].item() == pytest.approx(target, abs=1e-6)
        ratio = torch.tensor(logps[row][t] - old[row][t], dtype=torch.float64).exp().item()
        policy_loss -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        divergence += (1 / ratio - 1 + math.log(ratio)) * (ratio if trainer.args.use_bias_correction_kl else 1)
        value = new_values[row][t]
        near = min(max(value, values[row][t] - clip), values[row][t] + clip)
        clipped += near != value
        value_loss += 0.5 * max((value - target) ** 2, (near - target) ** 2)
    assert clipped
    expected = (policy_loss + coef * value_loss + beta * divergence) / len(flat)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if beta:
        assert divergence / len(flat) > 1e-4
        assert trainer.state.log_history[1]["kl"] == pytest.approx(divergence / len(flat), rel=1e-4, abs=1e-6)


def test_completions_that_nothing_scored_move_neither_actor_nor_critic(policy_path, make_args):
    args = ppo_args(make_args, snr_strategy="nonzero")
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)

    def one_unscored(prompts, replayed, **kwargs):
        return [None if number == 0 else value for number, value in enumerate(replayed)]

    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = Recording(policy_path, one_unscored, args, dataset, rollout_func=replay.rollout)
    trainer.seen = []
    trainer.train()
    inputs, loss = trainer.seen[0]
    unscored = inputs["returns"].isnan().all(dim=1)
    assert unscored.sum() == 1
    assert inputs["advantages"][unscored].abs().sum() == 0
    assert loss == loss
    assert all(bool(value.isfinite().all()) for value in parameters_of(trainer).values())


def test_the_rewards_of_an_environments_turns_land_on_their_tokens(make_args, monkeypatch):
    env = make_env("sokoban", multi_turn=True, observation="coordinates", max_turns=2, max_actions=1)
    placed, place = [], mathematics.token_rewards

    def spy(returns, mask, turn_rewards):
        rewards = place(returns, mask, turn_rewards)
        placed.append((returns, mask, turn_rewards, rewards))
        return rewards

    monkeypatch.setattr(mathematics, "token_rewards", spy)
    args = ppo_args(make_args, per_device_train_batch_size=8, max_completion_length=160)
    trainer = SNRFilteredPPOTrainer(
        str(TINY_SOKOBAN_PATH),
        env.reward_funcs,
        args,
        env.dataset(8, seed=0),
        rollout_func=TextRollout(env, max_turn_tokens=40),
    )
    trainer.train()
    ((returns, mask, turn_rewards, rewards),) = placed
    assert any(len(turns) == 2 for turns in turn_rewards)
    torch.testing.assert_close(rewards.sum(dim=1), returns)
    for row, turns in enumerate(turn_rewards):
        own = mask[row].tolist()
        ends = [t for t, is_own in enumerate(own) if is_own and (t + 1 == len(own) or not own[t + 1])]
        assert rewards[row][ends].tolist() == pytest.approx(turns)


# The critic


def test_only_the_critic_learns_while_it_warms_up(policy_path, make_args):
    args = ppo_args(make_args, critic_warmup_steps=2, max_steps=3, weight_decay=0.1, value_head="separate")
    trainer = trained(policy_path, args)
    first, second, third = trainer.weights

    def moved(before, after, of_critic):
        names = [name for name in before if name.startswith("critic.") == of_critic]
        return any(not torch.equal(before[name], after[name]) for name in names)

    assert moved(first, second, True)
    assert not moved(first, second, False)
    assert moved(second, third, False)


def test_the_critic_has_a_learning_rate_of_its_own(policy_path, make_args):
    trainer = trained(
        policy_path, ppo_args(make_args, critic_lr=0.5, learning_rate=0.25, lr_scheduler_type="constant")
    )
    of_critic = set(map(id, trainer.critic.parameters()))
    for group in trainer.optimizer.param_groups:
        critics = {id(parameter) in of_critic for parameter in group["params"]}
        assert critics <= {group["lr"] == 0.5}
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(parameters_of(trainer))


def test_adapters_on_both_halves_train_nothing_else(policy_path, make_args):
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    backbone = get_peft_model(AutoModel.from_pretrained(policy_path), lora)
    policy_lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = ppo_args(make_args, value_head="separate", max_steps=2)
    trainer = trained(policy_path, args, value_model=backbone, peft_config=policy_lora)
    before, after = trainer.weights
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("lora_" in name or name.startswith("critic.head") for name in moved)
    assert any(name.startswith("critic.backbone") for name in moved)
    assert any(not name.startswith("critic.") for name in moved)


# Bad input


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"value_head": "both"}, ["value_head", "'both'", "shared", "separate"]),
        ({"multi_objective_aggregation": "normalize_then_sum"}, ["normalize_then_sum", "sum_then_normalize"]),
        ({"loss_type": "grpo"}, ["loss_type", "'grpo'", "dapo"]),
        ({"importance_sampling_level": "sequence"}, ["importance_sampling_level", "'sequence'", "token"]),
        ({"gamma": 1.5}, ["gamma", "1.5", "0 <= value <= 1"]),
        ({"gae_lambda": float("nan")}, ["gae_lambda", "nan"]),
        ({"critic_lr": -1.0}, ["critic_lr", "-1.0", ">= 0"]),
    ],
)
def test_settings_out_of_range_are_refused_by_name_value_and_allowed_set(settings, parts, make_args):
    with pytest.raises(ValueError) as error:
        ppo_args(make_args, **settings)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("loss_type", "dr_grpo"), ("importance_sampling_level", "sequence")])
def test_a_plain_configuration_with_another_loss_is_refused_as_well(name, value, policy_path, prompts, make_args):
    args = make_args(snr=False, **{name: value})
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        SNRFilteredPPOTrainer(policy_path, lambda **_: [], args, prompts)


def test_a_critic_of_its_own_refuses_images_that_it_would_not_see(policy_path, make_args):
    trainer = trained(policy_path, ppo_args(make_args, value_head="separate"))
    ids = torch.ones(1, 3, dtype=torch.long)
    with trainer.critic.listening(), pytest.raises(ValueError, match="value_head='separate' cannot see pixel_values"):
        trainer.model(input_ids=ids, attention_mask=ids, pixel_values=torch.zeros(1, 3, 4, 4))


def test_the_critic_of_the_best_checkpoint_comes_back_with_its_policy(policy_path, make_args):
    args = ppo_args(make_args, max_steps=2, save_strategy="steps", save_steps=1)
    trainer = trained(policy_path, args)
    trainer.state.best_model_checkpoint = f"{args.output_dir}/checkpoint-1"
    trainer._load_best_model()
    first, last = trainer.weights
    assert any(not first[name].equal(last[name]) for name in first if name.startswith("critic"))
    for name, parameter in trainer.model.named_parameters():
        assert parameter.equal(first[name]), name


def test_a_value_model_for_a_shared_head_is_refused(policy_path, prompts, make_args):
    with pytest.raises(ValueError, match="value_model is given and value_head='shared'"):
        SNRFilteredPPOTrainer(policy_path, lambda **_: [], ppo_args(make_args), prompts, value_model=policy_path)


def test_a_policy_without_a_name_says_nothing_of_where_a_critic_begins(policy_path, prompts, make_args):
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy_path))
    policy.config._name_or_path = ""
    args, tokenizer = ppo_args(make_args, value_head="separate"), AutoTokenizer.from_pretrained(policy_path)
    with pytest.raises(ValueError, match="value_model=None, and the policy was not loaded from a folder or the Hub"):
        SNRFilteredPPOTrainer(policy, lambda **_: [], args, prompts, processing_class=tokenizer)


def test_a_schedule_that_looks_at_metrics_cannot_hold_the_policy_back(policy_path, make_args):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    args = ppo_args(make_args, critic_warmup_steps=1, per_device_eval_batch_size=8, **plateau)
    with pytest.raises(ValueError, match=r"critic_warmup_steps=1.*ReduceLROnPlateau"):
        trained(policy_path, args, eval_dataset=Dataset.from_dict({"prompt": PROMPTS}))


def test_an_optimizer_of_deepspeeds_file_is_refused_by_name():
    """accelerate puts a dummy in its place, so that the critic could not get its rate."""
    with pytest.raises(ValueError, match=r"'optimizer', in which the critic would learn at the policy's rate"):
        actor_critic._give_critic_its_rate(object(), torch.nn.Linear(1, 1), 1e-3)


# What a PPO run leaves on disk: the policy as others know it, and its critic apart.


def make_trainer(policy_path, args, **kwargs):
    return SNRFilteredPPOTrainer(policy_path, length_reward, args, Dataset.from_dict({"prompt": PROMPTS}), **kwargs)


@pytest.mark.parametrize("value_head", ["shared", "separate"])
def test_the_policy_is_saved_as_others_know_it_and_the_critic_apart(value_head, policy_path, make_args, tmp_path):
    trainer = make_trainer(policy_path, ppo_args(make_args, value_head=value_head))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights and not any("critic" in name for name in weights)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    policy = {name: value for name, value in parameters_of(trainer).items() if not name.startswith("critic.")}
    assert_same_parameters(policy, dict(alone.named_parameters()))
    saved = load_file(tmp_path / "saved" / FOLDER / WEIGHTS)
    assert_same_parameters(dict(trainer.critic.named_parameters()), saved)


def test_a_saved_critic_can_be_the_value_model_of_another_run(policy_path, make_args, tmp_path):
    args = ppo_args(make_args, value_head="separate")
    trainer = make_trainer(policy_path, args)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = make_trainer(policy_path, args, value_model=str(tmp_path / "saved" / FOLDER))
    assert_same_parameters(dict(trainer.critic.named_parameters()), dict(again.critic.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [{"value_head": "shared"}, {"value_head": "separate"}, {"value_head": "shared", "lora": True}], ids=str
)
def test_a_resumed_run_has_the_critic_and_the_moments_of_both_halves(kind, policy_path, make_args, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 16}
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if kind.get("lora") else None

    def trainer_in(folder):
        args = ppo_args(make_args, output_dir=str(tmp_path / folder), value_head=kind["value_head"], **settings)
        torch.manual_seed(0)  # adapters begin at random
        return make_trainer(policy_path, args, peft_config=lora)

    whole = trainer_in("whole")
    whole.train()
    resumed = trainer_in("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))


def test_a_checkpoint_that_has_lost_its_critic_is_not_resumed_from(policy_path, make_args, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(policy_path, ppo_args(make_args, **settings)).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / FOLDER / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"{FOLDER}/{WEIGHTS} is missing"):
        make_trainer(policy_path, ppo_args(make_args, **settings)).train(resume_from_checkpoint=str(checkpoint))


def test_a_critic_of_another_kind_is_refused(policy_path, make_args, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(policy_path, ppo_args(make_args, **settings)).train()
    other = make_trainer(policy_path, ppo_args(make_args, value_head="separate", **settings))
    with pytest.raises(ValueError, match=r"critic\.safetensors holds .* the same value_head"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


def test_inference_engines_are_given_the_policy_alone(policy_path, make_args, monkeypatch):
    """TRL copies the weights to them in `_generate`."""

    def generate(trainer, prompts):
        return [name for name, _ in trainer.model.named_parameters()]

    monkeypatch.setattr(GRPOTrainer, "_generate", generate)
    trainer = make_trainer(policy_path, ppo_args(make_args))
    trainer.use_vllm = True
    seen = trainer._generate(PROMPTS)
    assert seen and not any(name.startswith("critic.") for name in seen)
    assert any(name.startswith("critic.") for name, _ in trainer.model.named_parameters())


def test_the_critic_goes_to_the_hub_apart_from_the_policy(policy_path, make_args, tmp_path, monkeypatch):
    calls = {}
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, **kwargs: calls.update(made=repo_id))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **kwargs: calls.update(kwargs))
    trainer = make_trainer(policy_path, ppo_args(make_args))
    trainer.push_critic_to_hub("tester/lake-critic")
    assert calls["made"] == calls["repo_id"] == "tester/lake-critic"
    assert calls["folder_path"] == tmp_path / "run" / FOLDER
    assert (calls["folder_path"] / WEIGHTS).exists()
