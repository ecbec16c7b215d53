"""Each prompt computed once for all completions of its group, in one ordinary forward and backward pass."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.nn.functional import pad

from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.batches import Batch, padded_size, prompts_of, tree_size, whole_rows
from ragen2_trl.trainers.prompt_tree import attending_to_trees, build_tree, serves_flash

logger = get_logger(__name__)

LAYERS = {"full_attention", "sliding_attention"}

TOLERANCE = 1e-4, 2e-2
"""Nats per token by which log-probs of a tree and of padded rows may differ, in float32 and in lower precision, beside
eight times the difference that batching makes. Where a tree does not fit a model, it is off by 0.09 nats and more."""

PADDING = 64
"""Columns before the prompt of a comparison, so that positions that a model counts by itself differ from columns."""

LogProbs = Callable[[Tensor, Tensor, int], Tensor]


class Rows(NamedTuple):
    """Padded rows as a tree needs them, see `build_tree`."""

    prompts: list[int]
    lengths: list[int]
    groups: list[int]

    @property
    def size(self) -> int:
        """Tokens of their tree."""
        return tree_size(*self)


class SharedPrompts:
    """Log-probs of rows with equal prompts, each prompt computed once.

    Args:
        accelerator: Of the trainer.
        model: The policy, as accelerate has prepared it.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator = accelerator
        self.config = accelerator.unwrap_model(model).config.get_text_config()
        self.dtype = next(model.parameters()).dtype
        self.length_dependent = length_dependent(self.config) or (sys.maxsize, "")
        self.serves: bool | None = None  # `None` before `check`
        self.checked = 0  # tokens of context that `check` has compared
        self._announced = self._told_width = False
        self._is_tree = False  # whether the latest pass with gradients was over a tree

    def check(self, model: nn.Module, log_probs: LogProbs, batch: Batch) -> None:
        """Compare log-probs of a tree and of padded rows, for the first batch and the first beyond a window.

        Falls back to padded rows, with a warning, where they differ. A call for all processes together.

        Args:
            model: the policy.
            log_probs: TRL's method, from input ids, attention mask and the number of completion columns.
            batch: of this process, text alone.
        """
        window = getattr(self.config, "sliding_window", None) or math.inf
        tokens, kind = self.length_dependent
        is_wide = tokens < sys.maxsize and padded_size(batch) >= tokens * len(batch["prompt_ids"])
        if is_wide and self.serves is not False and not self._told_width:
            self._told_width = True
            logger.warning(
                f"Prompts are not shared in rows of {tokens} columns or more: their width, padding included, sets the "
                f"rotary embeddings of {type(self.config).__name__} (rope_type={kind!r})."
            )
        if self.serves is False or (self.serves and (window == math.inf or self.checked > window)):
            return
        ids, mask, columns = whole_rows(batch)
        input_ids, attention_mask, width = self._compared_rows(ids, _filled(mask), columns)
        lengths = attention_mask.sum(dim=1) * attention_mask[:, -width:].any(dim=1) * (not is_wide)
        longest = int(self.accelerator.gather(lengths).max()) - 1  # the last token is predicted, and not attended to
        if longest < 0 or (self.serves and longest <= window):
            return
        reason = self._misfit() or self._difference(model, log_probs, input_ids, attention_mask, width)
        if self.accelerator.gather(torch.tensor([reason is not None], device=input_ids.device)).any():
            self.serves = False
            name = type(self.accelerator.unwrap_model(model)).__name__
            logger.warning(
                f"Prompts are not shared; each is computed once per completion: {name}, "
                f"{reason or 'another process has found a difference'}. snr_share_prompts=False silences this."
            )
        else:
            self.serves, self.checked = True, longest

    def announce(self, computed: int, plain: int) -> None:
        """Say once what an update computes, in positions over all processes."""
        if not self.serves or self._announced:
            return
        self._announced = True
        device = self.accelerator.device
        by_part = device.type == "cuda" and not self._uses_flash(device, self.dtype)
        logger.warning(
            f"Prompts are computed once per group: this update passes {computed:,} positions through the model, plain "
            f"TRL {plain:,} (snr_share_prompts=False computes prompts once per completion)."
            + " PyTorch has no flash attention here for this precision: completions attend in turn."
            * by_part
        )

    def serves_rows(self, batch: Batch) -> bool:
        """Whether any micro-batch of these rows can be a tree."""
        return bool(self.serves) and self._can_be_tree(*whole_rows(batch)[:2], batch["prompt_ids"].size(1))

    def positions(self, batch: Batch) -> int:
        """Positions that a forward pass over the batch computes."""
        rows = self._rows(*whole_rows(batch)) if self.serves else None
        return padded_size(batch) if rows is None else rows.size

    def backward(self, backward: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Around a backward pass, in which checkpointed layers attend to their tree again, or to padded rows."""
        if not self._is_tree:
            backward(loss, **kwargs)
            return
        with attending_to_trees(self.config):
            backward(loss, **kwargs)

    def __call__(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None] | None:
        """Log-probs and entropies in nats of the completions, (rows, T) each, 0 at padding.

        `None` where padded rows are as few positions, or masks have holes, or a tree does not fit the model; and for
        entropies where TRL computes none.

        Args:
            model: with TRL's fused head.
            input_ids: (rows, P + T), prompts padded on the left and completions on the right.
            attention_mask: (rows, P + T).
            width: T.
        """
        rows = self._rows(input_ids, attention_mask, width) if self.serves else None
        if torch.is_grad_enabled():
            self._is_tree = rows is not None
        return None if rows is None else self._of_tree(model, input_ids, width, rows)

    # Trees

    def _rows(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> Rows | None:
        """`None` where their tree is no smaller, or masks have holes, or the padded width decides on rotary
        frequencies."""
        if not self._can_be_tree(input_ids, attention_mask, input_ids.size(1) - width):
            return None
        rows = _rows(input_ids, attention_mask, width)  # without completions there is nothing to predict
        return rows if any(rows.lengths) and rows.size < input_ids.numel() else None

    def _can_be_tree(self, input_ids: Tensor, attention_mask: Tensor, before: int) -> bool:
        """Whether masks of rows with `before` columns of prompts have no holes, widths do not decide on rotary
        frequencies, and each row has a prompt to predict its first token from."""
        return (
            input_ids.size(1) < self.length_dependent[0]
            and torch.equal(_filled(attention_mask), attention_mask)
            and bool(attention_mask[:, :before].any(dim=1).all())
        )

    def _of_tree(self, model: nn.Module, input_ids: Tensor, width: int, rows: Rows) -> tuple[Tensor, Tensor | None]:
        own: Any = self.accelerator.unwrap_model(model).config.get_text_config()  # the reference's is another object
        windows = {None, getattr(own, "sliding_window", None)}
        uses_flash = self._uses_flash(input_ids.device, next(model.parameters()).dtype)
        tree = build_tree(input_ids, width, *rows, windows=windows, uses_flash=uses_flash)
        # Of four dimensions, so that transformers makes none of its own; attention to a tree takes none.
        mask: Any = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        if kinds := set(getattr(self.config, "layer_types", None) or ()):
            mask = dict.fromkeys(kinds | {"full_attention"}, mask)
        with self.accelerator.autocast(), attending_to_trees(own):
            outputs = model(
                input_ids=tree.ids,
                attention_mask=mask,
                position_ids=tree.positions,
                shift_labels=tree.labels,
                fused_lm_head=True,
                prompt_tree=tree.branches,
            )
        place, row, column = tree.scored

        def by_row(values: Tensor) -> Tensor:
            return values.new_zeros(len(input_ids), width).index_put((row, column), values[0, place])

        return by_row(outputs.log_probs), None if outputs.entropy is None else by_row(outputs.entropy)

    def _uses_flash(self, device: torch.device, dtype: torch.dtype) -> bool:
        heads = int(self.config.num_attention_heads)
        size = int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        return serves_flash(device, mixed or dtype, size)

    # Whether a tree fits a model

    def _misfit(self) -> str | None:
        """Why the settings of a model rule a tree out."""
        if not isinstance(getattr(self.config, "num_attention_heads", None), int):
            return "it has no attention heads"
        dropout = [name for name, value in vars(self.config).items() if "att" in name and "drop" in name and value]
        if dropout:
            return f"{dropout[0]}={getattr(self.config, dropout[0])} acts on attention"
        others = set(getattr(self.config, "layer_types", None) or ()) - LAYERS
        return f"its layers of {', '.join(sorted(others))}" if others else None

    def _compared_rows(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Tensor, Tensor, int]:
        """The two longest completions with the prompt of the longest row, which padding moves, and one token after the
        shortest prompt."""
        lengths, totals = attention_mask[:, -width:].sum(dim=1), attention_mask.sum(dim=1)
        longest = lengths.argsort(descending=True)[[0, min(1, len(input_ids) - 1)]]
        completions = torch.cat([longest, longest[:1]])
        prompts = torch.stack([totals.argmax(), totals.argmax(), (totals - lengths).argmin()])
        most = min(getattr(self.config, "max_position_embeddings", None) or sys.maxsize, self.length_dependent[0] - 1)
        room = max(0, min(PADDING, most - input_ids.size(1)))
        ids, mask = (
            pad(torch.cat([rows[prompts, :-width], rows[completions, -width:]], dim=1), (room, 0))
            for rows in (input_ids, attention_mask)
        )
        mask[2, ids.size(1) - width + 1 :] = 0
        return ids, mask, width

    def _difference(self, model: nn.Module, log_probs: LogProbs, ids: Tensor, mask: Tensor, width: int) -> str | None:
        """Why a tree of three completions, two of one prompt, gives other log-probs."""
        rows, others = _rows(ids, mask, width), ids.clone()
        others[:, -width:] = ids[:, -width:].roll(1, dims=1).add(1) % int(self.config.vocab_size)
        with torch.no_grad(), _without_dropout(model):
            padded = log_probs(ids, mask, width)
            alone = torch.cat([log_probs(ids[row : row + 1], mask[row : row + 1], width) for row in range(3)])
            try:
                tree = self._of_tree(model, ids, width, rows)[0]
                beside_others = [
                    self._of_tree(model, torch.where(changed, others, ids), width, rows)[0]
                    for changed in torch.eye(3, dtype=torch.bool, device=ids.device).unsqueeze(2)
                ]
            except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        shown = mask[:, -width:].bool()

        def apart(values: Tensor) -> float:
            return ((padded - values).float().abs() * shown).sum().item() / max(1, int(shown.sum()))

        exact = padded.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        exact &= self.dtype == torch.float32
        difference, noise = apart(tree), apart(alone)
        # Of rows so long that others are padded, another process may compare shorter ones.
        if ids.size(1) >= self.length_dependent[0]:
            return None
        if difference > TOLERANCE[not exact] + 8 * noise:
            return f"whose log-probs would differ by {difference:.2g} nats a token, and by {noise:.1g} from batching"
        # Experts round by how many tokens each of them gets.
        limit = 8 * noise + TOLERANCE[not exact] if any("experts" in name for name in vars(self.config)) else 0.0
        for changed, beside in enumerate(beside_others):
            leak = (beside - tree).float().abs() * shown
            leak[changed] = 0
            if leak.max() > limit:
                return f"in which a completion changes the log-probs of another one by {leak.max().item():.1g} nats"
        return None


def _rows(input_ids: Tensor, attention_mask: Tensor, width: int) -> Rows:
    batch = {"prompt_ids": input_ids[:, :-width], "prompt_mask": attention_mask[:, :-width]}
    groups, prompts = zip(*prompts_of(batch), strict=True)
    return Rows(list(prompts), attention_mask[:, -width:].sum(dim=1).tolist(), list(groups))


def _filled(mask: Tensor) -> Tensor:
    """Masks that are 1 from the first to the last token of each row, (rows, columns).

    >>> _filled(torch.tensor([[0, 1, 0, 1, 0]])).tolist()
    [[0, 1, 1, 1, 0]]
    """
    return mask.cummax(dim=1).values * mask.flip(1).cummax(dim=1).values.flip(1)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def dropout_of(model: nn.Module) -> float:
    """Largest probability of dropout in a model, 0 without any."""
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    # Layers that call the function keep its rate, in `attention_dropout`, `resid_pdrop` and the like.
    attributes = [item for module in model.modules() for item in vars(module).items()]
    rates += [value for name, value in attributes if "drop" in name and isinstance(value, float)]
    return float(max([*rates, getattr(getattr(model, "config", None), "attention_dropout", None) or 0.0]))
