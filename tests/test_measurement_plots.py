"""Figures of one measurement: the matrix, the plane of regimes, and the groups."""

import math

import matplotlib
import matplotlib.colors
import matplotlib.image
import pytest
import torch
from matplotlib.patches import Rectangle
from plotted import assert_nothing_overlaps, extent, groups, heights, legend, measurement

from ragen2_trl.report import plot_matrix, plot_quadrant, plot_reward_variance
from ragen2_trl.report.measurement_plots import REGIME_CORNERS

pytestmark = pytest.mark.slow

# The matrix


@pytest.mark.parametrize(("num_prompts", "group_size"), [(2, 1), (2, 4), (5, 3), (16, 4), (64, 1)])
@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_matrix_has_readable_ticks(num_prompts, group_size, gain):
    figure = plot_matrix(measurement(num_prompts, group_size, gain))
    axes = figure.axes[0]
    for axis, count in ((axes.xaxis, num_prompts), (axes.yaxis, num_prompts * group_size)):
        shown = [tick for tick in axis.get_major_ticks() if 0.5 <= tick.get_loc() <= count + 0.5]
        assert 1 <= len(shown) <= 10
        assert {tick.get_loc() % 1 for tick in shown} == {0.0}
        assert_nothing_overlaps([tick.label1 for tick in shown])


def test_matrix_of_a_dependent_policy_has_a_bright_diagonal():
    figure = plot_matrix(measurement(8, 4, gain=0.2))
    (image,) = figure.axes[0].images
    values = torch.tensor(image.get_array())  # (32, 8)
    own = torch.arange(8).repeat_interleave(4)
    assert (values.argmax(dim=1) == own).all()
    assert (values.gather(1, own[:, None]) == 0).all()
    title = figure.axes[0].get_title(loc="left")
    assert "100%" in title and "chance 12.5%" in title


def test_matrix_frames_the_own_prompt_of_each_reasoning():
    figure = plot_matrix(measurement(4, 3, gain=0.2))
    frames = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    corners = [(frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) for frame in frames]
    assert corners == [(i + 0.5, 3 * i + 0.5, 1, 3) for i in range(4)]


def test_one_absurd_pair_does_not_set_the_colours_of_the_others():
    measured = measurement(8, 4, gain=0.2)
    measured.cross_logps[0, (measured.prompt_index[0] + 1) % 8] = -1e6
    figure = plot_matrix(measured)
    low, high = figure.axes[0].images[0].get_clim()
    assert -1 < low < 0
    assert high == 0


def test_matrix_of_a_policy_blind_to_its_prompt_is_of_one_colour():
    blind = measurement(4, 2, gain=0.0)
    blind.cross_logps[:] = blind.cross_logps[:, :1] + 1e-5 * torch.rand(8, 4)
    figure = plot_matrix(blind)
    image = figure.axes[0].images[0]
    assert image.norm(image.get_array()).min() > 0.99


# The plane of regimes


def test_quadrant_names_each_regime_in_its_corner():
    figure = plot_quadrant([(0.3, 2.7, "here")], upper_bound=2.77)
    corners = {text.get_text(): text.xy for text in figure.axes[0].texts if text.get_text() in REGIME_CORNERS}
    assert corners == REGIME_CORNERS
    # Section 2.2: mutual information (y) is high where reasoning depends on its prompt, entropy (x) where it varies.
    assert corners["Diverse reasoning"] == (1, 1)
    assert corners["Template collapse"] == (1, 0)
    assert corners["Compressed reasoning"] == (0, 1)


PATHS = {
    "one": [(0.3, 2.7, "step 10")],
    "falling": [(0.8, 2.75, "step 10"), (0.7, 1.5, "step 20"), (0.75, 0.0, "step 30")],
    "narrowing": [(0.6, 2.7, "step 10"), (0.05, 2.5, "step 20")],
    "negative": [(0.3, -0.4, "step 10"), (0.02, 0.1, "step 20")],
    "collapsing": [
        (0.39, 2.73, "step 10"),
        (0.42, 2.62, "step 20"),
        (0.48, 2.76, "step 30"),
        (0.53, 2.77, "step 40"),
        (0.76, 2.72, "step 50"),
        (5.3, 1.5, "step 60"),
        (5.85, 0.1, "step 70"),
        (5.82, 0.04, "step 80"),
    ],
    "staying": [(0.30, 2.7, "step 10"), (0.33, 2.6, "step 20"), (0.32, 2.72, "step 30")],
}


@pytest.mark.parametrize("points", PATHS.values(), ids=PATHS)
def test_quadrant_holds_all_points_and_its_texts_do_not_overlap(points):
    figure = plot_quadrant(points, upper_bound=2.77)
    axes = figure.axes[0]
    bound, path, last = axes.lines
    assert set(bound.get_ydata()) == {2.77}
    assert list(zip(*path.get_data(), strict=True)) == [point[:2] for point in points]
    assert (last.get_xdata()[0], last.get_ydata()[0]) == points[-1][:2]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left < x < right and bottom < y < top for x, y, _ in points)
    assert_nothing_overlaps(axes.texts)
    drawn = [axes.transData.transform(point[:2]) for point in points]
    for text in axes.texts:
        box = extent(text)
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and not any(box.contains(*point) for point in drawn)


def test_low_entropy_lies_on_the_left_whatever_the_largest_is():
    figure = plot_quadrant([(0.05, 1.0, "a")], upper_bound=2.77)
    left, right = figure.axes[0].get_xlim()
    assert (0.05 - left) / (right - left) < 0.25


def test_a_long_label_stays_inside_the_picture():
    figure = plot_quadrant([(0.26, 1.0, "a-very-long-name-of-an-environment" * 3)], upper_bound=2.77)
    inside = figure.bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in map(extent, figure.axes[0].texts))


def test_quadrant_without_a_point_is_refused():
    with pytest.raises(ValueError, match="points must hold at least one"):
        plot_quadrant([], upper_bound=1.0)


# The groups of a measurement


@pytest.mark.parametrize("count", [8, 512])
def test_groups_are_drawn_from_the_largest_score_down_and_kept_ones_in_colour(count):
    scores, kept = groups(count, value=0.7)
    above, below = plot_reward_variance(scores, kept).axes
    kept_bars, other_bars = above.patches
    assert [max(pair) for pair in zip(heights(kept_bars), heights(other_bars), strict=True)] == sorted(
        scores, reverse=True
    )
    assert sorted(filter(None, heights(kept_bars))) == sorted(
        score for score, keep in zip(scores, kept, strict=True) if keep
    )
    assert legend(above) == [f"kept: {sum(kept)} of {count} groups", f"left out: {count - sum(kept)}"]
    shades = [sum(matplotlib.colors.to_rgb(bars.get_facecolor())) / 3 for bars in above.patches]
    assert shades[1] - shades[0] > 0.25  # apart in greyscale
    assert len(below.get_xticks()) <= 12


@pytest.mark.parametrize("count", [8, 512])
def test_the_cut_lies_behind_the_kept_groups_where_the_curve_reaches_their_share(count):
    scores, kept = groups(count, value=0.7)
    above, below = plot_reward_variance(scores, kept).axes
    share = sum(score for score, keep in zip(scores, kept, strict=True) if keep) / sum(scores)
    curve, cut = below.lines
    assert set(cut.get_xdata()) == set(above.lines[0].get_xdata()) == {sum(kept) + 0.5}
    reached = dict(zip(*curve.get_data(), strict=True))
    assert reached[sum(kept) + 0.5] == pytest.approx(share)
    assert (reached[0.5], reached[count + 0.5]) == (0, pytest.approx(1))
    assert cut.get_label() == f"cut: kept groups hold {share:.0%}"


def test_a_filter_that_keeps_the_smallest_cuts_on_both_sides_of_them():
    scores = [0.3, 0.2, 0.2, 0.1, 0.0]
    _, below = plot_reward_variance(scores, [False, False, True, True, False]).axes
    assert [cut.get_xdata()[0] for cut in below.lines[1:]] == [2.5, 4.5]


def test_groups_kept_by_something_else_than_the_score_have_no_cut():
    above, below = plot_reward_variance([0.4, 0.3, 0.2, 0.1], [True, False, True, False]).axes
    assert not above.lines
    assert len(below.lines) == 1


def test_without_a_filter_all_groups_are_alike_and_nothing_is_cut():
    above, below = plot_reward_variance(groups(16)[0], None).axes
    assert len(above.patches) == 1
    assert legend(above) == ["16 groups"]
    assert not above.lines
    assert legend(below) == ["cumulative share"]


@pytest.mark.parametrize("kept", [None, [False] * 8])
def test_groups_without_any_variance_are_said_to_be_so_and_have_no_shares(kept):
    (axes,) = plot_reward_variance([0.0] * 8, kept).axes
    assert [text.get_text() for text in axes.texts] == ["the reward variance of all groups is 0"]


def test_the_score_that_the_filter_ranks_by_names_the_axes():
    above, below = plot_reward_variance([0.5, 0.1], [True, False], score="reward_std").axes
    assert above.get_ylabel() == "reward std"
    assert below.get_xlabel() == "group, from the largest reward std down"


def test_scores_below_zero_have_no_shares():
    assert len(plot_reward_variance([0.5, -0.1], [True, False], score="reward_mean").axes) == 1


def test_a_score_that_is_not_finite_counts_as_zero():
    above, _ = plot_reward_variance([math.nan, 0.5, math.inf], [False, True, False]).axes
    assert heights(above.patches[0]) == [0.5, 0, 0]


@pytest.mark.parametrize(
    ("scores", "kept", "message"),
    [([], None, "scores must hold at least one group"), ([0.1, 0.2], [True], "each of the 2 scores, got 1")],
)
def test_groups_that_do_not_fit_are_refused(scores, kept, message):
    with pytest.raises(ValueError, match=message):
        plot_reward_variance(scores, kept)
