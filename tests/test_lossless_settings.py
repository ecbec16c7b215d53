"""Promise 8 under TRL's settings: whatever lossless does not refuse ends with TRL's parameters, dead groups included.

Every field of TRL's configurations stands in exactly one of three lists: drawn, refused, or irrelevant with a reason.
A release with a new field fails until somebody has decided. The drawn ones are tried in pairs, and in many random
combinations by `make test-all`.
"""

import random
from dataclasses import fields
from itertools import combinations

import pytest
from algorithms import GRPO, LOSSES, RLOO, Algorithm, replay_of
from conftest import PROMPTS, RUN, apart, log_rows, parameters_of
from datasets import Dataset
from peft import LoraConfig
from replay import Replay
from test_lossless import CENTRED, LOSSLESS, REFUSED, InFloat64, model_in_float64
from transformers import AutoModelForCausalLM

RANDOM_CASES = 400  # of each algorithm, on demand


# Each factor has several values, of which one is drawn; a value sets one field or several. "layout" has generations
# within an optimizer step and beyond it, several passes, and groups of two to eight.
def layout(rows, accumulation, **more):
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, **more}


LAYOUTS = [
    layout(4, 2, steps_per_generation=8, num_iterations=2),
    layout(1, 16, num_generations=8),
    layout(8, 3, generation_batch_size=16, num_generations=2),
    layout(6, 4, steps_per_generation=1, num_generations=3),
    layout(8, 1, steps_per_generation=3, num_iterations=3, num_generations=6),
]


def by_vllm(**weights):
    """As if vLLM had sampled, with log-probs of its own."""
    return {"sampler": "vllm", **{f"vllm_importance_sampling_{name}": value for name, value in weights.items()}}


OPTIMIZERS = [
    {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1},
    {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    {"optim": "sgd", "learning_rate": 0.02, "optim_args": "momentum=0.9"},
]
OF_BOTH = {
    "layout": LAYOUTS,
    "optimizer": OPTIMIZERS,
    "clipping": [{"max_grad_norm": 0.5}, {"max_grad_norm": 0.0}],
    "schedule": [{"lr_scheduler_type": "constant"}, {"lr_scheduler_type": "linear", "warmup_steps": 2}],
    "length": [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 2}],
    "seed": [{"seed": 3}, {"seed": 8, "data_seed": 1}],
    "order": [{"shuffle_dataset": True}, {"shuffle_dataset": False}],
    "checkpointing": [{}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}],
    "clip": [{"epsilon": 0.2}, {"epsilon": 0.01}, {"epsilon": 0.1, "epsilon_high": 0.4}],
    "truncated": [{}, {"mask_truncated_completions": True}],
    "padding": [{"pad_to_multiple_of": None}, {"pad_to_multiple_of": 8}],
    "temperature": [{"temperature": 1.0}, {"temperature": 0.7}],
    "max_completion_length": [{"max_completion_length": 10}, {"max_completion_length": 16}],
    "weights": [{}, {"reward_weights": [0.5, 2.0]}, {"reward_weights": [0.0, 1.0]}],
    # What is not a field: what is trained, and what is earned.
    "model": [{"model": name} for name in ("in float64", "shared prompts", "padded rows", "lora")],
    "rewards": [{"rewards": name} for name in ("half of the groups vary", "few vary", "some are missing")],
}
DRAWN = {
    "grpo": OF_BOTH
    | {
        "loss_type": [{"loss_type": name} for name in LOSSES],
        "scale": [{"scale_rewards": name} for name in ("group", "batch", "none")],
        "level": [{"importance_sampling_level": name} for name in ("token", "sequence")],
        "delta": [{}, {"delta": 1.5}],
        "off-policy mask": [{}, {"off_policy_mask_threshold": 0.5}],
        "of sapo": [{}, {"sapo_temperature_neg": 3.0, "sapo_temperature_pos": 0.5}],
        "of vespo": [{}, {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 4.0}],
        "importance weights": [
            {},
            by_vllm(correction=False),
            by_vllm(mode="token_truncate"),
            by_vllm(mode="token_mask", clip_max=1.5, clip_min=0.1),
            by_vllm(mode="sequence_mask", clip_max=100.0),
            by_vllm(mode="sequence_truncate"),
        ],
    },
    "rloo": OF_BOTH | {"reward clip": [{}, {"reward_clip_range": (0.25, 0.75)}]},
}

REFUSED_FIELDS = {
    # test_lossless shows for these that training would end elsewhere, and with what they are refused
    *(next(iter(settings)) for _, settings in (REFUSED | CENTRED).values()),
    "router_aux_loss_coef",
    "neftune_noise_alpha",
}

IRRELEVANT = {
    "is not used beside what is refused": """use_bias_correction_kl sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target""",
    "says what is sampled and by whom, before there is anything to leave out": """chat_template_kwargs
        generation_kwargs top_p top_k min_p repetition_penalty cache_implementation ds3_gather_for_generation
        max_tool_calling_iterations use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
        vllm_importance_sampling_cap""",
    "says how the model is made or loaded": "model_init_kwargs trust_remote_code use_cache",
    "draws dropout anew in every pass, so that only its distribution can be TRL's": "disable_dropout",
    "is of evaluation, which is never filtered": """num_generations_eval batch_eval_metrics bf16_full_eval do_eval
        eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
        eval_use_gather_object fp16_full_eval greater_is_better include_for_metrics load_best_model_at_end
        metric_for_best_model per_device_eval_batch_size prediction_loss_only""",
    "is of logs": """disable_tqdm include_num_input_tokens_seen log_completions log_completions_hub_repo log_level
        log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter
        logging_steps logging_strategy num_completions_to_print project report_to run_name skip_memory_metrics
        trackio_bucket_id trackio_space_id trackio_static_space_id""",
    "is of files, checkpoints and the Hub": """do_predict do_train enable_jit_checkpoint hub_always_push hub_model_id
        hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip output_dir push_to_hub
        restore_callback_states_from_checkpoint resume_from_checkpoint save_on_each_node save_only_model save_steps
        save_strategy save_total_limit""",
    "says how rows of the dataset are loaded": """dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
        dataloader_prefetch_factor label_names length_column_name remove_unused_columns train_sampling_strategy""",
    "is of other processes and devices, for which tests/distributed compares with TRL": """accelerator_config
        auto_find_batch_size average_tokens_across_devices ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed fsdp fsdp_config local_rank
        parallelism_config torch_empty_cache_steps use_cpu""",
    "chooses kernels or a precision, whose rounding is not TRL's in other shapes": """activation_checkpointing
        activation_checkpointing_kwargs bf16 fp16 full_determinism liger_kernel_config tf32 torch_compile
        torch_compile_backend torch_compile_mode use_liger_kernel cast_lm_head_to_fp32""",
    "is of losses with labels, which TRL's trainers do not call": "label_smoothing_factor",
    "is passed to the schedule or the optimizer as it is": "lr_scheduler_kwargs optim_target_modules",
}


@pytest.mark.parametrize("algorithm", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_every_setting_of_trl_is_drawn_or_refused_or_irrelevant(algorithm):
    drawn = {name for values in DRAWN[algorithm.name].values() for value in values for name in value}
    irrelevant = {name for names in IRRELEVANT.values() for name in names.split()}
    assert drawn & irrelevant == drawn & REFUSED_FIELDS == irrelevant & REFUSED_FIELDS == set()
    known = drawn | irrelevant | REFUSED_FIELDS
    assert {field.name for field in fields(algorithm.plain_config)} - known == set()


def test_noise_on_embeddings_is_refused_as_its_scale_depends_on_the_padding(tmp_path):
    for algorithm in (GRPO, RLOO):
        with pytest.raises(ValueError, match=r"neftune_noise_alpha=5.0 .*'lossless'"):
            algorithm.args(tmp_path, **LOSSLESS, **{"beta": 0.0, "neftune_noise_alpha": 5.0})


class Sampled(Replay):
    """Two reward functions of a few values, exact in float32, so that equal rewards have a mean without rounding."""

    def __init__(self, tokenizer, size: int, kind: str, seed: int):
        super().__init__(tokenizer, {prompt: [0.0] * size for prompt in PROMPTS})
        drawn = random.Random(seed)
        share = 0.2 if kind == "few vary" else 0.5
        self.tables = []
        for _ in range(2):
            varies = [drawn.random() < share for _ in PROMPTS]
            one = drawn.randrange(len(PROMPTS))
            table = {
                prompt: [drawn.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(size)] if varies[number] else [0.5] * size
                for number, prompt in enumerate(PROMPTS)
            }
            table[PROMPTS[one]][-2:] = 0.0, 1.0
            self.tables.append(table)
        if kind == "some are missing":
            for prompt in PROMPTS[::2]:
                self.tables[0][prompt][0] = self.tables[1][prompt][0] = None  # no reward at all
                self.tables[0][prompt][-1] = None
        for completions in self.completions.values():
            for completion in completions[::2]:
                completion[-1] = tokenizer.eos_token_id  # the others are truncated

    def attach(self, trainer):
        super().attach(trainer)
        generate = trainer._generate_single_turn

        def with_logprobs(prompt_ids, *args):
            completions, _ = generate(prompt_ids, *args)
            return completions, [[-6.5 + one % 7 / 5 for one in ids] for ids in completions]

        if trainer.use_vllm:
            trainer._generate_single_turn = with_logprobs

    def functions(self):
        def of(table):
            def score(prompts, **kwargs):
                return [table[prompt][number % self.group_size] for number, prompt in enumerate(prompts)]

            return score

        return [of(table) for table in self.tables]


def pairs(row: dict[str, int]) -> set:
    return set(combinations(sorted(row.items()), 2))


def is_allowed(algorithm: Algorithm, row: dict[str, int]) -> bool:
    """TRL itself refuses the others."""
    settings = settings_of(algorithm, row)
    of_sequences = settings.get("vllm_importance_sampling_mode", "sequence_mask").startswith("sequence")
    return not (settings.get("loss_type") == "vespo" and "sampler" in settings and of_sequences)


def settings_of(algorithm: Algorithm, row: dict[str, int]) -> dict:
    factors = DRAWN[algorithm.name]
    return {name: value for factor, number in row.items() for name, value in factors[factor][number].items()}


def drawn_row(algorithm: Algorithm, drawn: random.Random) -> dict[str, int]:
    return {name: drawn.randrange(len(values)) for name, values in DRAWN[algorithm.name].items()}


def pairwise(algorithm: Algorithm) -> list[dict[str, int]]:
    """Rows of values, by their numbers, that together hold each allowed pair of values of two factors."""
    drawn = random.Random(7)
    sizes = {name: range(len(values)) for name, values in sorted(DRAWN[algorithm.name].items())}
    missing = {
        ((a, i), (b, j)): None for a, b in combinations(sizes, 2) for i in sizes[a] for j in sizes[b]
    }  # a dict, whose order does not depend on hashes
    rows = []
    while missing:
        first = next(iter(missing))
        candidates = [drawn_row(algorithm, drawn) | dict(first) for _ in range(40)]
        allowed = [row for row in candidates if is_allowed(algorithm, row)]
        if not allowed:
            del missing[first]
            continue
        best = max(allowed, key=lambda row: len(pairs(row) & missing.keys()))
        rows.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    return rows


def random_rows(algorithm: Algorithm) -> list[dict[str, int]]:
    drawn = random.Random(11)
    rows = (drawn_row(algorithm, drawn) for _ in range(2 * RANDOM_CASES))
    return [row for row in rows if is_allowed(algorithm, row)][:RANDOM_CASES]


def cases():
    for algorithm in (GRPO, RLOO):
        for number, row in enumerate(pairwise(algorithm)):
            yield pytest.param(algorithm, row, True, id=f"{algorithm.name}-pair-{number}", marks=pytest.mark.slow)
        for number, row in enumerate(random_rows(algorithm)):
            yield pytest.param(algorithm, row, False, id=f"{algorithm.name}-random-{number}", marks=pytest.mark.full)


@pytest.mark.parametrize(("algorithm", "row", "must_move"), cases())
def test_lossless_is_trl_under_settings_that_meet(algorithm, row, must_move, policy_path, tmp_path):
    settings = settings_of(algorithm, row)
    kind, rewards, sampler = (settings.pop(name, "") for name in ("model", "rewards", "sampler"))
    size = settings.get("num_generations", RUN["num_generations"])
    tokenizer = replay_of(policy_path).tokenizer
    exact = kind == "in float64"
    trainers = []
    for plain in (True, False):
        shares = {"shared prompts": True, "padded rows": False}.get(kind)
        own = {} if plain else {**LOSSLESS, "snr_share_prompts": shares}
        replay = Sampled(tokenizer, size, rewards, seed=sum(row.values()))
        bases = ((InFloat64,) if exact else ()) + ((algorithm.plain_trainer if plain else algorithm.trainer),)
        trainer = type("Trainer", bases, {})(
            model_in_float64(tokenizer) if exact else AutoModelForCausalLM.from_pretrained(policy_path),
            replay.functions(),
            algorithm.args(tmp_path, plain, **{"beta": 0.0, **settings, **own}),
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj"], init_lora_weights=False) if kind == "lora" else None,
        )
        trainer.use_vllm = bool(sampler)
        replay.attach(trainer)
        before = parameters_of(trainer)
        trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    after = parameters_of(plain)
    moved = max((after[name] - before[name]).abs().max().item() for name in before)
    assert moved > 1e-7 or not must_move  # masks may leave nothing to learn from
    assert apart(ours, plain) <= (1e-7 if exact else 1e-2) * moved
    # RLOO's loss counts a masked completion as one of log-prob 0: a constant, without a gradient, which is left out.
    has_constant = algorithm is RLOO and settings.get("mask_truncated_completions", False)
    for row_of_ours, row_of_plain in zip(log_rows(ours), log_rows(plain), strict=True):
        for name in ("grad_norm", "learning_rate", *(() if has_constant else ("loss",))):
            assert row_of_ours[name] == pytest.approx(row_of_plain[name], rel=1e-3, abs=1e-5), name
