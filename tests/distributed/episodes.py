"""Episodes whose turns differ in number from process to process, which generate together all the same.

python -m torch.distributed.run --standalone --nproc_per_node=2 episodes.py BACKEND POLICY FOLDER [SETTINGS]
"""

import json
import sys
from pathlib import Path

from backends import COMMON, is_sharded, start
from ending import end
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.rewards import think_format_reward  # noqa: F401 -- imports TRL before deepspeed looks at it

from ragen2_trl import EpisodeCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.envs import make_env
from ragen2_trl.rollouts import TextRollout

TURNS = (4, 2)  # on each process


def main() -> None:
    backend, policy_path, folder, given = [*sys.argv[1:], "{}"][:4]
    settings = {**start(backend), **json.loads(given)}
    args = SNRFilteredGRPOConfig(
        **{**COMMON, "max_completion_length": 300, "per_device_train_batch_size": 4, **settings},
        output_dir=folder,
        ddp_backend="gloo",
    )
    env = make_env("frozen_lake", size=3, max_turns=TURNS[args.process_index], max_actions=2)

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
    result = {"calls": calls, "rows": trainer.state.log_history}
    (Path(folder) / f"{args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    end()
