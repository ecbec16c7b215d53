"""The task of the experiment with a real model: its numbers, their reward, and a warm start on texts."""

import json

from ragen2_trl.cli import warm_start
from ragen2_trl.envs import make_env
from research.sorting import sorted_right


def test_a_demonstration_is_right_and_anything_else_is_not():
    rows = make_env("research.sorting:Sorting").demonstrations(24, seed=0)
    for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True):
        asked = [int(word) for word in prompt.removeprefix("Sort: ").removesuffix(" =>").split()]
        right = " ".join(map(str, sorted(asked)))
        wrong = [right + " 1", right.rpartition(" ")[0], " ".join(reversed(right.split())), ""]
        assert sorted_right([completion, *wrong], [right] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_texts_without_messages_are_a_warm_start(tmp_path):
    arguments = "--model_name_or_path tiny --env_name research.sorting:Sorting --num_demonstrations 8 --max_steps 2"
    limits = "--per_device_train_batch_size 4 --use_cpu true --report_to none --save_strategy no --logging_steps 1"
    warm_start.main([*arguments.split(), *limits.split(), "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert (tmp_path / "model.safetensors").exists()
