"""What the callback warns of and refuses, and the collapses that it recognises."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS
from datasets import Dataset
from measured_runs import length_reward, rows_of, run, warnings_of
from replay import GROUP_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, SFTConfig, SFTTrainer

from ragen2_trl import MutualInformationCallback, SNRFilteredGRPOTrainer, information_metrics
from ragen2_trl.callbacks import mutual_information
from ragen2_trl.callbacks.mutual_information import group_metrics
from ragen2_trl.instrument import budget
from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.instrument.verdict import judge
from ragen2_trl.rollout_events import Rollout, listen


def test_an_exception_inside_scoring_propagates(policy_path, prompts, make_args, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("scoring broke")

    monkeypatch.setattr("ragen2_trl.instrument.diagnosis.cross_score", broken)
    with pytest.raises(RuntimeError, match="scoring broke"):
        run(GRPOTrainer, policy_path, make_args(snr=False), prompts, callback={"every": 1})


@pytest.mark.parametrize(
    ("prompt", "completion", "reason"),
    [
        ("same", [5, 6, 7], "all 2 prompts are the same"),
        ("own", [], "no completion has reasoning"),
        ("long", [5, 6, 7], "context of 256 tokens"),
    ],
)
def test_what_cannot_be_measured_is_said_once_and_leaves_no_number(
    policy_path, make_args, caplog, prompt, completion, reason
):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)

    def rollout(prompts, trainer):
        ids = {"same": [9, 9], "own": None, "long": [9] * 300}[prompt]
        prompt_ids = [ids or tokenizer(text)["input_ids"] for text in prompts]
        if prompt == "long":
            prompt_ids = [[*ids, number // GROUP_SIZE] for number in range(len(prompts))]
        end = [tokenizer.eos_token_id]
        completion_ids = [[*completion, *end] for _ in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer, _ = run(
        SNRFilteredGRPOTrainer,
        policy_path,
        make_args(max_steps=2),
        dataset,
        callback={"every": 1},
        rollout_func=rollout,
    )
    silent = [text for text in warnings_of(caplog) if "not measured" in text]
    assert len(silent) == 1
    assert reason in silent[0]
    for row in trainer.state.log_history:
        assert not [key for key in row if key.startswith("mi/first_turn")]
        assert all(math.isfinite(value) for key, value in row.items() if key.startswith("mi/"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"num_completions": 1}, "num_completions must be at least 2"),
        ({"max_prompts": 1}, "max_prompts must be at least 2"),
        ({"scopes": ("first",)}, "scopes='first' is not supported; allowed values: first_turn, trajectory, answer\\."),
        ({"scopes": ()}, "scopes must name at least one"),
        ({"stop_on": "collapse"}, "stop_on='collapse' is not supported; allowed values: template_even"),
    ],
)
def test_a_bad_setting_is_named(policy_path, prompts, make_args, settings, message):
    trainer = GRPOTrainer(policy_path, length_reward, args=make_args(snr=False), train_dataset=prompts)
    with pytest.raises(ValueError, match=message):
        MutualInformationCallback(trainer, **settings)


def test_a_trainer_that_does_not_sample_is_refused(policy_path, tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none")
    trainer = SFTTrainer(policy_path, args=args, train_dataset=Dataset.from_dict({"text": ["Go right"]}))
    with pytest.raises(TypeError, match="SFTTrainer has no _generate_and_score_completions"):
        listen(trainer, on_rollout=lambda batch, rewards: None)


def sft_policy(policy_path, folder, depends: bool):
    """The policy after SFT on reasoning of six random cells; they are those of the prompt if it depends on it."""
    generator = torch.Generator().manual_seed(0)
    cells = [f" {column}" for column in "abcdefgh"]

    def draw():
        return "".join(cells[i] for i in torch.randint(8, (6,), generator=generator).tolist())

    prompts = [draw() for _ in range(512)]
    reasonings = prompts if depends else [draw() for _ in prompts]
    rows = [
        {"prompt": f"Go from{prompt}\n", "completion": f"<think>{reasoning}</think>"}
        for prompt, reasoning in zip(prompts, reasonings, strict=True)
    ]
    args = SFTConfig(
        str(folder),
        max_steps=150 if depends else 60,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(policy_path)
    model.generation_config.eos_token_id = AutoTokenizer.from_pretrained(policy_path).eos_token_id
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(str(folder))
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(folder)
    return str(folder), Dataset.from_dict({"prompt": [f"Go from{draw()}\n" for _ in range(16)]})


@pytest.mark.slow
def test_a_policy_trained_on_templates_does_not_depend_on_its_prompt_yet_while_its_entropy_is_high(
    policy_path, make_args, tmp_path, caplog, monkeypatch
):
    """Also where four tokens of each trace are scored under eight prompts, and not all of them under sixteen."""
    for name, value in (("ALWAYS", 0), ("LEAST_TOKENS", 4), ("LEAST_PROMPTS", 8)):
        monkeypatch.setattr(budget, name, value)
    args = make_args(
        snr=False, per_device_train_batch_size=64, max_steps=1, learning_rate=0.0, max_completion_length=12
    )
    for depends in (False, True):
        path, dataset = sft_policy(policy_path, tmp_path / f"sft-{depends}", depends)
        for share, num_prompts in ((None, 16), (1e-9, 8)):
            trainer, measuring = run(GRPOTrainer, path, args, dataset, callback={"every": 1, "budget": share})
            (row,) = rows_of(trainer)
            (finding,) = judge(measuring.evidence)
            assert row["mi/valid_thinking_rate"] > 0.9
            assert row["mi/first_turn/num_prompts"] == num_prompts
            if depends:
                assert finding.regime in ("diverse", "compressed")
                assert row["mi/regime/depends_on_prompt"] == 1.0
                assert row["mi/first_turn/mi_seq"] > 0.5 * math.log(num_prompts)
            else:
                assert finding.regime == "independent"
                assert not [text for text in warnings_of(caplog) if "ollapse" in text]
                assert row["mi/regime/depends_on_prompt"] == 0.0
                assert row["mi/first_turn/conditional_entropy_token"] > 0.5 * math.log(8)
                assert row["mi/first_turn/mi_seq"] < 0.1 * math.log(num_prompts)


ASKED_FOR = "template_even_if_success_rises"


class Drift:
    """In place of a measurement: reasoning depends on its prompt for two measurements, and then no longer."""

    def __init__(self, before, trials):
        self.before, self.trials, self.count = before, float(trials), 0

    def __call__(self, *args):
        self.count += 1
        accuracy = 0.9 if self.count <= 2 else 0.1
        changed = {"retrieval_accuracy": accuracy, "retrieval_chance": 0.1, "num_completions": self.trials}
        return replace(self.before, metrics=self.before.metrics | changed)


@pytest.mark.parametrize(("stop_on", "trials"), [(None, 64), (ASKED_FOR, 64), (ASKED_FOR, 2)])
def test_drift_into_template_collapse_warns_once_and_stops_where_asked_to(
    policy_path, prompts, make_args, monkeypatch, caplog, stop_on, trials
):
    separable = torch.tensor([[-10.0, -30.0], [-30.0, -10.0]])
    lengths, own = torch.tensor([5, 5]), torch.tensor([0, 1])
    metrics = information_metrics(separable, lengths, own)
    before = Measurement(metrics, separable, lengths, own, trajectories=[0, 4], columns=[0, 4])
    monkeypatch.setattr(mutual_information, "measure_first_turn", Drift(before, trials))
    callback = {"every": 1, "stop_on": stop_on}
    trainer, _ = run(GRPOTrainer, policy_path, make_args(snr=False, max_steps=6), prompts, callback=callback)
    told = trials == 64  # with two reasoning traces nothing can be told, and nothing ends
    assert trainer.state.global_step == (4 if told and stop_on else 6)
    warnings = [text for text in warnings_of(caplog) if "become a template" in text]
    assert len(warnings) == told
    if told:
        for part in (
            "Step 4: ",
            "since step 3 ",
            "chance 0.1",
            "retrieval accuracy 0.1",
            "best retrieval accuracy 0.9",
        ):
            assert part in warnings[0]
        rows = [row["mi/regime/collapsed"] for row in rows_of(trainer)]
        assert rows == [0.0] * 3 + [1.0] * (1 if stop_on else 3)


def test_groups_without_variance_are_told_apart_by_whether_completions_differ():
    rollout = Rollout(
        prompt_ids=[[1]] * 6,
        completion_ids=[[5], [5], [5], [6], [5], [6]],
        tool_masks=[None] * 6,
        rewards=torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]),
        turn_samples=[[]] * 6,
    )
    assert group_metrics(rollout) == pytest.approx(
        {
            "mi/groups/identical_completions": 1 / 3,
            "mi/groups/equal_rewards": 1 / 3,
            "mi/groups/zero_variance": 2 / 3,
        }
    )
