"""Learning rates and steps of DeepSpeed's own scheduler in a run with empty optimizer steps, on two processes.

python -m torch.distributed.run --standalone --nproc_per_node=2 scheduler.py ALGORITHM POLICY FOLDER
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends import COMMON, deepspeed_config, start
from conftest import PROMPTS
from ending import end
from replayed import make_trainer

STEPS, FLAT = 6, (1, 3, 5)


def main() -> None:
    algorithm, policy_path, folder = sys.argv[1:]
    start("zero2")
    config = deepspeed_config(2) | {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                **{"warmup_min_lr": 0.0, "warmup_type": "linear"},
                **dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
            },
        }
    }
    settings = {
        **COMMON,
        "max_steps": STEPS,
        "warmup_steps": 2,
        "per_device_train_batch_size": 16,
        "output_dir": folder,
    }
    settings |= {"ddp_backend": "gloo", "deepspeed": config}
    rates = {}
    for name, flat in (("empty", FLAT), ("full", ())):
        trainer = make_trainer(policy_path, settings, PROMPTS, algorithm=algorithm, flat_steps=flat)
        trainer.train()
        engine = trainer.accelerator.deepspeed_engine_wrapped.engine
        empty = trainer.state.log_history[-2]["snr/empty_steps"]
        rates[name] = {"rate": engine.lr_scheduler.get_last_lr()[0], "steps": engine.global_steps, "empty": empty}
    if PartialState().is_main_process:
        (Path(folder) / "rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
    end()
