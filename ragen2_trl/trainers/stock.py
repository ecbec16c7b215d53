"""What TRL's GRPO and RLOO trainers have in common, for type checkers alone: TRL has no class of its own for it."""

from collections import defaultdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments


class StockConfig(TrainingArguments):
    """Settings of both. `Any` where TRL says `int | None`, of which its `__post_init__` leaves an `int`."""

    ds3_gather_for_generation: bool
    generation_batch_size: Any
    mask_truncated_completions: bool
    num_generations: Any
    num_iterations: int
    steps_per_generation: Any
    temperature: float


class StockTrainer(Trainer):
    """Attributes and hooks of both."""

    args: Any  # a `StockConfig`
    aux_loss_enabled: bool
    beta: float
    current_gradient_accumulation_steps: int
    model: Any
    num_generations: Any
    num_iterations: int
    pad_to_multiple_of: Any  # `int | None`
    ref_model: Any
    reward_func_names: list[str]
    reward_funcs: list[Any]
    reward_weights: Tensor
    router_aux_loss_coef: float
    shuffle_dataset: Any  # `bool | None`
    state: Any  # a `TrainerState`, whose annotation of `stateful_callbacks` is not what it holds
    train_dataset: Any
    use_vllm: bool
    _buffered_inputs: Any  # micro-batches, `None` before the first generation
    _logs: dict[str, Any]
    _metrics: dict[str, defaultdict[str, list[float]]]
    _name: Any
    _pending_extra_logs: Any  # values by column
    _pending_metrics: Any  # values by name
    _step: int
    _tokenizer: PreTrainedTokenizerBase

    def __init__(self, *args: Any, **kwargs: Any): ...

    def _calculate_rewards(self, *rows: list[Any]) -> Any: ...

    def _compute_loss(self, model: Any, inputs: Any) -> Any: ...

    def _generate(self, *args: Any, **kwargs: Any) -> Any: ...

    def _generate_and_score_completions(self, inputs: Any) -> Any: ...

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any: ...

    def _get_train_sampler(self, dataset: Any = None) -> Any: ...

    def _prepare_inputs(self, generation_batch: Any) -> Any: ...
