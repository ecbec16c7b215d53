"""From sampled token ids to turns and their reasoning, without tokenising anything again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"
# White space as vocabularies write it: plain, in byte-level BPE (space, newline, tab, carriage return) and in
# SentencePiece.
_WHITE_SPACE = " \t\r\nĠĊĉč▁"
_WHITE_SPACE_BYTES = {"<0x09>": "\t", "<0x0A>": "\n", "<0x0D>": "\r"}  # what SentencePiece spells in bytes


@dataclass(frozen=True)
class Turn:
    """One turn of a model, as the very ids that were sampled.

    Args:
        context: Everything before the turn: the prompt, earlier turns and what the environment answered.
        lead_in: The turn's own ids before its reasoning, such as an opening tag.
        reasoning: Z: the ids between the tags, white space at either end left out. Empty where there is none.
        valid: Whether the reasoning is non-empty and closed by a tag.
        earlier: (first, last + 1) places in the context that the model wrote in earlier turns, special ids at the end
            of a turn left out: whether the model or the template ends a turn is no difference.
        rest: What follows the reasoning in the turn, special ids at its end left out.
    """

    context: tuple[int, ...]
    lead_in: tuple[int, ...]
    reasoning: tuple[int, ...]
    valid: bool
    earlier: tuple[tuple[int, int], ...] = ()
    rest: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[int, ...]:
        """All that the model wrote in the turn, special ids at its end left out."""
        return self.lead_in + self.reasoning + self.rest

    @property
    def context_without_own_words(self) -> tuple[int, ...]:
        """The context with nothing in place of what the model itself wrote in earlier turns."""
        kept: list[int] = []
        start = 0
        for first, end in self.earlier:
            kept += self.context[start:first]
            start = end
        return (*kept, *self.context[start:])


def find_turns(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    tool_mask: Sequence[int] | None = None,
    earlier: Sequence[tuple[int, int]] = (),
) -> list[Turn]:
    """Turns of one completion and the reasoning in each.

    A turn is a run of ids that the model wrote. Its reasoning is what stands between the first `<think>` and the next
    `</think>`. The opening tag may also end what comes before the turn (many templates force it) or be missing. A turn
    that is cut off reasons up to its end. A turn without tags is all reasoning. Where `<answer>` ends what comes
    before, the turn is to have no reasoning, and what stands before `</answer>` takes its place. Tokens count whole:
    one that holds part of a tag belongs to the tag.

    Args:
        prompt_ids: Ids of the prompt, without padding.
        completion_ids: Ids of the completion, without padding.
        tokenizer: Names the ids; decides what is special and therefore never reasoning at the end of a turn.
        tool_mask: For each id of the completion, 1 where the model wrote it and 0 elsewhere (TRL's `tool_mask`, which
            a `rollout_func` gives as `env_mask`). Default: the model wrote all of it.
        earlier: (first, last + 1) places in the prompt that the model wrote, in turns before these.
    """
    if tool_mask is None:
        tool_mask = [1] * len(completion_ids)
    if len(tool_mask) != len(completion_ids):
        raise ValueError(f"tool_mask must have one value for each of {len(completion_ids)} ids, got {len(tool_mask)}")
    ids, special = [*prompt_ids, *completion_ids], set(tokenizer.all_special_ids)
    turns: list[Turn] = []
    own_words = tuple((first, _end_of_words(ids, first, end, special)) for first, end in earlier)
    start = len(prompt_ids)
    for written_by_model, run in groupby(tool_mask, key=bool):
        end = start + len(list(run))
        if written_by_model:
            turns.append(replace(_read_turn(ids, start, end, tokenizer, special), earlier=own_words))
            own_words = (*own_words, (start, _end_of_words(ids, start, end, special)))
        start = end
    return turns


def _end_of_words(ids: Sequence[int], first: int, end: int, special: set[int]) -> int:
    """Where a turn ends without the special ids that close it."""
    while end > first and ids[end - 1] in special:
        end -= 1
    return end


class Trajectories:
    """Turns of many completions, each completion read when it is asked for, and once.

    Args:
        prompt_ids: For each completion the ids of its prompt, without padding.
        completion_ids: Their ids, without padding.
        tokenizer: See `find_turns`.
        tool_masks: For each completion its `tool_mask`, see `find_turns`. Default: the model wrote all of it.
        turn_samples: For each completion its further samples, whose turns had contexts of their own: mappings with
            `prompt_ids`, `completion_ids`, `env_mask` and `earlier`, see `find_turns`. Default: none.
    """

    def __init__(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        tokenizer: "PreTrainedTokenizerBase",
        tool_masks: Sequence[Sequence[int] | None] | None = None,
        turn_samples: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ):
        self.prompt_ids = prompt_ids
        self.completion_ids = completion_ids
        self.tokenizer = tokenizer
        self.tool_masks = tool_masks or [None] * len(prompt_ids)
        self.turn_samples = turn_samples or [()] * len(prompt_ids)
        self._read: dict[int, list[Turn]] = {}

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def __getitem__(self, number: int) -> list[Turn]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        if number not in self._read:
            prompt, completion, mask = self.prompt_ids[number], self.completion_ids[number], self.tool_masks[number]
            turns = find_turns(prompt, completion, self.tokenizer, mask)
            for sample in self.turn_samples[number]:
                ids = (sample["prompt_ids"], sample["completion_ids"])
                turns += find_turns(*ids, self.tokenizer, sample["env_mask"], sample["earlier"])
            self._read[number] = turns
        return self._read[number]

    def num_turns(self, number: int) -> int:
        """Turns of a completion, without reading it."""
        masks = [self.tool_masks[number], *(sample["env_mask"] for sample in self.turn_samples[number])]
        if masks[0] is None:
            masks[0] = [1] * len(self.completion_ids[number])
        return sum(written_by_model for mask in masks for written_by_model, _ in groupby(mask, key=bool))

    def first_context(self, number: int) -> tuple[int, ...]:
        """The context of a completion's first turn, without reading it."""
        mask = self.tool_masks[number]
        before = [] if mask is None else self.completion_ids[number][: list(map(bool, mask)).index(True)]
        return (*self.prompt_ids[number], *before)


def _read_turn(ids: list[int], start: int, end: int, tokenizer: "PreTrainedTokenizerBase", special: set[int]) -> Turn:
    # Pieces as the vocabulary spells them: tags are ASCII, which every spelling keeps.
    pieces = _pieces(ids[start:end], tokenizer)
    while pieces and ids[start + len(pieces) - 1] in special and pieces[-1] not in (CLOSE_TAG, CLOSE_ANSWER):
        pieces.pop()
    text = "".join(pieces)
    opened = text.find(OPEN_TAG)
    # A tag may be split over as many tokens as it has letters, and white space may follow it.
    before = "".join(_pieces(ids[max(0, start - 2 * len(OPEN_ANSWER)) : start], tokenizer)).rstrip(_WHITE_SPACE)
    forced = before.endswith((OPEN_TAG, OPEN_ANSWER))
    first = 0 if forced or opened < 0 else opened + len(OPEN_TAG)
    close = text.find(CLOSE_ANSWER if before.endswith(OPEN_ANSWER) else CLOSE_TAG, first)
    last = len(text) if close < 0 else close

    ends = list(accumulate(len(piece) for piece in pieces))
    inside = [
        number
        for number, (piece, piece_end) in enumerate(zip(pieces, ends, strict=True))
        if piece_end - len(piece) >= first and piece_end <= last and piece.strip(_WHITE_SPACE)
    ]
    context, words = tuple(ids[:start]), tuple(ids[start : start + len(pieces)])
    if not inside:
        return Turn(context, (), (), valid=False, rest=words)
    low, high = inside[0], inside[-1] + 1
    return Turn(context, words[:low], words[low:high], valid=close >= 0, rest=words[high:])


def _pieces(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(ids)]  # None for ids beyond the vocabulary
    return [_WHITE_SPACE_BYTES.get(piece, piece) for piece in pieces]
