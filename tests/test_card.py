"""The model cards that real trainings leave: what they say, that it is true, and that none of it is stale."""

import copy
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PROMPTS
from datasets import Dataset
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOConfig, SNRFilteredGRPOTrainer
from ragen2_trl.callbacks import run_record
from ragen2_trl.callbacks.run_record import RunRecord
from ragen2_trl.envs import make_env
from ragen2_trl.reporting.card import HEADING, WINDOW, add_diagnostics, headline, running_means
from ragen2_trl.reporting.files import MEASUREMENTS
from ragen2_trl.reporting.run import Run, read_run, run_of
from ragen2_trl.reporting.saved_measurement import SavedMeasurement

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
    """Keeps the card as it stood at each checkpoint, and raises or stops at a step if it is told to."""

    def __init__(self, raise_at=None, stop_at=None):
        self.cards = {}
        self.raise_at, self.stop_at = raise_at, stop_at

    def on_save(self, args, state, control, **kwargs):
        self.cards[state.global_step] = Path(args.output_dir, "README.md").read_text()

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
    if trainer_class is OURS:
        settings["snr_selection_eps"] = 0.0
    return config(**settings | overrides)


def make(trainer_class, policy_path, folder, env=None, callback=True, **overrides):
    """A trainer, with the callback that measures at every step."""
    rewards = [*env.reward_funcs, length_reward] if env else [length_reward]
    rows = env.dataset(8) if env else Dataset.from_dict({"prompt": PROMPTS})
    args = arguments(trainer_class, folder, **overrides)
    trainer = trainer_class(policy_path, rewards, args=args, train_dataset=rows)
    if callback:
        trainer.add_callback(MutualInformationCallback(trainer, every=1))
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


@pytest.fixture
def without_figures(monkeypatch):
    """Two seconds for each card are too much where it is not about them."""
    monkeypatch.setattr(run_record, "write_figures", lambda trainer: None)


@pytest.fixture(scope="module", params=[OURS, STOCK, Subclass, RLOOTrainer], ids=lambda trainer: trainer.__name__)
def trained(request, policy_path, tmp_path_factory):
    """A run that has ended: (trainer, cards at its checkpoints). Only the first has figures drawn."""
    folder = tmp_path_factory.mktemp(request.param.__name__) / "run"
    env = make_env("bandit", max_actions=2, protocol="text")
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not OURS:
            patch.setattr(run_record, "write_figures", lambda trainer: None)
        trainer = make(request.param, policy_path, folder, env)
        watcher = Watcher()
        trainer.add_callback(watcher)
        trainer.train()
    return trainer, watcher.cards


def test_every_trainer_adds_its_diagnostics_to_all_that_trl_wrote(trained, monkeypatch, tmp_path):
    trainer, _ = trained
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    assert {"ragen2", "trl", "generated_from_trainer", *trainer._tag_names} <= set(card.data.tags)
    assert ("snr-filter" in card.data.tags) == (type(trainer) is OURS)
    assert card.text.count(HEADING) == 1
    assert sum(isinstance(callback, RunRecord) for callback in trainer.callback_handler.callbacks) == 1
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    type(trainer).create_model_card(trainer, "run")  # TRL's own
    written = ModelCard.load(tmp_path / "README.md").text
    changed = [line for line in written.splitlines() if line not in card.text.splitlines()]
    assert all("None" in line for line in changed), changed  # a base model and a repository that there are not
    assert len(changed) == 2


def test_numbers_on_the_card_are_those_of_the_uploaded_state(trained):
    trainer, _ = trained
    folder = Path(trainer.args.output_dir)
    history = json.loads((folder / "diagnostics" / "trainer_state.json").read_text())["log_history"]
    rows = [row for row in history if "reward" in row]
    measured = [row["mi/first_turn/retrieval_accuracy"] for row in rows]
    chance = rows[-1]["mi/first_turn/retrieval_chance"]
    best = max(range(4), key=lambda i: measured[i])
    table = rows_of(read_card(folder))
    assert table[f"retrieval accuracy (chance {chance:.1%})"] == [
        f"{measured[0]:.1%}",
        f"{measured[-1]:.1%}",
        f"{measured[best]:.1%} (step {rows[best]['step']})",
    ]
    rewards = [row["reward"] for row in rows]
    pairs = [(rewards[i] + rewards[i + 1]) / 2 for i in range(3)]  # means over half of a run of four steps
    assert table["reward in training"][:2] == [f"{pairs[0]:.3f}", f"{pairs[-1]:.3f}"]
    results = {result.metric_type: result for result in ModelCard.load(folder / "README.md").data.eval_results}
    assert results["mean_reward"].metric_value == pytest.approx(pairs[-1], abs=1e-6)
    assert results["retrieval_accuracy"].metric_value == pytest.approx(measured[-1], abs=1e-6)
    assert results["retrieval_chance"].metric_value == pytest.approx(chance, abs=1e-6)
    assert results["mutual_information"].metric_value == pytest.approx(rows[-1]["mi/first_turn/mi_seq"], abs=1e-6)
    assert all(result.verified is False and result.dataset_name == "bandit" for result in results.values())
    if type(trainer) is OURS:
        kept = [row["snr/kept_fraction"] for row in rows]
        assert table["groups kept by the filter"][1] == f"{sum(kept[-2:]) / 2:.1%}"
        saved = [1 - row["snr/update_compute_fraction"] for row in rows]
        assert table["update compute saved"][1] == f"{sum(saved[-2:]) / 2:.1%}"
    else:
        assert "groups kept by the filter" not in table


def test_the_card_says_how_the_run_was_made(trained):
    trainer, _ = trained
    text = section_of(read_card(trainer.args.output_dir))
    assert "`bandit, max_actions=2, protocol=text`, 1 turn of up to 2 actions" in text
    for part in (f"`trainer={type(trainer).__name__}`", "`seed=3`", "`learning_rate=0.01`", "torch 2.", "ragen2-trl "):
        assert part in text
    assert ("`snr_strategy=top_p`" in text) == (type(trainer) is OURS)


def test_the_verdict_stands_at_the_head_of_the_card(trained):
    trainer, _ = trained
    text = read_card(trainer.args.output_dir)
    head = text[: text.index("## Quick start")]
    assert f"**{run_of(trainer).verdict}.** Training finished 4 steps." in head
    assert "chance is 50.0%" in head


def test_a_card_amid_the_run_says_so_and_the_last_one_says_that_it_has_ended(trained):
    trainer, cards = trained
    assert "Training is unfinished: at step 2 of 4" in section_of(cards[2])
    assert f"(step {3})" not in cards[2]
    for text in (cards[4], read_card(trainer.args.output_dir)):
        assert "Training finished 4 steps" in section_of(text)
        assert "unfinished" not in text


def test_figures_on_the_card_are_there(trained):
    trainer, _ = trained
    folder = Path(trainer.args.output_dir)
    figures = re.findall(r"!\[.+?\]\((.+?)\)", section_of(read_card(folder)))
    assert all((folder / path).is_file() for path in figures)
    names = ["training", "quadrant", "cross_scores", "reward_variance", "compute"]
    expected = [f"diagnostics/{name}.png" for name in names] if type(trainer) is OURS else []
    assert figures == expected
    assert all((folder / path).with_suffix(".svg").is_file() for path in figures)


def test_no_file_that_is_uploaded_holds_the_token_or_what_the_model_wrote(trained):
    trainer, _ = trained
    folder = Path(trainer.args.output_dir)
    trainer.save_model()
    uploaded = [path for path in folder.rglob("*") if path.is_file() and MEASUREMENTS not in path.parts]
    assert folder / "training_args.bin" in uploaded
    assert not [path for path in uploaded if TOKEN.encode() in path.read_bytes()]
    assert torch.load(folder / "training_args.bin", weights_only=False).hub_token is None
    assert trainer.args.hub_token == TOKEN
    prompts = json.loads((folder / "_measurements" / "measurement_00004.json").read_text())["prompts"]
    texts = "".join(path.read_text() for path in (folder / "diagnostics").glob("*.json"))
    assert not any(prompt in texts for prompt in prompts)


def test_a_second_card_replaces_the_first(trained, without_figures, monkeypatch, tmp_path):
    trainer, _ = trained
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    trainer.create_model_card("first", dataset_name="tester/lakes", tags=["mine"])
    trainer.create_model_card("second", dataset_name="tester/ponds", tags="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.count(HEADING) == 1
    assert "first" not in card.data.model_name
    assert "lakes" not in card.content
    assert "mine" in card.data.tags
    assert len(card.data.tags) == len(set(card.data.tags))
    assert card.data.datasets == "tester/ponds"
    assert {result.dataset_type for result in card.data.eval_results} == {"tester/ponds"}


def test_a_resumed_run_says_so_and_shows_no_evaluation_of_the_run_before(policy_path, tmp_path, without_figures):
    folder = tmp_path / "run"
    make(OURS, policy_path, folder, max_steps=2, save_steps=1).train()
    for when in ("before", "after"):
        metrics = {"success": 0.25, "success_ci_low": 0.2, "success_ci_high": 0.3}
        (folder / f"evaluation_{when}.json").write_text(json.dumps(metrics))
    trainer, watcher = make(OURS, policy_path, folder, save_steps=1), Watcher()
    trainer.add_callback(watcher)
    trainer.train(resume_from_checkpoint=True)
    assert list(watcher.cards) == [3, 4]
    for text in (watcher.cards[3], read_card(folder)):
        assert "It was resumed from a checkpoint at step 2; the numbers span all of it." in section_of(text)
        assert rows_of(text)["held-out success (95 % interval)"][:2] == ["25.0% (20.0% to 30.0%)", ""]
    run = run_of(trainer)
    assert [step for step, _ in run.points("mi/first_turn/mi_seq")] == [1, 2, 3, 4]
    assert [path.name for path in run.measurements] == [f"measurement_0000{step}.json" for step in (1, 2, 3, 4)]
    assert read_run(folder).resumed_at == [2]


def test_a_run_that_raised_is_unfinished_and_a_fresh_one_shows_nothing_of_it(policy_path, tmp_path):
    folder = tmp_path / "run"
    trainer = make(OURS, policy_path, folder)
    trainer.add_callback(Watcher(raise_at=3))
    with pytest.raises(RuntimeError):
        trainer.train()
    assert "Training is unfinished: at step 2 of 4" in read_card(folder)
    trainer.create_model_card("run")
    assert "Training is unfinished: at step 3 of 4" in read_card(folder)
    assert (folder / "diagnostics" / "cross_scores.png").exists()
    (folder / "log_history.json").write_text("[{}]")
    again, watcher = make(OURS, policy_path, folder, callback=False, max_steps=2), Watcher(raise_at=1)
    again.add_callback(watcher)
    with pytest.raises(RuntimeError):
        again.train()
    run = read_run(folder)
    assert (run.status, run.rows, run.measurements) == ("unfinished: at step 0 of 2", [], [])
    again.remove_callback(watcher)
    again.train()  # the same trainer, from the start
    assert "Training finished 2 steps" in read_card(folder)
    assert "was not measured" in section_of(read_card(folder))
    assert "retrieval accuracy (" not in read_card(folder)
    assert {path.stem for path in (folder / "diagnostics").glob("*.png")} == {"training", "compute"}


def test_a_run_that_was_stopped_says_where(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run")
    trainer.add_callback(Watcher(stop_at=3))
    trainer.train()
    assert "Training stopped at step 3 of 4." in section_of(read_card(tmp_path / "run"))


def test_one_trainer_trains_twice_and_tells_of_the_second_time(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run")
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()
    run = run_of(trainer)
    assert (run.status, run.resumed_at, len(run.rows), len(run.regimes)) == ("finished 2 steps", [], 2, 2)
    assert len(run.measurements) == 2
    assert read_card(tmp_path / "run").count(HEADING) == 1


def test_without_checkpoints_the_run_can_be_read_all_the_same(policy_path, tmp_path):
    make(STOCK, policy_path, tmp_path / "run", save_strategy="no", max_steps=1).train()
    assert read_run(tmp_path / "run").status == "finished 1 steps"
    assert not (tmp_path / "run" / "README.md").exists()


def test_broken_metadata_is_a_warning_and_training_goes_on(policy_path, tmp_path, without_figures, caplog):
    trainer = make(BrokenCard, policy_path, tmp_path / "run", max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert "README.md has no valid metadata and gets no diagnostics" in caplog.text
    assert read_run(tmp_path / "run").status == "finished 2 steps"


def test_a_picture_that_cannot_be_drawn_costs_no_checkpoint(policy_path, tmp_path, monkeypatch, caplog):
    def fail(trainer):
        raise RuntimeError("no font")

    monkeypatch.setattr(run_record, "write_figures", fail)
    make(STOCK, policy_path, tmp_path / "run", max_steps=2).train()
    assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").exists()
    assert "The diagnostics of the model card could not be written." in caplog.text
    assert "no font" in caplog.text


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_a_record_that_cannot_be_written_costs_no_training(policy_path, tmp_path, monkeypatch, caplog, save_strategy):
    def fail(trainer):
        raise OSError("no space left")

    for name in ("write_run", "write_figures"):
        monkeypatch.setattr(run_record, name, fail)
    monkeypatch.setattr(SavedMeasurement, "save", lambda *_: fail(None))
    trainer = make(OURS, policy_path, tmp_path / "run", max_steps=2, save_strategy=save_strategy)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "The record of this run could not be written." in caplog.text and "no space left" in caplog.text


def test_a_log_of_odd_numbers_is_written(policy_path, tmp_path, without_figures):
    trainer = make(STOCK, policy_path, tmp_path / "run", max_steps=1, save_strategy="no")
    log = trainer.log
    trainer.log = lambda logs, *rest: log({**logs, "mine": np.float32(0.5)}, *rest)
    trainer.train()
    assert read_run(tmp_path / "run").status == "finished 1 steps"


def test_a_trainer_that_has_not_begun_tells_the_run_in_its_folder(policy_path, tmp_path, without_figures):
    """A new process that is there to upload what an earlier one trained."""
    make(OURS, policy_path, tmp_path / "run", max_steps=2).train()
    state = (tmp_path / "run" / "diagnostics" / "trainer_state.json").read_text()
    make(OURS, policy_path, tmp_path / "run", max_steps=2).create_model_card("again")
    assert "Training finished 2 steps." in read_card(tmp_path / "run")
    assert (tmp_path / "run" / "diagnostics" / "trainer_state.json").read_text() == state


def test_names_that_are_no_plain_yaml_keep_the_card_whole(trained, without_figures, monkeypatch, tmp_path):
    trainer, _ = trained
    monkeypatch.setattr(trainer.args, "output_dir", str(tmp_path))
    for name in ('quo"te', "colon: value", "line\nbreak", "--- x", "\n---\n", "'", "{{ x }}", "a|b", "é", "a/b/c"):
        trainer.create_model_card(name, dataset_name=name, tags=[name])
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.model_name == name
        assert name in card.data.tags
        assert card.text.count(HEADING) == 1
        types = {result.dataset_type for result in card.data.eval_results}
        assert all(re.fullmatch(r"([\w-]+/)?[\w.-]+", kind, re.ASCII) for kind in types), types


HOSTILE = "`|<img src=x onerror=alert(1)>\n\n| a | b |\n</details><script>"


def test_no_setting_becomes_markup(tmp_path):
    environment = {"name": HOSTILE, "options": {HOSTILE: HOSTILE}, "max_turns": 1, "max_actions": 1}
    run = Run(folder=tmp_path, log_history=[], settings={"environment": environment, "seed": HOSTILE})
    card = ModelCard("---\ntags: []\n---\n# Title\n\n## Quick start\n\n## Citations\n")
    add_diagnostics(card, run)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert re.findall(r"<(?!/?(?:h[12]|p|ul|li|code|strong|details|summary|blockquote|a)\b)[^>]*>", html) == []
    assert html.count("</details>") == html.count("<details>") == 1
    assert "&lt;img" in html


def test_rows_without_numbers_leave_no_trace(tmp_path):
    nan = float("nan")
    rows = [{"step": i, "reward": nan, "mi/first_turn/retrieval_accuracy": None, "entropy": nan} for i in (1, 2)]
    run = Run(folder=tmp_path, log_history=rows, step=2, max_steps=2, ended=True)
    card = ModelCard("---\ntags: []\n---\n# Title\n\n## Quick start\n")
    add_diagnostics(card, run, "tester/x")
    assert "nan" not in card.content.lower()
    assert card.data.eval_results is None
    assert "| first |" not in card.text
    assert headline(run).startswith("> Whether reasoning depends on its prompt was not measured. Training finished 2")


def test_the_index_points_to_the_file_that_numbers_can_be_checked_in(tmp_path):
    metrics = {"success": 0.5, "success_ci_low": 0.4, "success_ci_high": 0.6}
    run = Run(tmp_path, [{"step": 1, "reward": 1.0}], ended=True, evaluations={"after": metrics})
    card = ModelCard("---\ntags: []\n---\n# Title\n")
    add_diagnostics(card, run, "tester/model")
    files = {result.metric_name: result.source_url for result in card.data.eval_results}
    assert files == {
        "Held-out success rate": "https://huggingface.co/tester/model/blob/main/evaluation_after.json",
        "Mean reward in training": "https://huggingface.co/tester/model/blob/main/diagnostics/trainer_state.json",
    }


def test_running_means_span_ten_steps_or_half_of_a_short_run():
    points = [(step, float(step)) for step in range(1, 31)]
    means = running_means(points)
    assert means[0] == (WINDOW, 5.5)
    assert means[-1] == (30, 25.5)
    assert running_means(points[:4]) == [(2, 1.5), (3, 2.5), (4, 3.5)]
    assert running_means(points[:1]) == [(1, 1.0)]
    assert running_means([]) == []


def test_tokens_in_arguments_survive_copies_but_no_pickle(tmp_path, policy_path):
    trainer = make(STOCK, policy_path, tmp_path / "run", callback=False, model_init_kwargs={"token": TOKEN})
    torch.save(trainer.args, tmp_path / "before")
    assert TOKEN.encode() in (tmp_path / "before").read_bytes()  # what transformers does on its own
    trainer.add_callback(MutualInformationCallback(trainer))
    torch.save(trainer.args, tmp_path / "after")
    assert TOKEN.encode() not in (tmp_path / "after").read_bytes()
    loaded = torch.load(tmp_path / "after", weights_only=False)
    assert (loaded.hub_token, loaded.model_init_kwargs) == (None, {})
    assert TOKEN not in trainer.args.to_json_string()  # what trackers get
    for args in (copy.copy(trainer.args), copy.deepcopy(trainer.args)):
        assert args.hub_token == TOKEN
        assert f"Bearer {args.hub_token}" == f"Bearer {TOKEN}"
    assert TOKEN not in str(trainer.args)
