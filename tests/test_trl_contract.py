"""What we lean on in TRL and transformers. When one of these fails after an upgrade, the trainer must be looked at.

What can be told from names and signatures is in `trl_contract.py`, where trainers look themselves: here it is tried on
releases that lack something. What needs a reading of the source is here alone.
"""

import inspect
import logging
import re
import sys
from importlib import import_module
from importlib.metadata import requires

import pytest
import trl
from datasets import Dataset
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import Trainer, TrainerState
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import utils

import ragen2_trl
from ragen2_trl import SNRFilteredGRPOTrainer, SNRFilteredPPOConfig, SNRFilteredPPOTrainer, cli
from ragen2_trl.sampling.sampler import BY_ROW
from ragen2_trl.tiny import TINY_MODEL_PATH
from ragen2_trl.trainers.batches import COMPLETION_PADDING, IMAGE_KEYS, PROMPT_PADDING, WHOLE_SEQUENCE
from ragen2_trl.trainers.grpo import TOKEN_NORMALIZED_LOSSES
from ragen2_trl.trainers.stock import StockConfig, StockTrainer
from ragen2_trl.trainers.trl_contract import IMPORTED, NEWEST, OLDEST, IncompatibleTRLError, check_trl, needs, untested

release = Version(trl.__version__)
BOTH = pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("who", [one for one in IMPORTED if one != "AsyncGRPOTrainer"])
def test_the_installed_release_has_all_that_is_needed(who):
    assert [need for need in needs(who) if need.problem is not None] == []
    assert untested() is None


def test_both_ends_of_the_tested_range_can_be_installed():
    requirement = next(r for r in map(Requirement, requires("ragen2-trl")) if r.name == "trl")
    assert requirement.specifier.contains(OLDEST) and requirement.specifier.contains(NEWEST)


MUTILATED = {
    "a hook is gone": ("_calculate_rewards", lambda patch: patch.delattr(GRPOTrainer, "_calculate_rewards")),
    "a hook of transformers is gone": ("_get_grad_norm", lambda patch: patch.delattr(Trainer, "_get_grad_norm")),
    "a parameter has another name": (
        "_prepare_inputs",
        lambda patch: patch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, batch: batch),
    ),
    "what we override has one more": (
        "_compute_loss",
        lambda patch: patch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs, scale=1.0: 0),
    ),
    "what we call needs one more": (
        "_generate_single_turn",
        lambda patch: patch.setattr(
            GRPOTrainer, "_generate_single_turn", lambda self, prompt_ids, images, multimodal_fields, budget: None
        ),
    ),
    "a helper is gone": ("nanstd", lambda patch: patch.delattr(utils, "nanstd")),
    "a setting is gone": ("loss_type", lambda patch: patch.delitem(trl.GRPOConfig.__dataclass_fields__, "loss_type")),
}


@pytest.mark.parametrize(("name", "mutilate"), MUTILATED.values(), ids=MUTILATED)
def test_a_release_that_lacks_something_is_refused_with_its_name(name, mutilate, monkeypatch, capsys):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    mutilate(monkeypatch)
    with pytest.raises(IncompatibleTRLError, match=rf"1\.99\.0.*{name}.*{NEWEST}"):
        SNRFilteredGRPOTrainer("a model that nobody has loaded by then", len)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-trl"])
    assert ended.value.code == 1
    assert name in capsys.readouterr().out


def test_a_release_that_lacks_nothing_trains_with_one_line_of_warning(
    policy_path, prompts, make_args, monkeypatch, caplog
):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            SNRFilteredGRPOTrainer(policy_path, lambda prompts, **_: [0.5] * len(prompts), make_args(), prompts)
    assert len([record for record in caplog.records if "1.99.0" in record.getMessage()]) == 1


def test_parameters_with_defaults_may_be_added_to_what_is_called(monkeypatch):
    log = lambda self, logs, start_time=None, more=None: None  # noqa: E731
    monkeypatch.setattr(GRPOTrainer, "log", log)
    check_trl(GRPOTrainer)


def test_the_table_is_printed(capsys):
    cli.main(["check-trl"])
    printed = capsys.readouterr().out
    assert trl.__version__ in printed and "_prepare_inputs" in printed and "loss_type" in printed


# Attributes that TRL's trainers give themselves, and keys of the batch that they make of a generation. They are
# looked for in the code of the whole class, as a release may set them elsewhere.
ATTRIBUTES = """_step _buffered_inputs _metrics _pending_extra_logs _pending_metrics _tokenizer _logs generation_config
    max_completion_length num_generations num_generations_eval num_iterations reward_weights reward_funcs
    reward_func_names pad_to_multiple_of aux_loss_enabled ref_model use_vllm"""
KEYS = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"]
# Lists by row, from which pilots take the rows that they sample; and where environments come from.
ATTRIBUTES_OF_GRPO = """environments _batch_environments _sync_tool_dicts _async_tool_dicts _environment_pool
    environment_factories"""
OF_GRPO = ["tool_mask", "num_items_in_batch", "old_per_token_logps", "sampling_per_token_logps"]
OF_RLOO = ["old_logps"]


def source_of(trainer_class) -> str:
    """Of a class, and of the classes of TRL that it is made of."""
    owners = [owner for owner in trainer_class.__mro__ if owner.__module__.startswith("trl.")]
    return "".join(map(inspect.getsource, owners))


@BOTH
def test_what_we_read_from_a_trainer_and_its_batch_is_there(trainer_class):
    source, grpo = source_of(trainer_class), trainer_class is GRPOTrainer
    attributes = f"{ATTRIBUTES} {ATTRIBUTES_OF_GRPO if grpo else ''}".split()
    assert [name for name in attributes if not re.search(rf"self\.{name}\b", source)] == []
    keys = [*KEYS, *(OF_GRPO if grpo else OF_RLOO)]
    assert [key for key in keys if f'"{key}"' not in source] == []


# What we lean on in the text of a method, in its order where there are several parts: owner, method, and the parts.
LEANED_ON = {
    "the buffer is a list of micro-batches indexed by step": (
        *("both", "_prepare_inputs", "self._step % generate_every == 0 or self._buffered_inputs is None"),
        "shuffle_sequence_dict(generation_batch)",
        "self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ),
    "unscorable rows are NaN, without an advantage": (
        *("both", "_generate_and_score_completions", "nan_to_num(advantages, nan=0.0)"),
    ),
    "rewards and completions come from methods that may be watched": (
        *("both", "_generate_and_score_completions", "self._generate(prompts)", "self._calculate_rewards("),
    ),
    "metrics of a training step are averaged into its log row, and cleared": (
        *("both", "log", 'mode = "train" if self.model.training else "eval"', "logs.update(metrics)"),
        *("super().log(", "self._metrics[mode].clear()"),
    ),
    "the loss is called through the instance": ("both", "compute_loss", "self._compute_loss(model, inputs)"),
    "vLLM's weights are synced in a generation": (
        *("both", "_generate_single_turn", "self.vllm_generation.sync_weights()"),
    ),
    "a training step calls compute_loss through the instance": (Trainer, "training_step", "self.compute_loss("),
    "on_pre_optimizer_step, where we set gradients to None, is between clipping and the optimizer": (
        *(Trainer, "_run_epoch", "_clip_grad_norm(", "on_pre_optimizer_step", "optimizer.step()", "zero_grad()"),
        "on_step_end",
    ),
    "a card is made where a checkpoint is saved": (GRPOTrainer, "_save_checkpoint", "self.create_model_card("),
    "a card is made before an upload": (Trainer, "push_to_hub", "self.create_model_card("),
    "what begins with an underscore is not uploaded": (
        *(Trainer, "_push_from_checkpoint", "self.push_in_progress", '"_*"'),
    ),
    "RLOO normalises over all rows that are not alone in their group": (
        *(RLOOTrainer, "_generate_and_score_completions"),
        "scorable_counts = (~torch.isnan(grouped_rewards)).sum(dim=1, keepdim=True)",
        "advantages = (advantages - torch.nanmean(advantages)) / (nanstd(advantages) + 1e-4)",
    ),
    "RLOO's loss is a mean over rows": (RLOOTrainer, "_compute_loss", "loss = per_sequence_loss.mean()"),
    "GRPO's loss takes an advantage for each token, which PPO's are": (
        *(GRPOTrainer, "_compute_loss", "self._get_per_token_logps_and_entropies("),
        "if advantages.dim() == 1:\n            advantages = advantages.unsqueeze(1)",
    ),
    "GRPO's losses are normalised as we know": (
        *(GRPOTrainer, "_compute_loss", "normalizer = self.current_gradient_accumulation_steps if mode"),
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:\n            # `num_items_in_batch` spans',
        'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
    ),
}


@pytest.mark.parametrize("what", LEANED_ON)
def test_the_source_has_what_we_lean_on(what):
    owner, method, *parts = LEANED_ON[what]
    for one in (GRPOTrainer, RLOOTrainer) if owner == "both" else (owner,):
        source = inspect.getsource(getattr(one, method))
        assert [part for part in parts if part not in source] == [], one.__name__
        if what.startswith(("metrics", "on_pre")):
            assert [source.index(part) for part in parts] == sorted(map(source.index, parts)), one.__name__


@BOTH
def test_arguments_of_the_entropy_pass(trainer_class):
    # 1.14 hands what it is given to one of two methods: that of liger's kernels, or the one that all releases have.
    between = trainer_class is GRPOTrainer and Version("1.14") <= release < Version("1.15")
    method = parameters(
        trainer_class._full_logits_logps if between else trainer_class._get_per_token_logps_and_entropies
    )
    first = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert method[:7] == first
    assert set(IMAGE_KEYS) == set(method) - set(first) - {"compute_aux_loss"}


@pytest.mark.skipif(not Version("1.14") <= release < Version("1.15"), reason="other releases have one method")
def test_the_two_entropy_passes_of_114_take_the_same_arguments():
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:3] == ["self", "model", "args"]
    assert "model, *args, batch_size=batch_size, compute_aux_loss=compute_aux_loss, **kwargs" in source
    both = set(parameters(GRPOTrainer._full_logits_logps)) - {"batch_size", "compute_aux_loss"}
    assert set(parameters(GRPOTrainer._chunked_logps)) == both


def test_loss_types_are_the_ones_whose_normalisation_we_know():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    losses = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *TOKEN_NORMALIZED_LOSSES)
    assert [loss_type for loss_type in losses if f'"{loss_type}"' not in source] == []


def test_keys_of_the_generation_batch(policy_path, prompts, make_args):
    """Every key of TRL's batch is one that `batches.py` knows how to join and trim, and the ones we read exist."""
    seen = {}

    class Spy(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            seen.update(batch)
            return batch

    args = make_args(snr=False, max_steps=1, beta=0.1, steps_per_generation=2, gradient_accumulation_steps=1)
    Spy(policy_path, lambda completions, **_: list(map(len, completions)), args, prompts).train()
    per_token = {*PROMPT_PADDING, *COMPLETION_PADDING}
    assert set(seen) - per_token == {"num_items_in_batch"}
    assert {"prompt_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps"} <= set(seen)
    assert seen["num_items_in_batch"].ndim == 0
    assert seen["advantages"].shape == (16,)


@BOTH
def test_every_key_that_trl_can_put_into_a_batch_is_known(trainer_class):
    source = inspect.getsource(trainer_class._generate_and_score_completions)
    built = source[source.index("output = {") :]
    written = {line.split('"')[1] for line in built.splitlines() if line.strip().startswith(('output["', '"'))}
    known = {*PROMPT_PADDING, *COMPLETION_PADDING, *WHOLE_SEQUENCE, *IMAGE_KEYS, "num_items_in_batch", "old_logps"}
    assert written <= known, f"unknown keys in TRL's batch: {sorted(written - known)}"
    # RLOO's are (rows,), summed over a completion, and always there; GRPO's are (rows, T), where they are needed.
    assert ("old_logps" in written, "num_items_in_batch" in written) == (
        (True, False) if trainer_class is RLOOTrainer else (False, True)
    )


@pytest.mark.parametrize("liger", [False, True])
def test_ppo_knows_which_releases_take_another_way_with_liger(liger, monkeypatch, tmp_path):
    monkeypatch.setattr(trl, "__version__", "1.14.2")
    args = SNRFilteredPPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    args.use_liger_kernel = liger
    reason = "use_liger_kernel=True does not work with a critic in TRL 1.14.2" if liger else "train_dataset has"
    with pytest.raises(ValueError, match=reason):
        SNRFilteredPPOTrainer(TINY_MODEL_PATH, len, args, Dataset.from_dict({"question": ["a"]}))


def test_how_a_rollout_asks_for_one_turn():
    assert ("num_generations" in parameters(GRPOTrainer._generate_single_turn)) == (release >= Version("1.14.1"))
    generation = inspect.getsource(GRPOTrainer._generate_single_turn)
    if release < Version("1.14.1"):
        assert 'num_generations = self.num_generations if mode == "train" else self.num_generations_eval' in generation
    in_constructor = "self.eos_token_ids = " in inspect.getsource(GRPOTrainer.__init__)
    assert in_constructor == (release >= Version("1.14.2"))
    if not in_constructor:
        assert '"eos_token_id": self._tokenizer.eos_token_id' in inspect.getsource(GRPOTrainer.__init__)


@pytest.mark.parametrize(("trainer_class", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_what_type_checkers_are_told_of_both_trainers_is_there(trainer_class, config):
    assert set(StockConfig.__annotations__) <= set(config.__dataclass_fields__)
    hooks = [name for name, value in vars(StockTrainer).items() if inspect.isfunction(value)]
    assert [name for name in hooks if not hasattr(trainer_class, name)] == []
    sources = "".join(inspect.getsource(each) for each in trainer_class.__mro__ if issubclass(each, Trainer))
    there = [name for name in StockTrainer.__annotations__ if re.search(rf"self\.{name}\b.* = |\b{name} = ", sources)]
    assert there == list(StockTrainer.__annotations__)


@pytest.mark.parametrize(("trainer_class", "count"), [(GRPOTrainer, 3), (RLOOTrainer, 1)])
def test_normalisation_uses_1e4(trainer_class, count):
    assert inspect.getsource(trainer_class._generate_and_score_completions).count("+ 1e-4)") == count


def test_a_callbacks_state_is_written_with_the_trainers(tmp_path):
    state = TrainerState(stateful_callbacks=[])
    state.stateful_callbacks["ours"] = {"a": 1}
    state.save_to_json(str(tmp_path / "state.json"))
    assert TrainerState.load_from_json(str(tmp_path / "state.json")).stateful_callbacks == {"ours": {"a": 1}}


@BOTH
def test_pilots_can_be_sampled_first(trainer_class):
    """What is by row where some of the rows are sampled, and where reward functions put what they log."""
    source, of_grpo = inspect.getsource(trainer_class), trainer_class is GRPOTrainer
    assert "self._pending_extra_logs = defaultdict(list)" in source
    returned = inspect.getsource(trainer_class._generate).rsplit("return ", 1)[1]
    assert returned.startswith(f"prompt_ids, completion_ids, {'tool_mask, ' * of_grpo}completions")
    if trainer_class is GRPOTrainer:
        for name in BY_ROW:
            assert f"self.{name} = " in source
        # Columns of a rollout function join the rows once it has returned: by row where they are lists.
        assert "isinstance(values, list) and i < len(values)" in source


@pytest.mark.parametrize(
    ("module", "name", "of_ours"),
    [
        ("trl.trainer.utils", "nanstd", "trainers.advantages"),
        ("trl.distributed", "DistributedBackend", "callbacks.whole_model"),
    ],
)
def test_a_name_of_trl_that_cannot_be_imported_is_told_with_the_releases_that_have_it(
    module, name, of_ours, monkeypatch
):
    """In a module of ours that the class needs, before the class can look itself."""
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    monkeypatch.delattr(import_module(module), name)
    for one in (of_ours, "callbacks.mutual_information", "trainers.filtered", "trainers.grpo"):
        monkeypatch.delitem(sys.modules, f"ragen2_trl.{one}", raising=False)
    class_name = "SNRFilteredGRPOTrainer" if "trainers" in of_ours else "MutualInformationCallback"
    with pytest.raises(IncompatibleTRLError, match=rf"1\.99\.0.*{name}.*TRL {OLDEST} to {NEWEST}"):
        getattr(ragen2_trl, class_name)
