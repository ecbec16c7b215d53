"""One training whose numbers and figures go to TensorBoard, trackio and wandb, read back from their files.

It runs in a process of its own (`python tests/test_trackers.py FOLDER`): trackio reads its folder's name when it is
imported, and wandb keeps a run open.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import need
from matplotlib.figure import Figure
from PIL import Image
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from trl import GRPOTrainer

from ragen2_trl import (
    EnvironmentEvalCallback,
    MutualInformationCallback,
    SNRFilteredGRPOConfig,
    SNRFilteredGRPOTrainer,
)
from ragen2_trl.envs import make_env
from ragen2_trl.report.trackers import has_image_trackers, log_figures, send_alert
from ragen2_trl.tiny import resolve_model

pytestmark = pytest.mark.slow

TRACKERS = ["tensorboard", "trackio", "wandb"]
NAMES = [
    "train/reward",
    "train/snr/kept_fraction",
    "train/mi/first_turn/retrieval_accuracy",
    "train/env/frozen_lake/success",
]
FIGURES = ["train/mi/quadrant", "train/mi/cross_scores", "train/mi/reward_variance"]
HELD_OUT = "eval/env/frozen_lake/success"
ALERT = ("Training is failing", "since step 2: valid answers")
STEPS = [2, 3]  # of 3, where every second one is logged, and the last


def train(folder: Path) -> None:
    env = make_env("frozen_lake")
    args = SNRFilteredGRPOConfig(
        output_dir=str(folder / "run"),
        project="lakes",
        run_name="tiny",
        report_to=TRACKERS,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=48,
        max_steps=STEPS[-1],
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SNRFilteredGRPOTrainer(resolve_model("tiny"), env.reward_funcs, args, env.dataset(64, seed=0))
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.add_callback(EnvironmentEvalCallback(env, trainer, every=2, num_prompts=2, num_samples=1))
    trainer.add_callback(AtEveryRow(lambda state: send_alert(trainer, *ALERT, is_error=True)))
    trainer.train()
    log_figures(trainer, {"mi/after_training": Figure()})
    send_alert(trainer, "after training", "", is_error=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("trackers")
    folder = tmp_path_factory.mktemp("trackers")
    places = {"TRACKIO_DIR": "trackio", "WANDB_DIR": "", "TENSORBOARD_LOGGING_DIR": "tensorboard"}
    env = os.environ | {name: str(folder / place) for name, place in places.items()} | {"WANDB_MODE": "offline"}
    done = subprocess.run([sys.executable, __file__, folder], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_tensorboard_has_numbers_and_figures_at_the_same_steps(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in NAMES:
        assert [event.step for event in events.Scalars(name)] == STEPS, name
    assert [event.step for event in events.Scalars(HELD_OUT)] == [0, *STEPS]
    assert not [name for name in events.Tags()["scalars"] if name.startswith("train/eval")]
    assert sorted(events.Tags()["images"]) == sorted(FIGURES)
    for name in FIGURES:
        assert [image.step for image in events.Images(name)] == STEPS, name


def test_trackio_has_numbers_and_figures_at_the_same_steps_of_both_axes(folder):
    with closing(sqlite3.connect(folder / "trackio" / "lakes.db")) as database:
        rows = [(step, json.loads(row)) for step, row in database.execute("SELECT step, metrics FROM metrics")]
    for name in NAMES + FIGURES:
        assert axes_of(rows, name) == [(step, step) for step in STEPS], name
    assert axes_of(rows, HELD_OUT) == [(step, step) for step in (0, *STEPS)]
    assert not [name for _, row in rows for name in row if "after_training" in name]
    with closing(sqlite3.connect(folder / "trackio" / "lakes.db")) as database:
        alerts = database.execute("SELECT DISTINCT title, text, level FROM alerts").fetchall()
    assert alerts == [(*ALERT, "error")]
    check_pictures(
        folder / "trackio" / "media" / row[name]["file_path"] for _, row in rows for name in FIGURES if name in row
    )


def test_wandb_has_numbers_and_figures_at_the_same_global_steps(folder):
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = wandb_rows(log)
    for name in NAMES:
        assert [row["train/global_step"] for row in rows if name in row] == STEPS, name
        assert all(set(NAMES) <= row.keys() for row in rows if name in row)
    assert [row["train/global_step"] for row in rows if HELD_OUT in row] == [0, *STEPS]
    paths = [f"{name}.path" for name in FIGURES]
    for name in paths:
        assert [row["train/global_step"] for row in rows if name in row] == STEPS, name
    assert not [name for row in rows for name in row if "after_training" in name]
    check_pictures(log.parent / "files" / row[name] for row in rows for name in paths if name in row)


class Undrawable(Figure):
    def savefig(self, *args, **kwargs):
        raise AssertionError("drawn for nobody")


class AtEveryRow(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_log(self, args, state, control, **kwargs):
        self.act(state)


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


def run(policy_path, args, prompts, act, *trackers):
    """Trains with the stock trainer and calls `act(trainer, state)` after each row."""
    trainer = GRPOTrainer(policy_path, no_reward, args, prompts)
    for callback in (*trackers, AtEveryRow(lambda state: act(trainer, state))):
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def test_without_trackers_nothing_is_drawn_or_imported(policy_path, prompts, make_args):
    seen = []

    def act(trainer, state):
        modules = set(sys.modules)
        assert not has_image_trackers(trainer)
        log_figures(trainer, {"mi/figure": Undrawable()})
        seen.append(set(sys.modules) - modules)

    run(policy_path, make_args(snr=False, max_steps=1), prompts, act)
    assert seen == [set(), set()]  # the step and the end


def test_only_the_main_process_logs_and_only_while_training_runs(policy_path, prompts, make_args):
    writer = MagicMock()

    def act(trainer, state):
        assert has_image_trackers(trainer)
        state.is_world_process_zero = False
        log_figures(trainer, {"mi/figure": Undrawable()})
        state.is_world_process_zero = True

    tracker = tensorboard_callback(writer)
    trainer = run(policy_path, make_args(snr=False, max_steps=1), prompts, act, tracker)
    tracker.tb_writer = writer  # evaluation after training opens one again
    assert not has_image_trackers(trainer)
    log_figures(trainer, {"mi/figure": Undrawable()})
    assert writer.add_scalar.called
    assert not writer.add_image.called


def test_rows_of_an_evaluation_get_no_figures_of_the_measurement_before(policy_path, prompts, make_args):
    writer = MagicMock()
    args = make_args(
        snr=False, max_steps=2, logging_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8
    )
    tracker = tensorboard_callback(writer)
    trainer = GRPOTrainer(policy_path, no_reward, args, prompts, prompts.select(range(2)), callbacks=[tracker])
    trainer.add_callback(MutualInformationCallback(trainer, every=1, min_prompts=2))
    trainer.train()
    assert {
        call.args[2] for call in writer.add_scalar.call_args_list if call.args[0] == "train/mi/valid_thinking_rate"
    } == {2}
    assert {call.args[2] for call in writer.add_image.call_args_list} == {2}


def test_an_error_of_a_tracker_ends_training(policy_path, prompts, make_args):
    writer = MagicMock()
    writer.add_image.side_effect = OSError("disk full")

    def act(trainer, state):
        log_figures(trainer, {"mi/figure": Figure()})

    with pytest.raises(OSError, match="disk full"):
        run(policy_path, make_args(snr=False, max_steps=1), prompts, act, tensorboard_callback(writer))


def tensorboard_callback(writer):
    need("trackers")
    return TensorBoardCallback(writer)


def axes_of(rows, name):
    """Steps of the rows with `name`: as trackio counts, and optimizer steps."""
    return [(step, row["train/global_step"]) for step, row in rows if name in row]


def check_pictures(paths):
    paths = list(paths)
    assert len(paths) == len(STEPS) * len(FIGURES)
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert len(picture.getcolors(maxcolors=10**6)) > 2, "an empty picture"


def wandb_rows(log):
    """Rows of a .wandb file: LevelDB's log format after a header of 7 bytes, of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    blocks, position, records = log.read_bytes(), 7, []
    while position < len(blocks):
        left = 32768 - position % 32768
        if left < 7:  # no record starts so close to the end of a block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", blocks, position)
        part = blocks[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 2):  # whole, or the first part
            records.append(part)
        else:
            records[-1] += part
    rows = []
    for record in records:
        items = wandb_internal_pb2.Record.FromString(record).history.item
        rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


if __name__ == "__main__":
    train(Path(sys.argv[1]))
