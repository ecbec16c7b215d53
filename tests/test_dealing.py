"""How kept rows are dealt to micro-batches: arithmetic, checked against its promises on random cases."""

from itertools import accumulate, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.trainers.dealing import TOLERANCE, Sharing, deal_rows
from ragen2_trl.trainers.plans import accumulation_segments

steps = st.integers(1, 12)


@given(steps, st.integers(1, 12), steps)
def test_segments_end_at_the_optimizer_steps(num_micro_steps, left_in_window, accumulation):
    segments = accumulation_segments(num_micro_steps, left_in_window, accumulation)
    assert sum(segments) == num_micro_steps
    ends_by_counting = []
    left = left_in_window
    for step in range(num_micro_steps):
        left -= 1
        if left == 0 or step == num_micro_steps - 1:
            ends_by_counting.append(step + 1)
        if left == 0:
            left = accumulation
    assert [sum(segments[: number + 1]) for number in range(len(segments))] == ends_by_counting


@st.composite
def deals(draw):
    """Rows that were kept out of full micro-batches, so that they always fit."""
    segments = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rows_per_micro_batch, num_processes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    capacity = sum(segments) * rows_per_micro_batch
    lengths = [draw(st.lists(st.integers(1, 99), max_size=capacity)) for _ in range(num_processes)]
    return lengths, segments, rows_per_micro_batch


def segments_of(dealt, segments):
    """The micro-steps of each segment."""
    return [dealt[start:stop] for start, stop in pairwise([0, *accumulate(segments)])]


@given(deals())
def test_every_kept_row_is_dealt_once_and_fits(case):
    lengths, segments, rows_per_micro_batch = case
    dealt = deal_rows(*case)
    assert len(dealt) == sum(segments)
    rows = [(process, number) for process, own in enumerate(lengths) for number in range(len(own))]
    assert sorted(row for shares in dealt for own in shares for row in own) == rows
    assert all(len(own) <= rows_per_micro_batch for shares in dealt for own in shares)


@given(deals())
def test_each_segment_uses_as_few_micro_steps_as_it_needs_and_uses_its_last_ones(case):
    lengths, segments, rows_per_micro_batch = case
    for segment in segments_of(deal_rows(*case), segments):
        counts = [sum(map(len, shares)) for shares in segment]
        num_filled = sum(count > 0 for count in counts)
        assert num_filled == -(-sum(counts) // (rows_per_micro_batch * len(lengths)))
        assert all(count > 0 for count in counts[len(counts) - num_filled :])


@given(deals())
def test_shares_are_even_over_optimizer_steps_micro_steps_and_processes(case):
    lengths, segments, _ = case
    total = sum(map(len, lengths))
    for segment, num_steps in zip(segments_of(deal_rows(*case), segments), segments, strict=True):
        assert abs(sum(len(own) for shares in segment for own in shares) - total * num_steps / sum(segments)) < 1
        for shares in segment:
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for process in range(len(lengths)):
            filled = [len(shares[process]) for shares in segment if any(shares)]
            assert not filled or max(filled) - min(filled) <= 1


@given(deals())
def test_rows_of_similar_length_share_a_micro_batch(case):
    lengths, segments, rows_per_micro_batch = case
    alone = [[length for own in lengths for length in own]]
    segments = [num_steps * len(lengths) for num_steps in segments]
    for segment in segments_of(deal_rows(alone, segments, rows_per_micro_batch), segments):
        blocks = [[alone[0][number] for _, number in own] for (own,) in segment]
        for shorter, longer in pairwise(block for block in blocks if block):
            assert max(shorter) <= min(longer)


def padded_tokens(dealt, lengths):
    """Of the slowest process, summed over micro-steps."""
    sizes = [
        [len(own) * max((lengths[home][number] for home, number in own), default=0) for own in shares]
        for shares in dealt
    ]
    return sum(map(max, sizes))


@given(deals())
def test_leaving_rows_where_they_are_costs_at_most_the_tolerance(case):
    """Against dealing the sorted rows of each micro-step to and fro, written down here once more."""
    lengths, segments, _ = case
    for segment in segments_of(deal_rows(*case), segments):
        rows = sorted(
            (row for shares in segment for own in shares for row in own), key=lambda row: lengths[row[0]][row[1]]
        )
        filled, processes = sum(map(any, segment)), len(lengths)
        to_and_fro = []
        for step in range(filled):
            shares = [[] for _ in lengths]
            block = rows[len(rows) * step // filled : len(rows) * (step + 1) // filled]
            for place, row in enumerate(block):
                turn, process = divmod(place, processes)
                shares[processes - 1 - process if (turn + step) % 2 else process].append(row)
            to_and_fro.append(shares)
        # Rows of equal length may come in another order, and so cost another way round.
        if len({lengths[home][number] for home, number in rows}) == len(rows):
            assert padded_tokens(segment, lengths) <= (1 + TOLERANCE) * padded_tokens(to_and_fro, lengths)


def test_rows_stay_on_their_process_where_it_has_as_many_as_the_others():
    random = Random(0)
    lengths = [[random.randint(90, 100) for _ in range(16)] for _ in range(4)]
    dealt = deal_rows(lengths, [8], 2)
    assert all(home == process for shares in dealt for process, own in enumerate(shares) for home, _ in own)


def test_only_the_surplus_moves():
    random = Random(0)
    lengths = [[random.randint(90, 100) for _ in range(count)] for count in (24, 8)]
    dealt = deal_rows(lengths, [8], 4)
    moved = [row for shares in dealt for process, own in enumerate(shares) for row in own if row[0] != process]
    assert len(moved) == 8
    assert all(home == 0 for home, _ in moved)


def test_the_updates_of_a_generation_get_rows_of_every_process_in_proportion():
    """One row on the first process, three on the second: the first update gets one of each."""
    first, second = deal_rows([[5], [5, 5, 5]], segments=[1, 1], rows_per_micro_batch=2)
    rows_of = [sorted(row for share in update for row in share) for update in (first, second)]
    assert rows_of == [[(0, 0), (1, 0)], [(1, 1), (1, 2)]]


# Shared prompts


@st.composite
def shared_deals(draw):
    lengths, segments, rows_per_micro_batch = draw(deals())
    tokens = draw(st.lists(st.integers(1, 60), min_size=3, max_size=3))
    groups = [[draw(st.integers(0, 2)) for _ in own] for own in lengths]
    lengths = [
        [tokens[group] + length for group, length in zip(of, own, strict=True)]
        for of, own in zip(groups, lengths, strict=True)
    ]
    prompts = [[(group, tokens[group]) for group in of] for of in groups]
    widest = max((length for own in lengths for length in own), default=1)
    return (lengths, segments, rows_per_micro_batch), Sharing(prompts, rows_per_micro_batch * widest)


@given(shared_deals())
def test_with_shared_prompts_a_micro_batch_takes_more_rows_as_long_as_it_needs_no_more_memory_than_trls(case):
    (lengths, segments, rows_per_micro_batch), sharing = case
    dealt = deal_rows(lengths, segments, rows_per_micro_batch, sharing=sharing)
    rows = [(process, number) for process, own in enumerate(lengths) for number in range(len(own))]
    assert sorted(row for shares in dealt for own in shares for row in own) == rows
    for own in (own for shares in dealt for own in shares if len(own) > rows_per_micro_batch):
        completions = sum(lengths[home][number] - sharing.prompts[home][number][1] for home, number in own)
        prompts = {(home, *sharing.prompts[home][number]) for home, number in own}
        keys = sum(lengths[home][number] for home, number in own)
        assert completions + sum(tokens for *_, tokens in prompts) + keys // 8 <= sharing.budget


@given(shared_deals())
def test_shared_prompts_never_take_more_micro_steps_and_their_last_one_has_rows(case):
    (lengths, segments, rows_per_micro_batch), sharing = case
    many = deal_rows(lengths, segments, rows_per_micro_batch)
    few = deal_rows(lengths, segments, rows_per_micro_batch, sharing=sharing)
    for more, fewer in zip(segments_of(many, segments), segments_of(few, segments), strict=True):
        assert sum(map(any, fewer)) <= sum(map(any, more))
        assert any(fewer[-1]) == any(more[-1])


def test_rows_without_a_completion_which_are_no_tree_are_as_many_as_trls():
    """As truncated completions that are masked."""
    lengths, prompts = [[30] * 8], [[(number // 4, 30) for number in range(8)]]
    dealt = deal_rows(lengths, [4], 2, sharing=Sharing(prompts, budget=2 * 40))
    assert max(len(own) for (own,) in dealt) == 2  # 8 padded rows would be 248 positions


def test_groups_fill_a_micro_batch_of_trls_positions_and_processes_get_as_many():
    """Four groups of 4 x 10 tokens after 90 are 520 positions and 200 for keys, and 8 padded rows are 800."""
    prompts = [[(number // 4, 90) for number in range(16)]] * 2
    sharing, lengths = Sharing(prompts, budget=8 * 100), [[100] * 16] * 2
    dealt = deal_rows(lengths, [4], 8, sharing=sharing)
    assert [[len(own) for own in shares] for shares in dealt] == [[0, 0]] * 3 + [[16, 16]]
    lengths = [[100] * 16, [200, 100, 100, 100] * 4]  # the second samples half as much again
    *_, shares = deal_rows(lengths, [4], 8, sharing=Sharing(prompts, budget=8 * 200))
    # 520 and 920 positions at home; a whole group moves.
    assert [{(home, number // 4) for home, number in own} for own in shares] == [
        {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)},
        {(1, 1), (1, 2), (1, 3)},
    ]
