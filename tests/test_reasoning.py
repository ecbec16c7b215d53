"""Turns and their reasoning: what is scored are the very ids that were sampled, however tags are tokenised."""

import functools
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragen2_trl.instrument.reasoning import Trajectories, Turn, find_turns
from ragen2_trl.tiny.build import build_tokenizer

END = "<|im_end|>"
WHITE_SPACE = " \n\t\r"
FORCED = "<|im_start|>assistant\n<think>\n"
UNFORCED = "<|im_start|>assistant\n"


def bytes_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Every byte is a token, and so is each of the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=END)


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    if kind == "whole tags":
        return build_tokenizer()
    if kind == "split tags":
        return bytes_tokenizer()
    # As in real vocabularies, where `>` and a newline, or a full stop and `</`, are one token.
    return bytes_tokenizer((">", "Ċ"), ("<", "/"), (".", "</"), (">", "</"))


KINDS = ["whole tags", "split tags", "tags merged with text"]
every_tokenizer = pytest.mark.parametrize("kind", KINDS)


def encode(text: str, kind: str) -> list[int]:
    return tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"]


def read(prompt: str, completion: str, kind: str) -> Turn:
    """The only turn, which must consist of ids as they were given."""
    prompt_ids, completion_ids = encode(prompt, kind), encode(completion, kind)
    (turn,) = find_turns(prompt_ids, completion_ids, tokenizer_of(kind))
    assert turn.context == tuple(prompt_ids)
    assert_prefix(turn, prompt_ids + completion_ids)
    return turn


def assert_prefix(turn: Turn, ids: list[int]) -> None:
    assert (
        list(turn.context + turn.lead_in + turn.reasoning)
        == ids[: len(turn.context + turn.lead_in) + len(turn.reasoning)]
    )


def text_of(ids: tuple[int, ...], kind: str) -> str:
    return tokenizer_of(kind).decode(ids)


def test_tokenizers_split_and_merge_tags_as_their_names_say():
    assert len(encode("<think>", "whole tags")) == 1
    assert len(encode("<think>", "split tags")) == len("<think>")
    merged = tokenizer_of("tags merged with text")
    assert {">Ċ", ".</"} <= set(merged.convert_ids_to_tokens(encode("<think>\nGo.</think>", "tags merged with text")))


GO = "I go right"
# A prompt, what the model writes, and of that the lead-in, the reasoning, and whether it is valid.
READ = {
    "between the tags": (UNFORCED, f"<think>{GO}</think><answer>Right</answer>{END}", "<think>", GO, True),
    "text before the opening tag": (UNFORCED, f"Sure <think>{GO}</think> Right{END}", "Sure <think>", GO, True),
    "the opening tag ends the prompt": (FORCED, f"{GO}</think> Right{END}", "", GO, True),
    "it does so without a line break": (FORCED.rstrip(), f"{GO}</think> Right{END}", "", GO, True),
    "or with white space": (FORCED + "\n \t\n", f"{GO}</think> Right{END}", "", GO, True),
    "a second opening tag after a forced one": (
        *(FORCED, f"I <think> go right</think> Right <think>{END}", "", "I <think> go right", True),
    ),
    "an example in the prompt opens nothing": (
        f"Answer as <think>I go down</think> Down\n{UNFORCED}",
        *(f"Well <think>{GO}</think> Right{END}", "Well <think>", GO, True),
    ),
    "no opening tag": (UNFORCED, f"{GO}</think> Right{END}", "", GO, True),
    "no tags": (UNFORCED, f"{GO}{END}", "", GO, False),
    "only the first pair": (
        *(UNFORCED, f"<think>{GO}</think> Right <think>I go down</think> Down{END}", "<think>", GO, True),
    ),
    "a closing tag before the opening one": (
        *(UNFORCED, f"</think> Right <think>I go down</think> Down{END}", "</think> Right <think>", "I go down", True),
    ),
    "white space at either end": (
        *(UNFORCED, f"<think>\n \tI go\n right\r\n \n</think>\nRight{END}", "<think>\n \t", "I go\n right", True),
    ),
    "letters of several bytes": (UNFORCED, f"<think>é 東 ok</think>{END}", "<think>", "é 東 ok", True),
    "special tokens within": (UNFORCED, f"<think>I{END}go</think>{END}", "<think>", f"I{END}go", True),
    **{
        f"cut off, forced {forced}, ends {ending!r}": (
            *(FORCED if forced else UNFORCED, f"{'' if forced else '<think>'}{GO}{ending}"),
            *("" if forced else "<think>", GO, False),
        )
        for forced in (True, False)
        for ending in ("", END, END + "<pad><pad>")
    },
    **{
        f"empty, forced {forced}, inside {inside!r}": (
            *(
                FORCED if forced else UNFORCED,
                f"{'' if forced else '<think>'}{inside}</think><answer>Right</answer>{END}",
            ),
            *(None, "", False),
        )
        for forced in (True, False)
        for inside in ("", " ", "\n\n", " \n\t ")
    },
}


@every_tokenizer
@pytest.mark.parametrize(("prompt", "completion", "lead_in", "reasoning", "valid"), READ.values(), ids=READ)
def test_reasoning_is_what_stands_between_the_tags(kind: str, prompt, completion, lead_in, reasoning, valid):
    turn = read(prompt, completion, kind)
    assert (text_of(turn.reasoning, kind), turn.valid) == (reasoning, valid)
    assert lead_in is None or text_of(turn.lead_in, kind) == lead_in


@every_tokenizer
@pytest.mark.parametrize("completion", ["", END, "<think>", "</think>", f"<think>{END}", "\n"])
def test_a_turn_without_reasoning_is_not_an_error(kind: str, completion: str):
    if completion:
        turn = read(UNFORCED, completion, kind)
        assert (turn.reasoning, turn.valid) == ((), False)
    else:
        assert find_turns(encode(UNFORCED, kind), [], tokenizer_of(kind)) == []


def test_a_token_that_holds_part_of_a_tag_belongs_to_the_tag():
    kind = "tags merged with text"
    turn = read(UNFORCED, f"<think>\nI go. Right.</think>{END}", kind)
    assert text_of(turn.lead_in, kind) == "<think>\n"
    assert text_of(turn.reasoning, kind) == "I go. Right"
    assert turn.valid
    empty = read(UNFORCED, f"<think></think>{END}", kind)
    assert empty == Turn(turn.context, (), (), valid=False, rest=empty.rest)
    assert [text_of(one.words, kind) for one in (turn, empty)] == ["<think>\nI go. Right.</think>", "<think></think>"]


def test_a_closing_tag_that_is_special_still_closes():
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = tokenizer("<think>I go right</think>")["input_ids"]
    (turn,) = find_turns(tokenizer("Go")["input_ids"], ids, tokenizer)
    assert (tokenizer.decode(turn.reasoning), turn.valid) == ("I go right", True)


@every_tokenizer
def test_each_run_of_the_models_own_ids_is_a_turn(kind: str):
    prompt = encode("Where is the goal\n" + UNFORCED, kind)
    written = [f"<think>I go right</think> Right{END}", f"Down</think> Down{END}", "up"]
    answered = ["\nYou moved right\n" + FORCED, "\nYou moved down\n" + UNFORCED, ""]
    completion, mask, contexts = [], [], []
    for own, other in zip(written, answered, strict=True):
        contexts.append(tuple(prompt + completion))
        completion += encode(own, kind) + encode(other, kind)
        mask += [1] * len(encode(own, kind)) + [0] * len(encode(other, kind))
    turns = find_turns(prompt, completion, tokenizer_of(kind), mask)
    assert [turn.context for turn in turns] == contexts
    assert [text_of(turn.reasoning, kind) for turn in turns] == ["I go right", "Down", "up"]
    assert [text_of(turn.lead_in, kind) for turn in turns] == ["<think>", "", ""]
    assert [turn.valid for turn in turns] == [True, True, False]


@every_tokenizer
def test_what_the_environment_wrote_is_never_reasoning(kind: str):
    parts = [("<think>I go", 1), (" the goal is down</think>", 0), (" right", 1)]
    ids = [encode(text, kind) for text, _ in parts]
    mask = [own for part, (_, own) in zip(ids, parts, strict=True) for _ in part]
    turns = find_turns(encode(UNFORCED, kind), list(chain(*ids)), tokenizer_of(kind), mask)
    assert [text_of(turn.reasoning, kind).strip() for turn in turns] == ["I go", "right"]
    assert [turn.valid for turn in turns] == [False, False]


@pytest.mark.parametrize(("mask", "contexts"), [([0, 0, 0], []), ([0, 1, 1], [3]), ([1, 0, 1], [2, 4])])
def test_turns_start_where_the_model_starts_to_write(mask, contexts):
    turns = find_turns([7, 8], [9, 10, 11], tokenizer_of("split tags"), mask)
    assert [len(turn.context) for turn in turns] == contexts


@pytest.mark.parametrize("mask", [[], [1, 1], [1, 1, 1, 1]])
def test_a_mask_of_another_length_is_an_error(mask):
    with pytest.raises(ValueError, match=f"tool_mask .* 3 ids, got {len(mask)}"):
        find_turns([7, 8], [9, 10, 11], tokenizer_of("split tags"), mask)


@every_tokenizer
def test_ids_beyond_the_vocabulary_are_text_without_letters(kind: str):
    beyond = len(tokenizer_of(kind)) + 5
    ids = [*encode("<think>I", kind), beyond, *encode("go</think>", kind), beyond]
    (turn,) = find_turns([beyond], ids, tokenizer_of(kind))
    assert turn.reasoning == (*encode("I", kind), beyond, *encode("go", kind))
    assert turn.valid


@st.composite
def rollouts(draw):
    """Random ids of a vocabulary and a little beyond it, with many tags among them."""
    kind = draw(st.sampled_from(KINDS))
    pieces = st.sampled_from(["<think>", "</think>", "\n", " ", "I go", ".", END, "<pad>", "<", ">", "think", "/"])
    anything = st.integers(0, len(tokenizer_of(kind)) + 9).map(lambda token: [token])
    ids = st.lists(pieces.map(lambda text: encode(text, kind)) | anything, max_size=14).map(
        lambda parts: list(chain(*parts))
    )
    completion = draw(ids)
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)))
    return kind, draw(ids), completion, mask


@given(rollouts())
def test_reasoning_is_always_a_slice_of_what_the_model_wrote(rollout):
    kind, prompt, completion, mask = rollout
    ids, written = prompt + completion, [False] * len(prompt) + (mask or [True] * len(completion))
    turns = find_turns(prompt, completion, tokenizer_of(kind), mask)
    starts = [i for i in range(len(prompt), len(ids)) if written[i] and (i == len(prompt) or not written[i - 1])]
    assert [len(turn.context) for turn in turns] == starts
    for turn in turns:
        assert_prefix(turn, ids)
        low = len(turn.context)
        assert all(written[low : low + len(turn.lead_in) + len(turn.reasoning)])
        spelled = [token or "" for token in tokenizer_of(kind).convert_ids_to_tokens(list(turn.reasoning))]
        assert "</think>" not in "".join(spelled)
        assert not turn.valid or spelled
        for end in (*spelled[:1], *spelled[-1:]):
            assert end.strip("ĠĊĉč" + WHITE_SPACE)


@given(rollouts())
def test_turns_are_counted_and_the_first_context_is_known_without_reading(rollout):
    kind, prompt, completion, mask = rollout
    trajectories = Trajectories([prompt], [completion], tokenizer_of(kind), [mask])
    turns = find_turns(prompt, completion, tokenizer_of(kind), mask)
    assert len(turns) == trajectories.num_turns(0)
    assert all(trajectories.first_context(0) == turn.context for turn in turns[:1])
    assert turns == trajectories[0]


texts = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "b c", "<", ">", "</"]), max_size=8).map(
    "".join
)


@given(st.sampled_from([UNFORCED, FORCED, "<think>a</think>"]), texts, st.sampled_from(["", END, END + END]))
def test_reasoning_is_what_a_search_in_the_text_finds(prompt, completion, ending):
    reasoning = completion
    if prompt != FORCED and "<think>" in completion:
        reasoning = reasoning.partition("<think>")[2]
    reasoning, closing_tag, _ = reasoning.partition("</think>")
    reasoning = reasoning.strip(WHITE_SPACE)
    for turn in find_turns(
        encode(prompt, "split tags"), encode(completion + ending, "split tags"), tokenizer_of("split tags")
    ):
        assert text_of(turn.reasoning, "split tags") == reasoning
        assert turn.valid == bool(closing_tag and reasoning)
