"""Episodes that lose their connection: one on the second process, then one on each of two, which is too many.

python -m torch.distributed.run --standalone --nproc_per_node=2 failing.py POLICY FOLDER
"""

import json
import sys
from pathlib import Path

from backends import COMMON, start
from ending import end
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.rewards import think_format_reward  # noqa: F401 -- imports TRL before deepspeed looks at it

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.rollouts import TextRollout

ROWS = 8  # on each process


def main() -> None:
    policy_path, folder = sys.argv[1:]
    settings = {**COMMON, "max_completion_length": 100, "per_device_train_batch_size": ROWS, **start("ddp")}
    args = SNRFilteredGRPOConfig(**settings, output_dir=folder, ddp_backend="gloo")
    env = make_env("frozen_lake", multi_turn=True, size=3)
    trainer = SNRFilteredGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(policy_path, max_position_embeddings=1024),
        env.reward_funcs,
        args,
        env.dataset(8, seed=0),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        rollout_func=TextRollout(env, max_turn_tokens=6),
    )
    play, failing, played = env.play, {ROWS} if args.process_index == 0 else {0, ROWS}, []

    def dropped(row, rng):
        played.append(row)
        if len(played) - 1 in failing:
            raise ConnectionError("reset by peer")
        return play(row, rng)

    env.play = dropped
    told = None
    try:
        trainer.train()
    except ConnectionError as error:
        told = str(error)
    result = {"rows": trainer.state.log_history, "told": told}
    (Path(folder) / f"{args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    end()
