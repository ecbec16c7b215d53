"""What mutual information in the reference code's form costs beside ours: tokens and seconds of each scope.

    python benchmarks/trajectory_reference.py

The tiny model samples one generation of 8 prompts x 16 completions in several turns of Sokoban; each scope then scores
the same completions, 64 of them, as the callback does by default.
"""

import json
import tempfile
from pathlib import Path

import torch
from measuring import machine, now

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer, TextRollout
from ragen2_trl.callbacks.rollouts import Sampled, gather_rollout, watch_rollouts
from ragen2_trl.callbacks.scopes import measure_scope
from ragen2_trl.envs import make_env
from ragen2_trl.instrument import REFERENCE_SCOPE, SCOPES, Sampling, Trajectories, count_tokens
from ragen2_trl.tiny import resolve_model

RESULTS = Path(__file__).parent / "results"
GROUP = 16


def sample(folder: str) -> tuple[SNRFilteredGRPOTrainer, Sampled]:
    env = make_env("sokoban", multi_turn=True)
    args = SNRFilteredGRPOConfig(
        folder,
        max_steps=1,
        per_device_train_batch_size=8 * GROUP,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=512,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    model = resolve_model("tiny-sokoban")
    dataset = env.dataset(8, seed=0)
    trainer = SNRFilteredGRPOTrainer(model, env.reward_funcs, args, dataset, rollout_func=TextRollout(env))
    found: list[Sampled] = []
    watch_rollouts(trainer, found.append)
    trainer.train()
    return trainer, found[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer, sampled = sample(folder)
    rollout = gather_rollout(sampled)
    ids = (rollout.prompt_ids, rollout.completion_ids, trainer._tokenizer, rollout.tool_masks)
    groups = [row // GROUP for row in range(len(rollout.completion_ids))]
    results: dict = {"machine": machine(), "scopes": {}}
    for scope in (*SCOPES, REFERENCE_SCOPE):
        generator, start = torch.Generator().manual_seed(0), now()
        with count_tokens(trainer.model) as tokens:
            metrics, *_ = measure_scope(scope, trainer.model, Trajectories(*ids), groups, generator, Sampling())
        shown = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "mi_token_tempered", "verbatim_elsewhere")
        results["scopes"][scope] = {
            "tokens": sum(tokens),
            "seconds": round(now() - start, 2),
            **{name: round(metrics[name], 4) for name in shown if name in metrics},
        }
    results["turns"] = Trajectories(*ids).num_turns(0)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trajectory_reference.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
