"""Trainers that write cards, and how the cards are read."""

from pathlib import Path

import pytest
from conftest import PROMPTS
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.callbacks import run_record
from ragen2_trl.envs import make_env
from ragen2_trl.report.card import HEADING

TOKEN = "hf_a_token_of_the_user"
OURS, STOCK = SNRFilteredGRPOTrainer, GRPOTrainer


class Subclass(GRPOTrainer):
    _name = "My GRPO"


class BrokenCard(GRPOTrainer):
    """Writes metadata that is not YAML, as a template that fills in names by hand does."""

    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        path = Path(self.args.output_dir, "README.md")
        path.write_text(path.read_text().replace("library_name: ", "library_name: my: 'model\n"))


class Watcher(TrainerCallback):
    """Keeps card and names of figures as they stood at each checkpoint; raises or stops at a step if it is told to."""

    def __init__(self, raise_at=None, stop_at=None):
        self.cards, self.figures = {}, {}
        self.raise_at, self.stop_at = raise_at, stop_at

    def on_save(self, args, state, control, **kwargs):
        self.cards[state.global_step] = Path(args.output_dir, "README.md").read_text()
        self.figures[state.global_step] = figures_in(args.output_dir)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.raise_at:
            raise RuntimeError("out of memory")
        if state.global_step == self.stop_at:
            control.should_training_stop = True


def length_reward(completion_ids, **kwargs):
    return [float(len(ids) % 3) for ids in completion_ids]


def arguments(trainer_class, folder, **overrides):
    config = {OURS: SNRFilteredGRPOConfig, RLOOTrainer: RLOOConfig}.get(trainer_class, GRPOConfig)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
        "hub_token": TOKEN,
    }
    return config(**settings | overrides)


def make(trainer_class, policy_path, folder, env=None, callback=True, min_prompts=2, **overrides):
    """A trainer, with the callback that measures at every step."""
    rewards = [*env.reward_funcs, length_reward] if env else [length_reward]
    rows = env.dataset(8) if env else Dataset.from_dict({"prompt": PROMPTS})
    args = arguments(trainer_class, folder, **overrides)
    trainer = trainer_class(policy_path, rewards, args=args, train_dataset=rows)
    if callback:
        trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=min_prompts))
    return trainer


def section_of(text):
    return text[text.index(HEADING) : text.index("## Citations")]


def rows_of(text):
    """Label -> first, last, best, of the table on a card."""
    lines = [line for line in section_of(text).splitlines() if line.startswith("| ") and not line.startswith("| |")]
    cells = [[cell.strip() for cell in line[2:-1].split(" | ")] for line in lines]
    return {label: values for label, *values in cells}


def read_card(folder):
    return (Path(folder) / "README.md").read_text()


def figures_in(folder):
    return {path.stem for path in Path(folder, "diagnostics").glob("*.png")}


@pytest.fixture(name="without_figures")
def without_figures_fixture(monkeypatch):
    """Two seconds for each run are too much where it is not about them."""
    monkeypatch.setattr(run_record, "write_figures", lambda run: run)


@pytest.fixture(
    scope="module", params=[OURS, STOCK, Subclass, RLOOTrainer], ids=lambda trainer: trainer.__name__, name="trained"
)
def trained_fixture(request, policy_path, tmp_path_factory):
    """A run that has ended: (trainer, what there was at its checkpoints). Only the first has figures drawn."""
    folder = tmp_path_factory.mktemp(request.param.__name__) / "run"
    env = make_env("bandit", max_actions=2, protocol="text")
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not OURS:
            patch.setattr(run_record, "write_figures", lambda run: run)
        trainer = make(request.param, policy_path, folder, env)
        watcher = Watcher()
        trainer.add_callback(watcher)
        trainer.train()
    return trainer, watcher
