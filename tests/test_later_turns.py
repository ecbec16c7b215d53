"""Later turns with and without the model's own earlier words: only with them is found what goes on as it began."""

from dataclasses import replace

import pytest
import torch
from scored_models import run_in_full
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl.instrument.diagnosis import NotMeasurableError, Sampling, combine, measure_trajectory
from ragen2_trl.instrument.reasoning import find_turns

LENGTH = 3  # tokens of a turn
BREAK = 9  # ends what the prompt and the environment say
MANNERS = range(40, 72)  # ids, one of which a gibberish policy repeats all along
SAID = range(80, 96)  # ids of prompts and of what the environment answers
TRAJECTORIES = 64


def episodes(count, generator):
    """(count, L) ids of a prompt, a turn, what the environment answers, and a second turn of the same manner."""

    def said(width):
        drawn = torch.randint(SAID.start, SAID.stop, (count, width), generator=generator)
        return torch.cat([drawn, torch.full((count, 1), BREAK)], dim=1)

    turn = torch.randint(MANNERS.start, MANNERS.stop, (count, 1), generator=generator).expand(-1, LENGTH)
    return torch.cat([said(2), turn, said(2), turn], dim=1)


WRITTEN = torch.tensor([0] * 3 + [1] * LENGTH + [0] * 3 + [1] * LENGTH)


@pytest.fixture(scope="module")
def gibberish(policy_path):
    """A policy that begins at random, whatever it is asked, and goes on in its second turn as it began."""
    model = AutoModelForCausalLM.from_pretrained(policy_path)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=250)
    for _ in range(250):
        ids = episodes(64, generator)
        labels = ids.masked_fill(WRITTEN == 0, -100)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.eval()


@pytest.fixture(scope="module")
def played(gibberish, policy_path):
    """Turns that the policy has sampled."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    ids = episodes(TRAJECTORIES, torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for place in WRITTEN.nonzero().flatten().tolist():
            probabilities = gibberish(input_ids=ids[:, :place]).logits[:, -1].softmax(dim=-1)
            ids[:, place] = torch.multinomial(probabilities, 1).squeeze(1)
    return [find_turns(row[:3], row[3:], tokenizer, WRITTEN[3:].tolist()) for row in ids.tolist()]


def measure(model, played, **settings):
    generator = torch.Generator().manual_seed(0)
    return measure_trajectory(model, played, range(len(played)), generator, Sampling(TRAJECTORIES, **settings))


def test_a_turn_too_long_for_the_model_costs_none_of_the_others(policy_path):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    policy = AutoModelForCausalLM.from_pretrained(policy_path).eval()
    ids = episodes(8, torch.Generator().manual_seed(1)).tolist()
    turns = [find_turns(row[:3], row[3:], tokenizer, WRITTEN[3:].tolist()) for row in ids]
    fits = measure(policy, turns)
    assert fits.keys() == {0, 1}
    filler = (BREAK,) * policy.config.max_position_embeddings
    long = [[first, replace(second, context=second.context + filler)] for first, second in turns]
    assert measure(policy, long).keys() == {0}
    with pytest.raises(NotMeasurableError, match="tokens"):
        measure(policy, [[replace(turn, context=turn.context + filler) for turn in one] for one in turns])


@pytest.mark.slow
def test_gibberish_is_found_by_its_own_earlier_words_and_falls_to_chance_without_them(gibberish, played):
    by_turn = measure(gibberish, played)
    assert by_turn[0].without_own_words is None
    later = by_turn[1]
    with_words, without = later.metrics, later.without_own_words.metrics
    assert with_words["num_completions"] == without["num_completions"] > 20
    # Not all: some begin alike.
    assert with_words["retrieval_accuracy"] > 0.4 > 10 * with_words["retrieval_chance"]
    assert without["retrieval_chance"] == with_words["retrieval_chance"]
    assert without["retrieval_accuracy"] < 0.15
    assert combine([later.without_own_words])["num_completions"] == without["num_completions"]


@pytest.mark.slow
def test_what_the_model_wrote_is_left_out_and_nothing_else(played):
    turns = played[0]
    assert turns[0].earlier == () and turns[0].context_without_own_words == turns[0].context
    prompt, second = turns[0].context, turns[1]
    answer = second.context[len(prompt) + LENGTH :]
    assert second.earlier == ((len(prompt), len(prompt) + LENGTH),)
    assert second.context_without_own_words == (*prompt, *answer)


def test_special_ids_that_end_a_turn_stay(policy_path):
    """Whether the model or the template ends a turn: the context is the same."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    end = tokenizer.eos_token_id
    by_model = find_turns([5, 6], [41, 42, end, 90, 43], tokenizer, [1, 1, 1, 0, 1])[1]
    by_template = find_turns([5, 6], [41, 42, 42, end, 90, 43], tokenizer, [1, 1, 1, 0, 0, 1])[1]
    assert by_model.context_without_own_words == by_template.context_without_own_words == (5, 6, end, 90)


@pytest.mark.slow
def test_the_matrix_without_own_words_is_that_of_full_runs(gibberish, played):
    later = measure(gibberish, played[:12])[1].without_own_words
    expected = run_in_full(
        gibberish,
        [list(played[i][1].context_without_own_words) for i in later.columns],
        [list(played[i][1].reasoning) for i in later.trajectories],
    )
    torch.testing.assert_close(later.cross_logps, expected, atol=1e-4, rtol=1e-5)


def test_contexts_that_are_all_the_same_without_own_words_have_no_such_measurement(gibberish, policy_path):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    first = MANNERS.start
    written = [[first + i] * LENGTH + [80, BREAK] + [first + i] * LENGTH for i in range(16)]
    mask = [1] * LENGTH + [0, 0] + [1] * LENGTH
    played = [find_turns([80, BREAK], ids, tokenizer, mask) for ids in written]
    measured = measure(gibberish, played)
    assert measured[1].metrics["num_completions"] > 1
    assert measured[1].without_own_words is None
