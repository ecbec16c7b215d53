"""Whether answers use their prompt and their reasoning: exact on policies that are tables, and found in the ids."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_models import random_ids, run_in_full, shared_model
from torch import nn
from transformers import AutoTokenizer

from ragen2_trl.instrument import answers
from ragen2_trl.instrument.answers import (
    MIN_ROWS,
    AnswerEvidence,
    find_answer,
    measure_answers,
    swap_bits,
    win_rates,
)
from ragen2_trl.instrument.diagnosis import NotMeasurableError, Sampling
from ragen2_trl.instrument.findings import answer_findings
from ragen2_trl.instrument.reasoning import Trajectories, Turn, find_turns
from ragen2_trl.instrument.scoring import count_tokens
from ragen2_trl.tiny import TINY_MODEL_PATH

# Policies that are tables: what a model of few words says, with exact probabilities.
# A prompt is one word, and a completion `<think>` thought `</think><answer>` answer `</answer>`, each of one word.
SIZE = 8  # prompts, thoughts, answers
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<end>")
WORDS = [f"{kind}{number} " for kind in "xza" for number in range(SIZE)] + list(TAGS)
THINK, END_THINK, ANSWER, END_ANSWER, END = range(3 * SIZE, 3 * SIZE + len(TAGS))
IMPOSSIBLE = -60.0  # nats


class Words:
    """A tokenizer."""

    all_special_ids = (END,)

    def convert_ids_to_tokens(self, ids):
        return [WORDS[number] for number in ids]

    def decode(self, ids, **kwargs):
        return "".join(self.convert_ids_to_tokens(ids))


class Tabular(nn.Module):
    """p(z | x) of (x, z) and p(a | x, z) of (x, z, a)."""

    def __init__(self, thoughts, answers):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=len(WORDS), get_text_config=lambda: self.config)
        self.thoughts, self.answers = torch.as_tensor(thoughts).double(), torch.as_tensor(answers).double()

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, **kwargs):
        logits = torch.full((*input_ids.shape, len(WORDS)), IMPOSSIBLE)
        for row, ids in enumerate(input_ids.tolist()):
            prompt = thought = 0
            for place, number in enumerate(ids):
                if number < SIZE:
                    prompt = number
                elif number < 2 * SIZE:
                    thought = number - SIZE
                logits[row, place] = self.next_word(number, prompt, thought)
        return SimpleNamespace(logits=logits)

    def next_word(self, number, prompt, thought):
        logits = torch.full((len(WORDS),), IMPOSSIBLE)
        if number == THINK:
            logits[SIZE : 2 * SIZE] = self.thoughts[prompt].log().clamp(min=IMPOSSIBLE)
        elif number == ANSWER:
            logits[2 * SIZE : 3 * SIZE] = self.answers[prompt, thought].log().clamp(min=IMPOSSIBLE)
        else:
            following = {END_THINK: ANSWER, END_ANSWER: END}
            logits[
                following.get(number, THINK if number < SIZE else END_THINK if number < 2 * SIZE else END_ANSWER)
            ] = 0
        return logits

    def sampled(self, samples, seed=0):
        """Trajectories of `samples` completions of each prompt, and their groups."""
        rng, prompts, completions = random.Random(seed), [], []
        for prompt in range(SIZE):
            for _ in range(samples):
                thought = rng.choices(range(SIZE), self.thoughts[prompt].tolist())[0]
                answer = rng.choices(range(SIZE), self.answers[prompt, thought].tolist())[0]
                prompts.append([prompt])
                completions.append([THINK, SIZE + thought, END_THINK, ANSWER, 2 * SIZE + answer, END_ANSWER, END])
        return Trajectories(prompts, completions, Words()), [number // samples for number in range(len(prompts))]


OWN, ANY = torch.eye(SIZE), torch.full((SIZE, SIZE), 1 / SIZE)
FEW = torch.tensor([0.5, 0.5] + [0.0] * (SIZE - 2)).expand(SIZE, SIZE)  # two words, whatever the prompt
FROM_PROMPT = OWN[:, None, :].expand(SIZE, SIZE, SIZE)  # a = x
FROM_THOUGHT = OWN[None, :, :].expand(SIZE, SIZE, SIZE)  # a = z
FROM_NOTHING = FEW[None].expand(SIZE, SIZE, SIZE)

# By name: p(z | x), p(a | x, z).
POLICIES = {
    "faithful": (OWN, FROM_THOUGHT),
    "harmless template": (FEW, FROM_PROMPT),
    "decorative": (OWN, FROM_PROMPT),
    "collapsed": (FEW, FROM_NOTHING),
    "shuffled": (ANY, FROM_PROMPT),
    "blind": (ANY, FROM_THOUGHT),
}


def measure(name, samples=4, seed=0, **settings):
    policy = Tabular(*POLICIES[name])
    trajectories, groups = policy.sampled(samples, seed)
    return measure_answers(policy, trajectories, groups, torch.Generator().manual_seed(seed), Sampling(**settings))


# Six policies with exact values


@pytest.mark.parametrize(
    ("name", "thought", "in_group", "prompt", "wins"),
    [
        ("faithful", 1.0, 0.0, 0.0, 1.0),  # samples of a prompt reason alike, so that I(A;Z|X) is 0
        ("harmless template", 0.0, 0.0, 1.0, 1.0),
        ("decorative", 0.0, 0.0, 1.0, 1.0),
        ("collapsed", 0.0, 0.0, 0.0, 0.5),
        ("shuffled", 0.0, 0.0, 1.0, 1.0),
    ],
)
def test_tables_have_their_exact_values(name, thought, in_group, prompt, wins):
    metrics = measure(name)
    assert metrics["thought_swap_bits"] == pytest.approx(thought, abs=1e-6)
    assert metrics["thought_swap_in_group_bits"] == pytest.approx(in_group, abs=1e-6)
    assert metrics["prompt_swap_bits"] == pytest.approx(prompt, abs=1e-6)
    assert metrics["prompt_win_rate"] == pytest.approx(wins, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_copied_from_reasoning_that_is_blind_to_its_prompt_wins_by_chance_alone(seed):
    metrics = measure("blind", seed=seed)
    assert metrics["thought_swap_bits"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["prompt_swap_bits"] == pytest.approx(0.0, abs=1e-6)
    # It is 1 bit for each pair of samples that reason differently, and no pair is left out.
    assert metrics["thought_swap_in_group_bits"] == pytest.approx(1 - metrics["same_in_group"], abs=1e-6)
    evidence = AnswerEvidence.of(metrics)
    assert not evidence.uses_prompt and abs(metrics["prompt_win_rate"] - 0.5) < 0.2


def test_without_own_sample_in_the_own_place_a_blind_answer_would_win(monkeypatch):
    """What the second sample is for: with the very reasoning of the answer, copying looks like reading the prompt."""
    rows, policy = answers._rows, Tabular(*POLICIES["blind"])

    def with_own(*arguments):
        found, without = rows(*arguments)
        return [answers._Drawn(row.position, row.answer, row.answer) for row in found], without

    monkeypatch.setattr(answers, "_rows", with_own)
    trajectories, groups = policy.sampled(4)
    metrics = measure_answers(policy, trajectories, groups, torch.Generator().manual_seed(0), Sampling())
    assert metrics["prompt_win_rate"] > 0.9


def test_the_share_of_equal_answers_is_that_of_a_naive_count():
    metrics, (trajectories, groups) = measure("collapsed", samples=2), Tabular(*POLICIES["collapsed"]).sampled(2)
    said = [trajectories[number][0].rest[-2] for number in range(len(groups))]
    across = [said[i] == said[j] for i in range(16) for j in range(16) if groups[i] != groups[j]]
    assert metrics["same_across"] == pytest.approx(sum(across) / len(across))
    assert metrics["same_in_group"] == sum(said[i] == said[i ^ 1] for i in range(16)) / 16
    assert metrics["without_answer"] == 0


def test_donors_differ_in_prompt_and_answer_and_for_thought_swaps_in_reasoning():
    """With donors of the same answer, answers of few words would say less than 1 bit for a faithful model."""
    thoughts, copied = POLICIES["faithful"]
    policy = Tabular(thoughts, copied[:, torch.arange(SIZE) % 2])  # two answers for eight thoughts
    trajectories, groups = policy.sampled(2)
    metrics = measure_answers(policy, trajectories, groups, torch.Generator(), Sampling())
    assert metrics["thought_swap_bits"] == pytest.approx(1.0, abs=1e-6)
    rows, _ = answers._rows(trajectories, groups, torch.Generator(), Sampling(), None)
    for row, places in zip(rows, answers._places(rows, torch.Generator(), Sampling(), None), strict=True):
        own = row.answer
        answer_of = {(one.answer.context, one.answer.thought): one.answer.tokens for one in rows}
        assert len(places["thought"]) == len(places["prompt"]) == len(places["others"]) == answers.NUM_DONORS
        for context, thought, tokens in places["thought"]:
            assert context == own.context and thought != own.thought and tokens == own.tokens
            assert {a for (_, z), a in answer_of.items() if z == thought} != {own.tokens}
        assert all(x != own.context and z == own.thought for x, z, _ in places["prompt"])
        assert all(x != own.context for x, _, _ in places["others"])


def test_reasoning_is_never_swapped_for_the_same_or_for_none():
    trajectories, groups = Tabular(*POLICIES["harmless template"]).sampled(4)  # two thoughts for all prompts
    for number in range(0, len(groups), 5):  # which do not think at all
        trajectories.completion_ids[number][:3] = []
    rows, _ = answers._rows(trajectories, groups, torch.Generator(), Sampling(), None)
    assert min(len(row.answer.thought) for row in rows) == 1  # an opening tag
    for row, places in zip(rows, answers._places(rows, torch.Generator(), Sampling(), None), strict=True):
        assert places["thought"] and all(thought != row.answer.thought for _, thought, _ in places["thought"])


def test_rows_without_donors_drop_out_and_fewer_than_eight_are_not_told():
    policy = Tabular(POLICIES["collapsed"][0], torch.eye(SIZE)[0].expand(SIZE, SIZE, SIZE))  # one answer for all
    trajectories, groups = policy.sampled(4)
    metrics = measure_answers(policy, trajectories, groups, torch.Generator(), Sampling())
    assert metrics["same_across"] == 1
    assert not {"thought_swap_bits", "prompt_swap_bits", "num_swaps"} & metrics.keys()
    assert metrics["prompt_win_rate"] == 0.5  # equal is half a win
    assert names(AnswerEvidence.of(metrics))[0] == "prompt_not_shown"


def test_with_fewer_than_eight_answers_nothing_is_measured():
    policy = Tabular(*POLICIES["faithful"])
    trajectories, groups = policy.sampled(2)
    few, groups = trajectories.completion_ids[: MIN_ROWS - 1], groups[: MIN_ROWS - 1]
    trajectories = Trajectories(trajectories.prompt_ids[: MIN_ROWS - 1], few, trajectories.tokenizer)
    with pytest.raises(NotMeasurableError, match=r"7 turns have an answer \(<answer>.*and 8 are needed"):
        measure_answers(policy, trajectories, groups, torch.Generator(), Sampling())


def test_answers_of_every_group_are_drawn_before_a_second_one_of_any():
    policy = Tabular(*POLICIES["faithful"])
    trajectories, groups = policy.sampled(4)
    rows, _ = answers._rows(trajectories, groups, torch.Generator(), Sampling(num_answers=SIZE), None)
    assert {row.answer.context for row in rows} == {(prompt,) for prompt in range(SIZE)}


def test_donors_are_of_the_same_turn_and_later_turns_have_no_second_sample():
    """Each completion answers twice; the environment says the number of its prompt in between."""
    policy = Tabular(*POLICIES["faithful"])
    once, groups = policy.sampled(4)
    completions = [
        [*ids[:6], prompt[0], *ids[:6]] for ids, prompt in zip(once.completion_ids, once.prompt_ids, strict=True)
    ]
    twice = Trajectories(once.prompt_ids, completions, once.tokenizer, [[1] * 6 + [0] + [1] * 6 for _ in completions])
    rows, _ = answers._rows(twice, groups, torch.Generator().manual_seed(0), Sampling(), None)
    assert {row.position for row in rows} == {0, 1}
    assert all((row.other is None) == (row.position == 1) for row in rows)
    lengths = {0: 1, 1: 8}  # ids before the turn
    for row, places in zip(rows, answers._places(rows, torch.Generator(), Sampling(), None), strict=True):
        assert all(len(x) == lengths[row.position] for found in places.values() for x, _, _ in found)
    metrics = measure_answers(policy, twice, groups, torch.Generator().manual_seed(0), Sampling())
    assert metrics["thought_swap_bits"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["num_compared"] == sum(row.position == 0 for row in rows)


def test_the_same_generator_gives_the_same_numbers_and_no_global_state_moves():
    before = torch.get_rng_state()
    assert measure("blind", seed=1) == measure("blind", seed=1)
    assert measure("blind", seed=1) != measure("blind", seed=2)
    assert torch.equal(torch.get_rng_state(), before)


# Mathematics


def naive_bits(own, swapped):
    bits = [1 - math.log1p(math.exp(other - own)) / math.log(2) for other in swapped]
    return sum(bits) / len(bits)


values = st.floats(-20, 0)


@given(st.lists(st.tuples(values, st.lists(values, min_size=1, max_size=4)), min_size=1, max_size=5))
def test_bits_and_win_rates_are_those_of_a_naive_loop(rows):
    own = torch.tensor([one for one, _ in rows], dtype=torch.float64)
    others = torch.full((len(rows), 4), torch.nan, dtype=torch.float64)
    for row, (_, of_row) in enumerate(rows):
        others[row, : len(of_row)] = torch.tensor(of_row, dtype=torch.float64)
    assert swap_bits(own, others).tolist() == pytest.approx([naive_bits(*row) for row in rows], abs=1e-9)
    wins = [sum((one > other) + (one == other) / 2 for other in of_row) / len(of_row) for one, of_row in rows]
    assert win_rates(own, others).tolist() == pytest.approx(wins, abs=1e-6)


def tables(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1).square()


def normalised(table):
    return table / table.sum(-1, keepdim=True)


@given(st.integers(0, 200))
@settings(max_examples=30, derandomize=True)
def test_the_expected_bits_are_a_divergence_from_0_to_1(seed):
    p, q = normalised((6 * tables(seed, 2, 5)).exp())
    bits = (p * swap_bits(p.log(), q.log()[:, None])).sum()
    divergence = (p * (p / ((p + q) / 2)).log()).sum() / math.log(2)
    assert bits == pytest.approx(divergence.item(), abs=1e-9)
    assert -1e-9 <= bits <= 1


@given(st.integers(0, 200))
@settings(max_examples=30, derandomize=True)
def test_bits_within_a_group_are_at_most_the_conditional_information(seed):
    """Over all pairs of reasoning of one prompt, equal ones included."""
    of_thought, of_answer = normalised((9 * tables(seed, 4)).exp()), normalised((60 * tables(seed + 1, 4, 3)).exp())
    bits = sum(
        of_thought[z] * of_thought[other] * (p * swap_bits(p.log(), of_answer[other].log()[:, None])).sum()
        for z, p in enumerate(of_answer)
        for other in range(4)
    )
    marginal = of_thought @ of_answer
    information = (of_thought[:, None] * of_answer * (of_answer / marginal).log()).sum() / math.log(2)
    assert bits <= information + 1e-9


@pytest.mark.parametrize("long", [False, True], ids=["reasoning once for each answer", "reasoning once for all"])
def test_scores_are_those_of_full_runs(long):
    """Whether reasoning that several answers follow is run with each of them or once for all."""
    model, size = shared_model("llama"), 40 if long else 2
    contexts, thoughts, told = (
        random_ids(20, 9, 11),
        random_ids(size, size + 1, 3, seed=1),
        random_ids(1, 3, 2, seed=2),
    )
    places = {(tuple(x), tuple(z), tuple(a)) for x in contexts for z in thoughts for a in told}
    with count_tokens(model) as counts:
        scores = answers._score(model, places, Sampling(temperature=0.7))
    assert scores.keys() == places
    for context, thought, tokens in places:
        full = run_in_full(model, [context], [thought + tokens], [len(thought)], 0.7).item()
        assert scores[context, thought, tokens] == pytest.approx(full, abs=1e-3)
    if long:
        assert sum(counts) < sum(len(z) + len(a) for _, z, a in places)


def test_a_broken_model_is_an_error_and_no_row_that_drops_out():
    policy = Tabular(*POLICIES["faithful"])
    trajectories, groups = policy.sampled(2)
    policy.answers = policy.answers * torch.nan
    with pytest.raises(ValueError, match="log-probabilities of answers must be finite, got nan"):
        measure_answers(policy, trajectories, groups, torch.Generator(), Sampling())


# Finding the answer

TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)


def found(text, find=None, forced=""):
    context = TOKENIZER(f"<|im_start|>assistant\n{forced}")["input_ids"]
    (turn,) = find_turns(context, TOKENIZER(text)["input_ids"], TOKENIZER)
    answer = find_answer(turn, TOKENIZER, find)
    if answer is None:
        return None
    assert answer.context == tuple(context)
    said = [TOKENIZER.decode(list(ids)) for ids in (answer.thought, answer.tokens)]
    assert "".join(said) == text.removesuffix("<|im_end|>")[: len("".join(said))]
    return said[0].strip(), said[1].strip()


@pytest.mark.parametrize(
    "marked",  # the answer between bars
    [
        "<think>go</think><answer>¦Right || Down</answer>¦<|im_end|>",
        "<think>go <answer>Up</answer></think><answer>¦Left</answer>¦",
        "<think>go</think> so: <answer>Up</answer> or <answer>¦Left</answer>¦.",
        "2 + 2 is \\boxed{4}. So \\boxed{¦\\frac{1}{2}}¦ it is.",
        "so \\boxed{¦4}¦ and \\boxed{5",
        "<think>\\boxed{1}</think> It is \\boxed{¦2}¦.",
        "<think>go</think>\n\n¦It is four.¦\n<|im_end|>",
        'Let me see. <tool_call>¦{"a": 1}</tool_call>¦',
        "<think>go</think><tool_call>¦1</tool_call><tool_call>2</tool_call>¦",
        "<think></think><answer>¦Up</answer>¦",
    ],
)
def test_an_answer_is_found_in_its_turn(marked):
    thought, answer, _ = marked.split("¦")
    assert found(marked.replace("¦", "")) == (thought.strip(), answer)


@pytest.mark.parametrize(
    "text",
    [
        "It is four.",
        "<think>It is \\boxed{4}, no, <answer>Up</answer>",  # cut off while it reasons: see below
        "<think>go</think><answer>Right || D",
        "<think>go</think><answer> </answer>",
        "<think>go</think>\n<|im_end|>",
        "<think>go \\boxed{",
    ],
)
def test_where_an_answer_is_missing_or_cut_off_there_is_none(text):
    if "Up" in text:
        assert found(text) is not None  # a turn without a closing tag is searched whole
    else:
        assert found(text) is None


def test_an_opening_tag_that_ends_the_context_is_no_part_of_the_turn():
    assert found("Up || Up</answer><|im_end|>", forced="<answer>") == ("", "Up || Up</answer>")
    assert found("go</think><answer>Up</answer>", forced="<think>") == ("go</think><answer>", "Up</answer>")


def test_a_function_of_ones_own_tells_where_the_answer_is():
    text = "5 or 6 #### 5 #### 6"
    assert found(text, lambda text: text.rpartition("#### ")[2]) == ("5 or 6 #### 5 ####", "6")
    assert found(text, lambda text: None) is None
    with pytest.raises(ValueError, match=r"answer must .* or None, got 'seven'"):
        found(text, lambda text: "seven")


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=6))
@settings(max_examples=60, derandomize=True)
def test_any_answer_is_found_whole_and_nothing_of_it_stands_before(thought, answer):
    ids = tuple(TOKENIZER(f"{thought}#### {answer}")["input_ids"])
    text = TOKENIZER.decode(list(ids))
    if "#### " not in text or not text.rpartition("#### ")[2].strip() or not answer.isascii():
        return
    wanted = text.rpartition("#### ")[2]
    place = find_answer(Turn((1,), (), ids, False), TOKENIZER, lambda text: text.rpartition("#### ")[2])
    assert place.thought + place.tokens == ids[: len(place.thought + place.tokens)]
    assert len(TOKENIZER.decode(list(place.thought))) <= text.rfind(wanted)
    assert TOKENIZER.decode(list(place.thought + place.tokens)).endswith(wanted)


# What is said


def names(*measurements):
    return [finding.name for finding in answer_findings(measurements)]


def test_the_prompt_comes_before_the_reasoning():
    assert names(AnswerEvidence(10, 0.93, 40, 0.06, 0.02)) == ["prompt_used", "reasoning_hardly_used"]
    assert names(AnswerEvidence(10, 0.93, 40, 0.97, 0.01))[1] == "reasoning_used"
    assert names(AnswerEvidence(10, 0.93, 40, 0.3, 0.1))[1] == "reasoning_partly_used"
    for bits, error, name in ((-42, 9.4, "foreign_answers"), (-0.1, 0.1, "reasoning_hardly_used")):
        assert names(AnswerEvidence(10, 0.93, 32, bits, error))[1] == name  # not judged where the model wrote none
    (of_prompt, _) = answer_findings([AnswerEvidence(10, 0.93, 40, 0.06, 0.02)])
    assert of_prompt.numbers["prompt_win_rate"] == 0.93 and "0.93" in of_prompt.sentence


def test_lost_is_said_only_of_what_was_shown_before_and_is_excluded_now():
    shown, lost, unsure = (AnswerEvidence(step, rate, 40) for step, rate in ((10, 0.95), (20, 0.5), (20, 0.66)))
    (said,) = answer_findings([shown, lost])
    assert (said.name, said.severity, said.since) == (
        "prompt_lost",
        "warning",
        20,
    ) and "at step 10: 0.95" in said.sentence
    assert names(lost) == ["prompt_not_shown"]
    assert names(shown, unsure) != ["prompt_lost"]
    assert names(lost, shown) == ["prompt_used"]
    assert names(AnswerEvidence(10, 0.86, 8)) == ["prompt_not_shown"]


def test_by_chance_dependence_is_said_of_at_most_one_in_a_hundred():
    rng, rates = random.Random(0), []
    for _ in range(4000):  # ranks of the own place among five, in sixteen rows
        rates.append(sum(rng.randrange(5) for _ in range(16)) / 64)
    assert sum(AnswerEvidence(1, rate, 16).uses_prompt for rate in rates) <= 40
    # Part of a win is none: 12.5 of 16 are as probable as 12, C(16, 12) + ... + C(16, 16) of 2^16.
    assert AnswerEvidence(1, 12.5 / 16, 16).p_value == pytest.approx(2517 / 65536)


def test_answers_that_are_all_the_same_are_said_to_be():
    assert names(AnswerEvidence(1, same_across=0.97)) == ["same_answers"]
    assert names(AnswerEvidence(1, same_across=0.2)) == names() == []
