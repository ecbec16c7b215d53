"""Gradients of updates in which rows are not alike: samples of several turns, completions kept or dropped
inside groups, and other selectors.

python -m torch.distributed.run --standalone --nproc_per_node=2 several.py POLICY FOLDER
"""

import sys
from pathlib import Path
from zlib import crc32

import torch
from accelerate import PartialState
from ending import end
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends import COMMON
from conftest import PROMPTS
from replay import GROUP_SIZE, REWARDS, Recorder, Replay, gradients_of, move_away

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, SNRFilteredPPOConfig, SNRFilteredPPOTrainer
from ragen2_trl.envs import format_response, make_env
from ragen2_trl.rollouts import TextRollout

LAKE = {"multi_turn": True, "size": 3, "max_turns": 4}
CONTEXTS = {
    "last turns": {"context": "last", "context_turns": 2},
    "memory": {"context": "memory"},
    "oldest turns dropped": {"drop_oldest_turns": True},
}
LOSSES = {"last turns": "dapo", "memory": "grpo", "oldest turns dropped": "dapo"}
SETTINGS = {
    **COMMON,
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "max_steps": 1,
    "beta": 0.1,
    "shuffle_dataset": False,
}


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


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 2
    torch.save(gradients(policy_path, folder, 2), Path(folder) / f"gradients_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()
