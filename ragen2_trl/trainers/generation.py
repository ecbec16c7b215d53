"""Sampling without doing a thing twice: transformers' `generate` reads each distinct prompt once, and all rows that
repeat it begin with copies of its cache; vLLM keeps its weights between the calls of a generation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from ragen2_trl.rollout_events import extend
from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.checks import wants_shared_prompts
from ragen2_trl.trainers.shared_prompts import dropout_of

CACHE = (
    "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
)  # transformers 5.24
# Settings of generation under which it begins with any other cache than a plain one of every row, or with none.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "prompt_lookup_num_tokens": (None,),
    "prefill_chunk_size": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}


def reads_prompts_once(trainer: Any) -> bool:
    """Whether sampling may read each prompt once: with `snr_share_prompts`, where each process has whole weights.

    Args:
        trainer: one of ours.
    """
    args, accelerator = trainer.args, trainer.accelerator
    is_sharded = accelerator.distributed_type == DistributedType.FSDP or (
        trainer.is_deepspeed_enabled
        and accelerator.state.deepspeed_plugin.zero_stage == 3
        and not args.ds3_gather_for_generation
    )
    return wants_shared_prompts(args) and not is_sharded


@contextmanager
def keeping_vllm_awake(trainer: Any) -> Iterator[None]:
    """Inside, vLLM in the trainer's process (`vllm_enable_sleep_mode`) first sleeps when the last call is over.

    TRL's sleeps after each call, and discards its weights and the cache of prompts: the remaining completions of
    pilots and each turn of an episode would wait until all weights have been copied to it again.
    """
    vllm: Any = getattr(trainer, "vllm_generation", None)
    needs_memory = any(isinstance(one, nn.Module) for one in getattr(trainer, "reward_funcs", ()))  # between calls
    if getattr(vllm, "mode", None) != "colocate" or not vllm.enable_sleep_mode or needs_memory:
        yield
        return
    asked: list[dict[str, Any]] = []

    def later(sleep: Callable[..., None], **level: Any) -> None:
        vllm.enable_sleep_mode = False  # the next call finds it awake
        asked.append(level)

    take_off = extend(vllm.llm, "sleep", later)
    try:
        yield
    finally:
        take_off()
        if asked:
            vllm.enable_sleep_mode = True
            vllm.llm.sleep(**asked[-1])


@contextmanager
def reading_prompts_once(trainer: Any) -> Iterator[None]:
    """Inside, the policy's `generate` gives the same tokens, up to rounding, and reads each distinct prompt once.

    It reads all of a prompt but its last token, with which `generate` itself goes on. Sliding windows, recurrent
    states, images and searches are left to `generate` alone.
    """
    if not trainer._reads_prompts_once:
        yield
        return
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    take_off = extend(model, "generate", partial(_generate, model))
    try:
        yield
    finally:
        take_off()


def _generate(model: Any, plain: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Around a method that takes `input_ids` and `attention_mask` (rows, P), padded on the left."""
    if args or not _serves(model, inputs):
        return plain(*args, **inputs)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    distinct, row = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)
    if len(distinct) == len(ids):
        return plain(**inputs)
    cache = _read(model, *(each[:, :-1] for each in distinct.chunk(2, dim=1)))
    if cache is None:
        return plain(**inputs)
    cache.batch_select_indices(row)
    return plain(**inputs, **{CACHE: cache})


def _serves(model: Any, inputs: dict[str, Any]) -> bool:
    given, own = inputs.get("generation_config"), model.generation_config
    config = model.config.get_text_config()
    if inputs.keys() - {"generation_config"} != {"input_ids", "attention_mask"} or inputs["input_ids"].size(1) < 2:
        return False
    for name, allowed in PLAIN.items():  # the model's own configuration fills the gaps
        value = getattr(given, name, None)
        if (getattr(own, name, None) if value is None else value) not in allowed:
            return False
    adapters = getattr(model, "peft_config", {}).values()
    return (
        CACHE in signature(_base(model).forward).parameters
        and length_dependent(config) is None
        and not (model.training and dropout_of(model))
        and not any(one.is_prompt_learning for one in adapters)
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    )


def _base(model: Any) -> nn.Module:
    base: nn.Module = model.get_base_model() if hasattr(model, "peft_config") else model
    return base


def _read(model: Any, ids: Tensor, mask: Tensor) -> DynamicCache | None:
    """The cache of some rows, `None` where the model keeps another kind."""
    cache = DynamicCache(config=model.config.get_text_config())
    further = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0), "logits_to_keep": 1}
    takes = signature(_base(model).forward).parameters
    further = {name: value for name, value in further.items() if name in takes}
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE: cache}, **further)
    return cache if cache.get_seq_length() == ids.size(1) else None
