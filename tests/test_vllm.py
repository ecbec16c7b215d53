"""With a real vLLM in the process: what is sampled is what is trained, and the filter keeps its promises.

`make test-vllm` runs these in an environment of their own.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs these with its build for CPUs")

from conftest import RUN, assert_same_parameters, log_rows, parameters_of
from datasets import Dataset
from replay import Recorder, assert_close, mean_gradient
from trl import GRPOConfig, GRPOTrainer
from vllm_engine import MAX_LENGTH, one_engine  # noqa: F401 -- a fixture

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, TextRollout
from ragen2_trl.envs import make_env
from ragen2_trl.rollout_events import extend, listen
from ragen2_trl.tiny import TINY_MODEL_PATH

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_engine")]

BLOCK = 128  # tokens of vLLM's cache on a CPU
SAME = 1e-3  # nats by which two float32 implementations differ at a token
ENV = make_env("frozen_lake")
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.2,
    "vllm_max_model_length": MAX_LENGTH,
    "model_init_kwargs": {"dtype": "float32"},
    "max_completion_length": 24,
    "learning_rate": 1e-3,
}


def ends_well(completions, **kwargs) -> list[float]:
    """A reward that differs within some groups and not within others."""
    texts = [completion[-1]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [float("Right" in text) for text in texts]


def make(tmp_path, plain=False, dataset=None, reward=ends_well, **settings):
    """A trainer of the tiny model on FrozenLake, 8 prompts of 4 completions a step."""
    given = {name: settings.pop(name) for name in ("callbacks", "rollout_func") if name in settings}
    trainer_class, config = (GRPOTrainer, GRPOConfig) if plain else (SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig)
    settings = {**RUN, "per_device_train_batch_size": 32, **VLLM, **settings}
    args = config(str(tmp_path), **settings)
    dataset = ENV.dataset(64, seed=0) if dataset is None else dataset
    return trainer_class(str(TINY_MODEL_PATH), reward, args, dataset, **given)


def differences(trainer) -> list[float]:
    """Of each step, the most nats between what vLLM sampled a token with and what the trainer computes for it."""
    return [row["sampling/sampling_logp_difference/max"] for row in log_rows(trainer)]


def batches_of(trainer, measure=lambda batch: None) -> list[tuple]:
    """What the loss is computed of, as it comes, and what is measured then."""
    seen, compute_loss = [], trainer._compute_loss

    def spy(model, inputs):
        seen.append((inputs, measure(inputs)))
        return compute_loss(model, inputs)

    trainer._compute_loss = spy
    return seen


def logps_now(trainer, batch) -> torch.Tensor:
    """(rows, T) under the trainer's weights, by a forward pass of the model itself."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits
    width = batch["completion_ids"].shape[1]
    logps = logits[:, -width - 1 : -1].log_softmax(-1)
    return logps.gather(2, batch["completion_ids"][..., None]).squeeze(2)


def recorded(trainer) -> list[tuple]:
    """Prompts of each generation, and what vLLM answered."""
    calls, generate = [], trainer.vllm_generation.generate

    def record(prompts, **kwargs):
        calls.append((prompts, generate(prompts=prompts, **kwargs)))
        return calls[-1][1]

    trainer.vllm_generation.generate = record
    return calls


def test_what_is_sampled_is_what_is_trained_at_every_step(tmp_path):
    trainer = make(tmp_path, max_steps=4, learning_rate=1e-2)
    before = parameters_of(trainer)
    trainer.train()
    assert max((value - before[name]).abs().max() for name, value in parameters_of(trainer).items()) > 1e-2
    assert len(differences(trainer)) == 4
    assert max(differences(trainer)) < SAME


def test_the_importance_weights_of_kept_rows_are_the_trainers_probabilities_over_the_samplers(tmp_path):
    trainer = make(
        tmp_path,
        max_steps=1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.5,
        vllm_importance_sampling_clip_min=None,
    )
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.sync_weights = lambda: None  # from here on, vLLM has other weights than the trainer
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    seen = batches_of(trainer, lambda batch: logps_now(trainer, batch))
    trainer.train()
    ((batch, logps),) = seen
    assert 0 < len(logps) < 32  # the filter kept some
    weights = (logps - batch["sampling_per_token_logps"]).exp().clamp(max=1.5)
    mask = batch["completion_mask"].bool()
    assert (weights[mask] == 1.5).any() and (weights[mask] < 0.9).any()
    torch.testing.assert_close(batch["importance_sampling_ratio"][mask], weights[mask], rtol=1e-3, atol=1e-4)


STILL = {"learning_rate": 0.0, "max_grad_norm": 0.0, "loss_type": "dapo", "beta": 0.1}


def test_lossless_ends_with_the_parameters_of_trl_from_what_vllm_sampled(tmp_path):
    """Old log-probs, which the importance correction needs, are computed for rows with an advantage, prompts once."""
    # With a smaller epsilon, Adam takes full steps along rounding errors.
    settings = {"max_steps": 4, "num_iterations": 2, "beta": 0.0, "learning_rate": 1e-4, "adam_epsilon": 1e-5}
    plain = make(tmp_path / "plain", plain=True, **settings)
    calls = recorded(plain)
    plain.train()
    ours = make(tmp_path / "lossless", snr_strategy="lossless", **settings)
    answers = iter(calls)

    def replay(prompts, **kwargs):
        asked, answer = next(answers)
        assert asked == prompts
        return answer

    ours.vllm_generation.generate = replay
    ours.train()
    assert ours._shared_prompts.serves
    assert max(row["snr/update_compute_fraction"] for row in log_rows(ours)) < 0.9
    expected, begun = parameters_of(plain), parameters_of(make(tmp_path / "begun", plain=True))
    for name, value in parameters_of(ours).items():
        assert (value - expected[name]).abs().max() < 5e-6
    assert max((value - begun[name]).abs().max() for name, value in expected.items()) > 1e-4


def test_promise_2_the_update_is_plain_grpo_on_the_groups_that_are_kept(tmp_path):
    recorder = Recorder()
    trainer = make(tmp_path / "filtered", max_steps=1, callbacks=[recorder], **STILL)
    calls, inputs = recorded(trainer), []
    listen(trainer, on_rows=inputs.extend)
    trainer.train()
    ((_, answer),) = calls
    kept = trainer.latest_selection.groups
    assert 0 < kept.sum() < len(kept)

    rows = trainer.latest_selection.kept.flatten().nonzero().flatten().tolist()
    plain_recorder = Recorder()
    plain = make(
        tmp_path / "plain",
        plain=True,
        dataset=Dataset.from_list([inputs[row] for row in rows[::4]]),
        max_steps=1,
        callbacks=[plain_recorder],
        **{**STILL, "per_device_train_batch_size": len(rows), "shuffle_dataset": False},
    )
    again = tuple([part[row] for row in rows] if part is not None else None for part in answer)

    def replay(prompts, **kwargs):
        assert [tuple(ids) for ids in prompts] == [tuple(ids) for ids in again[0]]
        return again

    plain.vllm_generation.generate = replay
    plain.train()
    assert_close(mean_gradient(recorder.gradients), mean_gradient(plain_recorder.gradients))


def test_promise_3_what_is_dropped_is_not_computed(tmp_path):
    trainer = make(tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=8)
    rows = []

    def count(module, args, kwargs):
        if torch.is_grad_enabled():
            rows.append(len(kwargs["input_ids"]))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    kept = int(trainer.latest_selection.kept.flatten().sum())
    assert 0 < kept < 32
    assert sum(rows) == kept and max(rows) == 4


def test_pilots_and_the_rest_of_their_groups_are_sampled_by_what_is_trained(tmp_path):
    def halves(completions, dead, **kwargs):
        return [0.0 if of_dead else float(len(str(one)) % 2) for one, of_dead in zip(completions, dead, strict=True)]

    dataset = ENV.dataset(64, seed=0).add_column("dead", [True, True, True, False] * 16)
    settings = {"max_steps": 6, "num_generations": 8, "snr_pilot_generations": 2, "snr_strategy": "nonzero"}
    trainer = make(tmp_path, dataset=dataset, reward=halves, shuffle_dataset=False, **settings)
    calls, seen = recorded(trainer), batches_of(trainer, lambda batch: logps_now(trainer, batch))
    trainer.train()
    answered = [len(completions) for _, (_, completions, *_) in calls]
    whole = [int(row["snr/sampled_completions"] - 4 * 2) // 6 for row in log_rows(trainer)]
    assert answered == [count for of_step in whole for count in (4 * 2, 6 * of_step) if count]
    assert min(whole) < 4
    for batch, logps in seen:
        mask = batch["completion_mask"].bool()
        assert (logps - batch["sampling_per_token_logps"])[mask].abs().max() < SAME
    assert max(differences(trainer)) < SAME


def test_the_rest_of_a_group_finds_its_prompt_in_the_cache_of_vllm(tmp_path):
    settings = {"max_steps": 1, "num_generations": 8, "snr_pilot_generations": 2, "snr_strategy": "nonzero"}
    rows = [f"{number} {' '.join(['left'] * 150)}" for number in range(64)]
    trainer = make(tmp_path, dataset=Dataset.from_dict({"prompt": rows}), reward=every_other, **settings)
    llm, found = trainer.vllm_generation.llm, []

    def counted(generate, *args, **kwargs):
        before = cached_tokens(llm)
        outputs = generate(*args, **kwargs)
        found.append((cached_tokens(llm) - before, len(outputs)))
        return outputs

    take_off = extend(llm, "generate", counted)
    trainer.train()
    take_off()
    _, rest = found  # pilots first
    assert rest[0] / rest[1] >= BLOCK  # a block of each prompt and more, whose pilots have filled it


def every_other(completions, **kwargs) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


def cached_tokens(llm) -> float:
    return sum(one.value for one in llm.get_metrics() if one.name == "vllm:prefix_cache_hits")


def test_turns_of_an_episode_are_sampled_by_what_is_trained(tmp_path):
    env = make_env("frozen_lake", multi_turn=True)
    trainer = make(
        tmp_path,
        dataset=env.dataset(64, seed=0),
        reward=env.reward_funcs,
        rollout_func=TextRollout(env, max_turn_tokens=40),
        max_completion_length=250,
        max_steps=2,
    )
    calls = recorded(trainer)
    trainer.train()
    assert len(calls) > 2  # several turns
    assert all(len(ids) <= 40 for _, answer in calls for ids in answer[1])
    assert all(row["env/frozen_lake/turns"] > 1 for row in log_rows(trainer))
    assert max(differences(trainer)) < SAME


def test_the_callback_measures_what_vllm_sampled(tmp_path):
    trainer = make(tmp_path, max_steps=2, max_completion_length=80, reward=ENV.reward_funcs)
    trainer.add_callback(MutualInformationCallback(trainer, every=1))
    trainer.train()
    for row in log_rows(trainer):
        assert row["mi/first_turn/retrieval_accuracy"] > 2 * row["mi/first_turn/retrieval_chance"]
        assert row["mi/first_turn/mi_seq"] > 0


def test_a_resumed_run_samples_with_the_checkpoints_weights_and_ends_where_the_whole_run_ended(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    whole = make(tmp_path / "whole", **settings)
    calls = recorded(whole)
    whole.train()  # which leaves the engine with the weights of step 3
    resumed = make(tmp_path / "resumed", **settings)
    later, errors = iter(calls[2:]), []
    generate = resumed.vllm_generation.generate

    def replay(prompts, **kwargs):
        _, completions, logprobs, _ = generate(prompts=prompts, **kwargs)
        for prompt, completion, sampled in zip(prompts, completions, logprobs, strict=True):
            batch = {"prompt_ids": torch.tensor([prompt]), "completion_ids": torch.tensor([completion])}
            masks = {"prompt_mask": batch["prompt_ids"] >= 0, "completion_mask": batch["completion_ids"] >= 0}
            errors.append((logps_now(resumed, batch | masks)[0] - torch.tensor(sampled)[:, 0]).abs().max())
        asked, answer = next(later)
        assert asked == prompts
        return answer

    resumed.vllm_generation.generate = replay
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert len(errors) == 2 * 32 and max(errors) < SAME
    assert_same_parameters(parameters_of(whole), parameters_of(resumed))
