"""Each prompt computed once for all completions of its group, in one ordinary forward and backward pass.

A packed row is [prompt][completion 1]...[completion k]. Every completion begins with a copy of the last prompt token,
which predicts its first token, and a mask hides the other completions from it. Positions are the columns of TRL's
padded row, so that learned positions and the rounding of rotary embeddings are TRL's own.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.nn.functional import pad

from ragen2_trl.rotary import length_dependent
from ragen2_trl.trainers.batches import Batch, padded_size, prompts_of, whole_rows

logger = get_logger(__name__)

ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of our own. FlashAttention takes none."""

LAYERS = {"full_attention", "sliding_attention"}

WORTH = 0.9
"""Largest cost of packed rows, as a share of the padded ones, for which they are packed."""

TOLERANCE = 1e-4, 2e-2
"""Nats per token by which packed and padded log-probs may differ, in float32 and in lower precision, beside eight
times the difference that batching makes. Architectures that packing does not fit are off by 0.09 nats and more."""

PADDING = 64
"""Columns before the prompt of a comparison, so that positions that a model counts by itself differ from columns."""

LogProbs = Callable[[Tensor, Tensor, int], Tensor]


class SharedPrompts:
    """Log-probs of rows with equal prompts, each prompt computed once.

    Args:
        accelerator: Of the trainer.
        model: The policy, as accelerate has prepared it.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator = accelerator
        self.config = accelerator.unwrap_model(model).config.get_text_config()
        fits = self._misfit() is None
        self.overhead = _overhead(accelerator.unwrap_model(model), self.config) if fits else math.nan
        self.length_dependent = length_dependent(self.config) or (sys.maxsize, "")
        self.serves: bool | None = None  # `None` before `check`
        self.checked = 0  # tokens of context that `check` has compared
        self._announced = self._told_width = False

    def check(self, model: nn.Module, log_probs: LogProbs, batch: Batch) -> None:
        """Compare packed with padded log-probs, for the first batch and the first with rows longer than a window.

        Falls back to padded rows, with a warning, where they differ. A call for all processes together.

        Args:
            model: the policy.
            log_probs: TRL's method, from input ids, attention mask and the number of completion columns.
            batch: of this process, text alone.
        """
        window = getattr(self.config, "sliding_window", None) or math.inf
        tokens, kind = self.length_dependent
        is_wide = padded_size(batch) >= tokens * len(batch["prompt_ids"])
        if is_wide and self.serves is not False and not self._told_width:
            self._told_width = True
            logger.warning(
                f"Prompts are computed once per completion in rows of {tokens} columns or more, with their padding: "
                f"there the width decides on rotary embeddings of {type(self.config).__name__} (rope_type={kind!r})."
            )
        if self.serves is False or (self.serves and (window == math.inf or self.checked > window)):
            return
        ids, mask, columns = whole_rows(batch)
        input_ids, attention_mask, width = self._longest_rows(ids, _filled(mask), columns)
        lengths = attention_mask.sum(dim=1) * attention_mask[:, -width:].any(dim=1) * (not is_wide)
        longest = int(self.accelerator.gather(lengths).max()) - 1  # the last token is predicted, and not attended to
        if longest < 0 or (self.serves and longest <= window):
            return
        reason = self._misfit() or self._difference(model, log_probs, input_ids, attention_mask, width)
        if self.accelerator.gather(torch.tensor([reason is not None], device=input_ids.device)).any():
            self.serves = False
            name = type(self.accelerator.unwrap_model(model)).__name__
            logger.warning(
                f"Prompts are computed once per completion, not once per group: {name}, "
                f"{reason or 'another process has found a difference'}. snr_share_prompts=False says so beforehand."
            )
        else:
            self.serves, self.checked = True, longest

    def announce(self, batches: list[Batch]) -> None:
        """Say once what sharing saves on these micro-batches of this process."""
        if not self.serves or self._announced:
            return
        self._announced = True
        rows = [whole_rows(batch) for batch in batches]
        costs = [(self._cost(*ids.shape), self._layout(ids, mask, width)) for ids, mask, width in rows]
        padded = sum(cost for cost, _ in costs)
        packed = sum(cost if layout is None else layout.cost for cost, layout in costs)
        logger.warning(
            f"Prompts are computed once per group: by arithmetic the update of this generation costs "
            f"{packed / padded:.2f} of its padded rows. snr_share_prompts=False computes them once per completion."
        )

    def positions(self, batch: Batch) -> int:
        """Positions that a forward pass over the batch computes."""
        layout = self._layout(*whole_rows(batch)) if self.serves else None
        return padded_size(batch) if layout is None else layout.positions

    def __call__(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None] | None:
        """Log-probs and entropies in nats of the completions, (rows, T) each, 0 at padding.

        `None` where padded rows cost as much, or for a model that packing does not fit; and for entropies where TRL
        computes none.

        Args:
            model: with TRL's fused head.
            input_ids: (rows, P + T), prompts padded on the left and completions on the right.
            attention_mask: (rows, P + T).
            width: T.
        """
        layout = self._layout(input_ids, attention_mask, width) if self.serves else None
        return None if layout is None else self._packed(model, input_ids, width, layout)

    # Packing

    def _cost(self, rows: int, length: int) -> float:
        return rows * length * (self.overhead + length)

    def _layout(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> "Layout | None":
        """The cheapest packing of the rows; `None` where padded rows cost about as much, or masks have holes, or the
        padded width decides on rotary frequencies."""
        if input_ids.size(1) >= self.length_dependent[0]:
            return None
        before = input_ids.size(1) - width
        batch = {"prompt_ids": input_ids[:, :before], "prompt_mask": attention_mask[:, :before]}
        groups, prompts = zip(*prompts_of(batch), strict=True)
        holes = (_filled(attention_mask) != attention_mask).any(dim=1)
        lengths = attention_mask[:, before:].sum(dim=1).masked_fill(holes, -1).tolist()
        if min(prompts) == 0 or min(lengths) < 0:  # the first token has nothing to be predicted from, or a hole
            return None
        layout = cheapest_layout(prompts, lengths, groups, self._cost)
        return layout if layout.cost < WORTH * self._cost(*input_ids.shape) else None

    def _packed(
        self, model: nn.Module, input_ids: Tensor, width: int, layout: "Layout"
    ) -> tuple[Tensor, Tensor | None]:
        packed = pack(input_ids, width, layout)
        with self.accelerator.autocast():
            outputs = model(
                input_ids=packed.ids,
                attention_mask=self._masks(model, packed.segments, packed.positions),
                position_ids=packed.positions,
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        part, place, row, column = packed.scored

        def by_row(values: Tensor) -> Tensor:
            return values.new_zeros(len(input_ids), width).index_put((row, column), values[part, place])

        return by_row(outputs.log_probs), None if outputs.entropy is None else by_row(outputs.entropy)

    def _masks(self, model: nn.Module, segments: Tensor, positions: Tensor) -> Any:
        """What the model takes as its attention mask: one, or one for each type of layer."""
        from transformers.masking_utils import create_causal_mask  # an import of seconds

        dtype = next(self.accelerator.unwrap_model(model).parameters()).dtype
        embeddings = torch.empty(*segments.shape, 1, dtype=dtype, device=segments.device)

        def mask(window: int | None) -> Any:
            def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                seen = (segments[batch, key] == segments[batch, query]) | (segments[batch, key] == 0)
                if window is None:
                    return seen
                return seen & (positions[batch, query] - positions[batch, key] < window)

            return create_causal_mask(self.config, embeddings, None, None, and_mask_function=allowed)

        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if kinds:
            return {kind: mask(window if kind == "sliding_attention" else None) for kind in kinds | {"full_attention"}}
        return mask(window)

    # Whether packing fits a model

    def _misfit(self) -> str | None:
        """Why the settings of a model rule packing out."""
        if not isinstance(getattr(self.config, "num_attention_heads", None), int):
            return "it has no attention heads"
        attention = self.config._attn_implementation
        if attention not in ATTENTION:
            return f"attn_implementation={attention!r} takes no mask; allowed: {', '.join(ATTENTION)}"
        others = set(getattr(self.config, "layer_types", None) or ()) - LAYERS
        return f"its layers of {', '.join(sorted(others))}" if others else None

    def _longest_rows(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Tensor, Tensor, int]:
        """The two longest completions, both with the prompt of the longest row, which padding moves."""
        longest = attention_mask[:, -width:].sum(dim=1).argsort(descending=True)[[0, min(1, len(input_ids) - 1)]]
        prompt = attention_mask.sum(dim=1).argmax().expand(2)
        most = min(getattr(self.config, "max_position_embeddings", None) or sys.maxsize, self.length_dependent[0] - 1)
        room = most - input_ids.size(1)
        ids, mask = (
            pad(torch.cat([rows[prompt, :-width], rows[longest, -width:]], dim=1), (max(0, min(PADDING, room)), 0))
            for rows in (input_ids, attention_mask)
        )
        return ids, mask, width

    def _difference(self, model: nn.Module, log_probs: LogProbs, ids: Tensor, mask: Tensor, width: int) -> str | None:
        """Why packing two completions of one prompt gives other log-probs."""
        before = ids.size(1) - width
        prompts, lengths = mask[:, :before].sum(dim=1).tolist(), mask[:, before:].sum(dim=1).tolist()
        with torch.no_grad(), _without_dropout(model):
            padded = log_probs(ids, mask, width)
            alone = torch.cat([log_probs(ids[row : row + 1], mask[row : row + 1], width) for row in range(2)])
            try:
                packed = self._packed(model, ids, width, Layout([[0, 1]], prompts, lengths, 0.0))[0]
            except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        tokens = max(1, sum(lengths))
        shown = mask[:, before:].bool()

        def apart(values: Tensor) -> float:
            return ((padded - values).float().abs() * shown).sum().item() / float(tokens)

        exact = padded.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        exact &= next(model.parameters()).dtype == torch.float32
        difference, noise = apart(packed), apart(alone)
        # Of rows so long that others are padded, another process may compare shorter ones.
        if difference <= TOLERANCE[not exact] + 8 * noise or ids.size(1) >= self.length_dependent[0]:
            return None
        return f"whose log-probs would differ by {difference:.2g} nats a token, and by {noise:.1g} from batching"


def _filled(mask: Tensor) -> Tensor:
    """Masks that are 1 from the first to the last token of each row, (rows, columns).

    >>> _filled(torch.tensor([[0, 1, 0, 1, 0]])).tolist()
    [[0, 1, 1, 1, 0]]
    """
    return mask.cummax(dim=1).values * mask.flip(1).cummax(dim=1).values.flip(1)


class Layout(NamedTuple):
    """Rows as packed rows.

    Args:
        parts: numbers of the rows in each packed row, all with the same prompt.
        prompts: tokens of each row's prompt.
        lengths: tokens of each row's completion.
        cost: of a forward pass.
    """

    parts: list[list[int]]
    prompts: Sequence[int]
    lengths: Sequence[int]
    cost: float

    def size(self, part: list[int]) -> int:
        """Tokens of a packed row."""
        return self.prompts[part[0]] - 1 + sum(self.lengths[row] for row in part)

    @property
    def positions(self) -> int:
        """Positions of all packed rows, padding included."""
        return len(self.parts) * max(map(self.size, self.parts))


class Packed(NamedTuple):
    """Packed rows, as long as the longest of them.

    Args:
        ids: (parts, L) tokens.
        positions: (parts, L) columns of the padded rows.
        segments: (parts, L), 0 for the prompt, 1 and up for completions, -1 for padding.
        labels: (parts, L) the token that each position predicts, -100 for none.
        scored: (4, tokens): packed row and place of each prediction, and row and completion column of its token.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    labels: Tensor
    scored: Tensor


def pack(input_ids: Tensor, width: int, layout: Layout) -> Packed:
    """Padded rows (rows, P + T) as packed rows."""
    before = input_ids.size(1) - width
    parts, scored = [], []
    for number, part in enumerate(layout.parts):
        # The prompt without its last token, then for each completion the columns that predict its tokens.
        spans = [(part[0], before - layout.prompts[part[0]], before - 1)]
        spans += [(row, before - 1, before - 1 + layout.lengths[row]) for row in part]
        place, segments = 0, []
        for segment, (row, start, stop) in enumerate(spans):
            columns = torch.arange(start, stop)
            segments.append(torch.stack([torch.full_like(columns, row), columns, torch.full_like(columns, segment)]))
            if segment > 0:
                places = torch.arange(place, place + len(columns))
                of_part, of_row = torch.full_like(places, number), torch.full_like(places, row)
                scored.append(torch.stack([of_part, places, of_row, columns - before + 1]))
            place += len(columns)
        parts.append(torch.cat(segments, dim=1))
    longest = max(part.size(1) for part in parts)
    fill = torch.tensor([0, 0, -1]).unsqueeze(1)
    filled = [torch.cat([part, fill.expand(3, longest - part.size(1))], dim=1) for part in parts]
    row, column, segment = torch.stack(filled, dim=1).to(input_ids.device)
    labels = input_ids[row, (column + 1).clamp(max=input_ids.size(1) - 1)].masked_fill(segment < 1, -100)
    return Packed(input_ids[row, column], column, segment, labels, torch.cat(scored, dim=1).to(input_ids.device))


def cheapest_layout(
    prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[int], cost: Callable[[int, int], float]
) -> Layout:
    """Whole groups as packed rows, or smaller parts of equal size, whichever costs least.

    Args:
        prompts, lengths: tokens of the prompt and the completion of each row.
        groups: number of each row's prompt.
        cost: from the number of packed rows and their padded length.

    >>> cheapest_layout([9, 9, 9, 9], [1, 2, 3, 4], [0, 0, 0, 0], lambda rows, length: rows * length).parts
    [[3, 2, 1, 0]]
    >>> cheapest_layout([2, 2, 2, 2], [9, 9, 9, 9], [0, 0, 0, 0], lambda rows, length: rows * length**2).parts
    [[0], [1], [2], [3]]
    """
    members: dict[int, list[int]] = {}
    for row in sorted(range(len(groups)), key=lambda row: -lengths[row]):
        members.setdefault(groups[row], []).append(row)
    layouts = []
    for most in range(1, max(map(len, members.values())) + 1):
        parts = []
        for group in members.values():
            number = -(-len(group) // most)
            parts += [group[start::number] for start in range(number)]  # long with short ones
        layout = Layout(parts, prompts, lengths, 0.0)
        layouts.append(layout._replace(cost=cost(len(parts), max(map(layout.size, parts)))))
    return min(layouts, key=lambda layout: layout.cost)


def _overhead(model: Any, config: Any) -> float:
    """Context length at which attention costs as much as the parameters of a layer: 2 * parameters / (4 * width)."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    weights = [weight for weight in model.parameters() if id(weight) not in embeddings]
    size = sum(int(getattr(weight, "ds_numel", weight.numel())) for weight in weights)  # sharded by ZeRO-3
    heads = int(config.num_attention_heads)
    width = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * size / int(config.num_hidden_layers) / (4 * width)


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
