"""How kept rows are dealt to micro-batches: arithmetic, checked against its promises on random cases."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragen2_trl.trainers.dealing import accumulation_segments, deal_rows

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
    capacity = sum(segments) * rows_per_micro_batch * num_processes
    lengths = draw(st.lists(st.integers(1, 99), max_size=capacity))
    return lengths, segments, rows_per_micro_batch, num_processes


@given(deals())
def test_every_kept_row_is_dealt_once_and_fits(case):
    lengths, segments, rows_per_micro_batch, num_processes = case
    dealt = deal_rows(lengths, segments, rows_per_micro_batch)
    assert len(dealt) == sum(segments)
    assert sorted(row for shares in dealt for own in shares for row in own) == list(range(len(lengths)))
    assert all(len(own) <= rows_per_micro_batch for shares in dealt for own in shares)


@given(deals())
def test_each_segment_uses_as_few_micro_steps_as_it_needs_and_uses_its_last_ones(case):
    lengths, segments, rows_per_micro_batch, num_processes = case
    dealt = deal_rows(lengths, segments, rows_per_micro_batch)
    start = 0
    for num_steps in segments:
        counts = [sum(map(len, shares)) for shares in dealt[start : start + num_steps]]
        start += num_steps
        num_filled = sum(count > 0 for count in counts)
        assert num_filled == -(-sum(counts) // (rows_per_micro_batch * num_processes))
        assert all(count > 0 for count in counts[num_steps - num_filled :])


@given(deals())
def test_shares_are_even_over_optimizer_steps_micro_steps_and_processes(case):
    lengths, segments, rows_per_micro_batch, num_processes = case
    dealt = deal_rows(lengths, segments, rows_per_micro_batch)
    start = 0
    for num_steps in segments:
        segment = dealt[start : start + num_steps]
        start += num_steps
        in_segment = sum(len(own) for shares in segment for own in shares)
        assert abs(in_segment - len(lengths) * num_steps / sum(segments)) < 1
        filled = [sum(map(len, shares)) for shares in segment if any(shares)]
        assert not filled or max(filled) - min(filled) <= 1
        for shares in segment:
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(deals())
def test_rows_of_similar_length_share_a_micro_step(case):
    lengths, segments, rows_per_micro_batch, num_processes = case
    dealt = deal_rows(lengths, segments, rows_per_micro_batch)
    start = 0
    for num_steps in segments:
        blocks = [[lengths[row] for own in shares for row in own] for shares in dealt[start : start + num_steps]]
        start += num_steps
        filled = [block for block in blocks if block]
        for shorter, longer in pairwise(filled):
            assert max(shorter) <= min(longer)
