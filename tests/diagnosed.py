"""What tests of the diagnose command begin with: text of the tiny model, tables of it, and a run of the command."""

import json
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.cli import diagnose
from ragen2_trl.envs import make_env
from ragen2_trl.rollouts.sampling import sample_trajectories
from ragen2_trl.tiny import TINY_MODEL_PATH

RESULTS = {"diagnosis.json", "matrix.png", "quadrant.png"}  # and a measurement for each file
SAMPLED = {"completions.parquet", "completions_control.parquet"}


@pytest.fixture(scope="module", name="played")
def played_fixture():
    """Conversational prompts of FrozenLake, 8 tasks twice each, and the tiny model's text for them."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    rows, trajectories = sample_trajectories(
        AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH),
        tokenizer,
        make_env("frozen_lake"),
        num_prompts=8,
        num_samples=2,
        temperature=1.0,
        max_new_tokens=64,
        batch_size=16,
        seed=0,
    )
    ids = [trajectory.completion_ids for trajectory in trajectories]
    return rows["prompt"][:], tokenizer.batch_decode(ids, skip_special_tokens=True)


def save(folder: Path, step: int, prompts: list, completions: list) -> Path:
    """A table as TRL's `log` writes it."""
    folder.mkdir(exist_ok=True)
    table = {
        "step": [step] * len(prompts),
        "prompt": prompts,
        "completion": completions,
        "frozen_lake_success": [0.0] * len(prompts),
        "advantage": [0.0] * len(prompts),
    }
    path = folder / f"completions_{step:05d}.parquet"
    pd.DataFrame(table).to_parquet(path)
    return path


def messages(texts: list[str]) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def run(tmp_path: Path, **settings) -> dict:
    """What the command wrote to `diagnosis.json`."""
    settings = {"model": "tiny", "max_new_tokens": 64, "output_dir": tmp_path / "diagnosis", **settings}
    diagnose.main([part for name, value in settings.items() for part in (f"--{name}", str(value))])
    written = {path.name for path in (tmp_path / "diagnosis").iterdir()} - SAMPLED
    assert {name for name in written if not name.startswith("measurement_")} == RESULTS
    for name in ("matrix.png", "quadrant.png"):
        assert (tmp_path / "diagnosis" / name).read_bytes().startswith(b"\x89PNG")
    return json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())
