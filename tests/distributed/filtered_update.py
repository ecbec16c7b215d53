"""Runs the cases of `test_distributed.py` on each process that torchrun starts; process 0 saves the gradients."""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay import REWARDS, Replay, gradients_of
from transformers import AutoTokenizer

from ragen2_trl import SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer


def main() -> None:
    policy_path, cases_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 2
    gradients = {}
    for name, case in json.loads(Path(cases_path).read_text()).items():
        args = SNRFilteredGRPOConfig(output_dir=folder, **case["settings"])
        replay = Replay(AutoTokenizer.from_pretrained(policy_path), REWARDS, case["equal_lengths"])
        gradients[name] = gradients_of(SNRFilteredGRPOTrainer, policy_path, args, replay, case["prompts"])
    torch.save(gradients, Path(folder) / f"gradients_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()
