"""Small trainings on two processes, each a function of its name, for `test_distributed.py` and
`test_backends.py`; some also run on one.

python -m torch.distributed.run --standalone --nproc_per_node=2 small.py NAME ARGUMENT...
"""

import json
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import PartialState

sys.path.insert(0, str(Path(__file__).parents[1]))

from algorithms import GRPO, STILL
from backends import ADAM, COMMON, PPO, REPLAYED, deepspeed_config, is_sharded, parameters_of, start
from conftest import PROMPTS
from datasets import Dataset
from dynamic_samplings import PILOTS, replay_of_pilots, sampled_in_full
from ending import end
from replay import GROUP_SIZE, REWARDS, Recorder, Replay, gradients_of, move_away, second_half
from replayed import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ragen2_trl import (
    CostCallback,
    EnvironmentEvalCallback,
    EpisodeCallback,
    MutualInformationCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
    SNRFilteredPPOConfig,
    SNRFilteredPPOTrainer,
)
from ragen2_trl.columns import TASK
from ragen2_trl.envs import TaskMixture, format_response, make_env
from ragen2_trl.rollouts import TextRollout
from ragen2_trl.tiny import TINY_MODEL_PATH

GLOO = {"ddp_backend": "gloo"}
DATASET = Dataset.from_dict({"prompt": PROMPTS})


def rank() -> int:
    return PartialState(cpu=True, backend="gloo").process_index


def save(folder: str, name: Any, value: Any) -> None:
    (Path(folder) / f"{name}.json").write_text(json.dumps(value))


def replayed(policy_path: str, args: GRPOConfig, kind: type = SNRFilteredGRPOTrainer) -> GRPOTrainer:
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    return kind(policy_path, Replay.reward, args, DATASET, rollout_func=replay.rollout)


def filtered_update(policy_path: str, cases_path: str, folder: str) -> None:
    """The gradients of all cases of a file."""
    gradients = {}
    process = rank()
    for name, case in json.loads(Path(cases_path).read_text()).items():
        args = SNRFilteredGRPOConfig(output_dir=folder, **case["settings"])
        replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS, case["equal_lengths"])
        gradients[name] = gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, case["prompts"])
    torch.save(gradients, Path(folder) / f"gradients_{process}.pt")


def mismatch(policy_path: str, folder: str) -> None:
    """Different settings on each process: each must say so and end, and saves what it was told."""
    process = rank()
    value = 0.5 if process else 0.9
    args = SNRFilteredGRPOConfig(
        folder, **{**COMMON, **GLOO, "per_device_train_batch_size": 4, "beta": 0.0, "snr_value": value}
    )
    try:
        SNRFilteredGRPOTrainer(policy_path, lambda completions, **_: [0.0] * len(completions), args, DATASET)
    except ValueError as error:
        (Path(folder) / f"error_{process}.txt").write_text(str(error))


def measured_rollouts(policy_path: str, folder: str, generations: str) -> None:
    """Measures replayed completions of eight prompts; each process saves its row of metrics."""
    process, row = rank(), {}
    layout = {"per_device_train_batch_size": 16 // int(generations), "max_steps": int(generations)}
    args = GRPOConfig(folder, **{**COMMON, **GLOO, **layout, "learning_rate": 0.0, "beta": 0.0})
    trainer = replayed(policy_path, args, GRPOTrainer)
    trainer.add_callback(MutualInformationCallback(trainer, every=1, num_completions=20, answer=second_half))
    trainer.add_callback(CostCallback(trainer))
    log = trainer.log

    def keep_and_log(*arguments, **keywords):  # `log` clears the metrics, and only process 0 keeps a history
        measured = {key: values[0] for key, values in trainer._metrics["train"].items()}
        row.update({key: value for key, value in measured.items() if key.startswith(("mi/", "cost/"))})
        return log(*arguments, **keywords)

    trainer.log = keep_and_log
    trainer.train()
    save(folder, f"row_{process}", row)


def resumable(policy_path: str, folder: str, rows: int, max_steps: int, resume: str | None = None, **settings):
    """A run with dynamic sampling, perhaps from a checkpoint."""
    dynamic = {"snr_dynamic_sampling_rounds": 3, "snr_strategy": "nonzero"}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": max_steps, "per_device_train_batch_size": rows}
    learning = {"learning_rate": 1e-6, "beta": 0.0, "optim": "adamw_torch", "shuffle_dataset": True}
    args = SNRFilteredGRPOConfig(folder, **{**COMMON, **learning, **dynamic, **saving, **settings})
    trainer = replayed(policy_path, args)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def resume(policy_path: str, folder: str) -> None:
    """Each process saves what it should share with the others."""
    process = rank()
    trainer = resumable(policy_path, folder, 8, 4, str(Path(folder) / "checkpoint-2"), **GLOO)
    drawn, selected = trainer._sampler.policy.order.drawn, trainer._strategy.state()
    save(folder, f"shared_{process}", {"drawn": drawn, "filter": selected, "step": trainer.state.global_step})


def decisions(policy_path: str, folder: str, rows: int, resume: str | None = None) -> dict[str, Any]:
    """With prompt selection the rows of each step's last draw, and what is known at the end."""
    settings = {**COMMON, "max_steps": 8, "save_strategy": "steps", "save_steps": 6, "snr_strategy": "nonzero"}
    settings |= {"per_device_train_batch_size": rows, "snr_prompt_selection": True}
    trainer, drawn = replayed(policy_path, SNRFilteredGRPOConfig(folder, **settings)), []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            drawn.append(trainer._sampler.policy.order.rows.tolist())

    trainer.add_callback(Steps())
    trainer.train(resume_from_checkpoint=resume)
    posterior = trainer._sampler.policy.order.posterior
    return {"drawn": drawn, "seen": posterior.seen.tolist(), "evidence": posterior.evidence.tolist()}


def prompts(policy_path: str, folder: str) -> None:
    process = rank()
    save(folder, f"prompts_{process}", decisions(policy_path, folder, 4))


def pilots(policy_path: str, folder: str) -> None:
    """Gradients of a step with pilots, the prompts that were sampled in full, and the scored completions.

    A generation has all eight prompts, or four and further ones in their place.
    """
    settings = {**COMMON, **STILL, **PILOTS, "max_steps": 1, "beta": 0.1, "loss_type": "dapo"}
    process, found = rank(), {}
    for name, rows, own in (("alone", 16, {}), ("filled up", 8, {"snr_dynamic_sampling_rounds": 10})):
        replay, recorder, batches = replay_of_pilots(policy_path), Recorder(), []
        args = GRPO.config(folder, **{**settings, **own, "per_device_train_batch_size": rows})
        given = {"rollout_func": replay.rollout, "callbacks": [recorder]}
        trainer = GRPO.trainer(policy_path, replay.score, args, DATASET, **given)
        move_away(trainer.model)
        compute = trainer._compute_loss

        def note(model, inputs, compute=compute, batches=batches, trainer=trainer):
            batches += trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
            return compute(model, inputs)

        trainer._compute_loss = note
        trainer.train()
        row = next(row for row in trainer.state.log_history if "snr/sampled_completions" in row)
        found[name] = {
            **{"gradient": recorder.gradients[0], "whole": sampled_in_full(trainer).tolist(), "trained": batches},
            **{"scored": replay.scored, "sampled": row["snr/sampled_completions"]},
        }
    torch.save(found, Path(folder) / f"pilots_{process}.pt")


def scheduler(algorithm: str, policy_path: str, folder: str) -> None:
    """Learning rates and steps of DeepSpeed's own scheduler in a run with empty optimizer steps."""
    start("zero2")
    most = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    parameters = {"warmup_min_lr": 0.0, "warmup_type": "linear", **most}
    config = deepspeed_config(2) | {"scheduler": {"type": "WarmupDecayLR", "params": parameters}}
    layout = {"max_steps": 6, "warmup_steps": 2, "per_device_train_batch_size": 16, "output_dir": folder}
    settings, rates = {**COMMON, **GLOO, **layout, "deepspeed": config}, {}
    for name, flat in (("empty", (1, 3, 5)), ("full", ())):
        trainer = make_trainer(policy_path, settings, PROMPTS, algorithm=algorithm, flat_steps=flat)
        trainer.train()
        engine = trainer.accelerator.deepspeed_engine_wrapped.engine
        empty = trainer.state.log_history[-2]["snr/empty_steps"]
        rates[name] = {"rate": engine.lr_scheduler.get_last_lr()[0], "steps": engine.global_steps, "empty": empty}
    if PartialState().is_main_process:
        save(folder, "rates", rates)


def failing(policy_path: str, folder: str) -> None:
    """Episodes that lose their connection: one on the second process, then one on each of two, which is too many."""
    rows = 8  # on each process
    settings = {"max_completion_length": 100, "per_device_train_batch_size": rows, **start("ddp")}
    args = SNRFilteredGRPOConfig(folder, **{**COMMON, **GLOO, **settings})
    env = make_env("frozen_lake", multi_turn=True, size=3)
    trainer = SNRFilteredGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024),
        env.reward_funcs,
        args,
        env.dataset(8, seed=0),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        rollout_func=TextRollout(env, max_turn_tokens=6),
    )
    play, lost, played, told = env.play, {rows} if args.process_index == 0 else {0, rows}, [], None

    def dropped(row, rng):
        played.append(row)
        if len(played) - 1 in lost:
            raise ConnectionError("reset by peer")
        return play(row, rng)

    env.play = dropped
    try:
        trainer.train()
    except ConnectionError as error:
        told = str(error)
    save(folder, args.process_index, {"rows": trainer.state.log_history, "told": told})


def evaluated(folder: str, processes: int, **settings):
    """A trainer that has evaluated 7 tasks, which two processes do not share evenly, before and after a step.

    Greedily, and the model does not move.
    """
    layout = {"max_completion_length": 240, "per_device_train_batch_size": 8 // processes, "output_dir": folder}
    args = SNRFilteredGRPOConfig(**{**COMMON, **layout, "learning_rate": 0.0, "max_steps": 1, **settings})
    env = make_env("frozen_lake", max_turns=3, max_actions=1)
    rollout, dataset = TextRollout(env, max_turn_tokens=40), env.dataset(8, seed=0)
    trainer = SNRFilteredGRPOTrainer(str(TINY_MODEL_PATH), env.reward_funcs, args, dataset, rollout_func=rollout)
    greedily = {"num_prompts": 7, "num_samples": 1, "temperature": 0.0, "max_turn_tokens": 40, "batch_size": 3}
    tasks = [env, make_env("frozen_lake")]  # in several turns, and in one
    trainer.add_callback(EnvironmentEvalCallback(tasks, trainer, 1, **greedily))
    trainer.train()
    return trainer


def held_out(backend: str, folder: str) -> None:
    trainer = evaluated(folder, 2, **GLOO, **start(backend))
    if backend == "zero3":
        assert is_sharded(trainer)
    rows = [row for row in trainer.state.log_history if "eval/seconds" in row]
    save(folder, PartialState().process_index, rows)


def played(folder: str, processes: int = 2) -> None:
    """Episodes of two tasks, of which a process may have one alone, while groups lie on both processes."""
    order = ("frozen_lake", "bandit", "bandit", "bandit", "frozen_lake", "frozen_lake")  # two generations of three
    mixture = TaskMixture([make_env("frozen_lake"), make_env("bandit")])
    dataset = mixture.dataset(16, seed=0)
    numbers = {task: [row for row, name in enumerate(dataset[TASK]) if name == task] for task in set(order)}
    dataset = dataset.select([numbers[task].pop() for task in order])
    layout = {"per_device_train_batch_size": 12 // processes, "gradient_accumulation_steps": 2}
    layout |= {"steps_per_generation": 1, "max_steps": 1}
    args = GRPOConfig(folder, **{**COMMON, **layout}, **(GLOO if processes > 1 else {}))
    trainer = GRPOTrainer(str(TINY_MODEL_PATH), mixture.reward_funcs, args, dataset)
    trainer.add_callback(EpisodeCallback(trainer))
    trainer.train()


def episodes(backend: str, policy_path: str, folder: str, given: str = "{}") -> None:
    """Episodes of four turns on one process and of two on the other, which generate together all the same."""
    settings = {"max_completion_length": 300, "per_device_train_batch_size": 4, **start(backend), **json.loads(given)}
    args = SNRFilteredGRPOConfig(folder, **{**COMMON, **GLOO, **settings})
    env = make_env("frozen_lake", size=3, max_turns=(4, 2)[args.process_index], max_actions=2)

    def length_reward(completion_ids, **columns):
        return [len(set(ids)) / 10 for ids in completion_ids]  # a random policy never answers: something has to vary

    trainer = SNRFilteredGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024),
        [*env.reward_funcs, length_reward],
        args,
        make_env("frozen_lake", size=3, max_turns=4, max_actions=2).dataset(8, seed=0),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        rollout_func=TextRollout(env, max_turn_tokens=6),
    )
    trainer.add_callback(EpisodeCallback(trainer, every=1))
    calls, generate = [], trainer._generate_single_turn

    def counted(contexts, *arguments, **keywords):
        calls.append(len(contexts))
        return generate(contexts, *arguments, **keywords)

    trainer._generate_single_turn = counted
    trainer.train()
    if backend in ("zero3", "fsdp2"):
        assert is_sharded(trainer)
    save(folder, args.process_index, {"calls": calls, "rows": trainer.state.log_history})


def ppo_resume(backend: str, policy_path: str, folder: str) -> None:
    """PPO through a checkpoint, and again from it."""
    settings = {**start(backend), **GLOO}
    if backend == "zero3":
        settings["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    case = {**PPO, **ADAM, "value_head": "separate", "critic_lr": 1e-3, "critic_warmup_steps": 1, "max_steps": 4}
    case |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "output_dir": folder}
    case["per_device_train_batch_size"] = case.pop("rows") // 2
    replayed = {name: case.pop(name) for name in REPLAYED if name in case}

    def train(resume: str | None = None):
        trainer = make_trainer(policy_path, {**COMMON, **case, **settings}, PROMPTS, **replayed)
        assert trainer.accelerator.num_processes == 2
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trainer = train()
    if backend == "zero3":
        assert is_sharded(trainer)
    whole = parameters_of(trainer)
    trainer.save_model(str(Path(folder) / "final"))
    del trainer
    resumed = parameters_of(train(str(Path(folder) / "checkpoint-2")))
    if PartialState().is_main_process:
        torch.save({"whole": whole, "resumed": resumed}, Path(folder) / "parameters.pt")


LAKE = {"multi_turn": True, "size": 3, "max_turns": 4}
CONTEXTS = {
    "last turns": {"context": "last", "context_turns": 2},
    "memory": {"context": "memory"},
    "oldest turns dropped": {"drop_oldest_turns": True},
}
LOSSES = {"last turns": "dapo", "memory": "grpo", "oldest turns dropped": "dapo"}
SETTINGS = {**COMMON, **STILL, "max_steps": 1}


# Updates in which rows are not alike: samples of several turns, completions kept or dropped inside groups, and other
# selectors.


def of_contexts(policy_path: str, folder: str, name: str, rows: int, accumulation: int) -> dict[str, torch.Tensor]:
    """The gradient where each episode is several samples, in number other ones on each process."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    env = make_env("frozen_lake", **LAKE)
    settings = {**SETTINGS, "max_completion_length": 400, "loss_type": LOSSES[name]}
    args = SNRFilteredGRPOConfig(
        folder, **{**settings, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    )

    def by_place(seed, **columns):
        return [float(number % GROUP_SIZE * (one % 3)) for number, one in enumerate(seed)]

    recorder = Recorder()
    trainer = SNRFilteredGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=260),
        by_place,
        args,
        env.dataset(8, seed=0),
        processing_class=tokenizer,
        rollout_func=TextRollout(env, 40, **CONTEXTS[name]),
        callbacks=[recorder],
    )

    def answer(context):
        """Depends on the context alone, and so on no process."""
        kind = crc32(str(context).encode()) % 3
        text = format_response(f"Thought {kind}.", ["Up"] if kind else ["Right", "Down"])
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    trainer._generate_single_turn = lambda contexts, *args, **kwargs: ([answer(one) for one in contexts], None)
    move_away(trainer.model)
    trainer.train()
    (gradient,) = recorder.gradients
    return gradient


OPTIONS = {
    "a quarter": {"snr_selector": "research.ablations:third_quarter"},
    "random groups": {"snr_selector": "research.ablations:as_many_at_random"},
    "ends of groups": {"snr_selector": "research.ablations:best_and_worst"},
    "ends of groups, scaled by batch": {"snr_selector": "research.ablations:best_and_worst", "scale_rewards": "batch"},
}


def of_options(policy_path: str, folder: str, ppo: bool, name: str, rows: int, accumulation: int) -> dict:
    """The gradient under a selector."""
    trainer_class, config = SNRFilteredGRPOTrainer, SNRFilteredGRPOConfig
    if ppo:
        trainer_class, config = SNRFilteredPPOTrainer, SNRFilteredPPOConfig
    layout = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    settings = {key: value for key, value in {**SETTINGS, **OPTIONS[name], **layout}.items() if key != "loss_type"}
    args = config(folder, **settings)
    replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS)
    (gradient,) = gradients_of(trainer_class, policy_path, args, replay, PROMPTS)
    return gradient


def gradients(policy_path: str, folder: str, processes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of every case on so many processes: 32 rows in four micro-batches."""
    layout = (8 // processes, 4)
    found = {name: of_contexts(policy_path, folder, name, *layout) for name in CONTEXTS}
    options = {
        f"{'ppo' if ppo else 'grpo'}, {name}": of_options(policy_path, folder, ppo, name, *layout)
        for ppo in (False, True)
        for name in OPTIONS
    }
    return {**found, **options}


def several(policy_path: str, folder: str) -> None:
    process = rank()
    torch.save(gradients(policy_path, folder, 2), Path(folder) / f"gradients_{process}.pt")


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    vars()[name](*arguments)
    end()
