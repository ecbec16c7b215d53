"""Figures: what is drawn in them is what was measured, and they can be read wherever they are shown."""

import math
import re
from xml.dom import minidom

import matplotlib
import matplotlib.colors
import matplotlib.image
import pytest
import torch
from matplotlib.patches import Rectangle

from ragen2_trl.filtering import group_score, select_groups
from ragen2_trl.instrument.diagnosis import Measurement
from ragen2_trl.instrument.information import information_metrics
from ragen2_trl.reporting import (
    plot_comparison,
    plot_compute,
    plot_matrix,
    plot_quadrant,
    plot_reward_variance,
    plot_training,
    save_figure,
    svg,
)
from ragen2_trl.reporting.card import running_means
from ragen2_trl.reporting.measurement_plots import REGIME_CORNERS


def extent(artist):
    return artist.get_window_extent()


def assert_nothing_overlaps(artists) -> None:
    boxes = [extent(artist) for artist in artists]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def line(axes, label):
    (found,) = (line for line in axes.lines if line.get_label() == label)
    return found


def measurement(num_prompts: int, group_size: int, gain: float) -> Measurement:
    """Reasonings in random order whose own prompt is `gain` nats per token better than the others, and noise."""
    generator = torch.Generator().manual_seed(0)
    own = torch.arange(num_prompts).repeat_interleave(group_size)
    own = own[torch.randperm(len(own), generator=generator)]
    lengths = torch.randint(20, 60, own.shape, generator=generator)
    logps = -lengths[:, None] * (0.3 + 0.05 * torch.rand(len(own), num_prompts, generator=generator))
    logps[torch.arange(len(own)), own] += gain * lengths
    metrics = information_metrics(logps, lengths, own)
    return Measurement(metrics, logps, lengths, own, list(range(len(own))), list(range(num_prompts)))


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
    assert "100% of reasonings (chance 12.5%)" in figure.axes[0].get_title(loc="left").replace("\n", " ")


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


def groups(count: int, **filter_options) -> tuple[list[float], list[bool]]:
    """Scores of groups of eight binary rewards, and which of them the filter keeps."""
    generator = torch.Generator().manual_seed(count)
    rewards = (torch.rand(count, 8, generator=generator) < torch.rand(count, 1, generator=generator)).float()
    scores = group_score(rewards)
    return scores.tolist(), select_groups(scores, **filter_options).tolist()


def heights(bars) -> list[float]:
    """Of the bars at 1, 2, ..., in order."""
    values, edges, _ = bars.get_data()
    centres = (edges[:-1] + edges[1:]) / 2
    return [value for value, centre in zip(values, centres, strict=True) if abs(centre - round(centre)) < 0.01]


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


# Training


def history(steps: int, measured_every: int | None, **changes) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": 0.1 * (step % 5), "success": 0.2 * (step % 5), "entropy": 0.4}
        row |= {"snr/kept_fraction": 0.6, "snr/zero_variance_fraction": 0.2, "snr/update_compute_fraction": 0.5}
        if measured_every and step % measured_every == 1:
            row |= {"mi/first_turn/retrieval_accuracy": 0.9, "mi/first_turn/retrieval_chance": 0.25}
        rows.append(row | changes)
    return [*rows, {"step": steps, "train_runtime": 1.0}]


def stock_history(steps: int) -> list[dict]:
    """What `trl.GRPOTrainer` logs, of that which is drawn."""
    return [{"step": step, "reward": 0.5, "entropy": 0.4, "frac_reward_zero_std": 0.3} for step in range(1, steps + 1)]


def test_all_that_was_logged_has_a_panel_named_in_a_legend():
    figure = plot_training(history(25, 10), "success")
    assert [legend(axes) for axes in figure.axes] == [
        ["reward", "success"],
        ["retrieval accuracy", "chance"],
        ["entropy"],
        ["groups kept", "zero-variance groups", "update compute"],
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["reward", "fraction", "nats per token", "fraction"]


def test_a_history_without_mutual_information_has_no_panel_of_it():
    figure = plot_training(history(25, None))
    assert [legend(axes)[0] for axes in figure.axes] == ["reward", "entropy", "groups kept"]


def test_a_history_of_the_stock_trainer_shows_its_own_share_of_zero_variance_groups():
    figure = plot_training(stock_history(25))
    assert [legend(axes) for axes in figure.axes] == [["reward"], ["entropy"], ["zero-variance groups"]]
    assert set(figure.axes[-1].lines[0].get_ydata()) == {0.3}


def test_a_history_of_rewards_alone_has_one_panel():
    figure = plot_training([{"step": step, "reward": 0.5} for step in range(3)], "success")
    assert [legend(axes) for axes in figure.axes] == [["reward"]]


def test_measurements_are_drawn_as_they_are_beside_chance():
    rows = history(25, 10)
    rows[10]["mi/first_turn/retrieval_accuracy"] = 0.5
    dependence = plot_training(rows).axes[1]
    accuracy, chance = dependence.lines
    assert list(accuracy.get_xdata()) == [1, 11, 21]
    assert list(accuracy.get_ydata()) == [0.9, 0.5, 0.9]
    assert accuracy.get_marker() == "o"
    assert (chance.get_linestyle(), set(chance.get_ydata())) == (":", {0.25})
    assert dependence.get_ylim()[0] < 0 < 1 < dependence.get_ylim()[1]


def test_thick_lines_are_running_means_over_ten_of_the_steps_that_thin_ones_show():
    rows = history(100, None)
    thin, thick = plot_training(rows).axes[0].lines
    rewards = [row["reward"] for row in rows[:-1]]
    assert list(thin.get_ydata()) == rewards
    assert thick.get_ydata()[-1] == pytest.approx(sum(rewards[-10:]) / 10)
    assert thick.get_linewidth() > thin.get_linewidth()


def test_a_run_of_few_steps_is_drawn_as_it_is():
    (reward,) = plot_training(history(3, None)).axes[0].lines
    assert list(reward.get_ydata()) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("steps", [3, 5, 25, 100, 500])
def test_lines_end_at_the_last_number_of_the_model_card(steps):
    rows = history(steps, None)[:-1]
    last = running_means([(row["step"], row["reward"]) for row in rows])[-1]
    assert plot_training(rows).axes[0].lines[-1].get_xydata()[-1].tolist() == pytest.approx(last)


@pytest.mark.parametrize("step", [{}, {"step": None}])
def test_rows_without_a_step_are_left_out(step):
    stray = {"reward": 9.0, "snr/update_compute_fraction": 9.0} | step
    rows = [*history(25, 10), stray]
    assert svg(plot_training(rows)) == svg(plot_training(rows[:-1]))
    assert svg(plot_compute(rows)) == svg(plot_compute(rows[:-1]))
    assert svg(plot_comparison({"a": rows}, {})) == svg(plot_comparison({"a": rows[:-1]}, {}))
    with pytest.raises(ValueError, match="has 1 rows, but none has a 'reward' to plot at its 'step'"):
        plot_training([stray])


def test_a_single_step_is_seen():
    figure = plot_training(history(1, None, **{"mi/first_turn/retrieval_accuracy": 0.9}), "success")
    lines = [line for axes in figure.axes for line in axes.lines]
    assert {tuple(line.get_xdata()) for line in lines} == {(1,)}
    assert "None" not in {line.get_marker() for line in lines}
    above = figure.axes[0].lines
    assert len({line.get_marker() for line in above}) == len(above)  # equal values do not hide each other
    assert figure.axes[-1].get_xlim() == (pytest.approx(0, abs=0.1), pytest.approx(2, abs=0.1))


def test_a_long_run_is_drawn_with_as_many_points_as_can_be_seen():
    rows = history(2000, 10)
    figure = plot_training(rows, "success")
    thin = figure.axes[0].lines[0]
    assert len(thin.get_xdata()) <= 600
    assert sum(thin.get_ydata()) / len(thin.get_ydata()) == pytest.approx(0.2, abs=1e-6)
    assert len(svg(figure)) < 400_000
    assert len(figure.axes[1].lines[0].get_xdata()) == 200  # measurements are all there


def test_several_rows_of_one_step_are_one_point():
    rows = [{"step": 1, "reward": 0.2}, {"step": 1, "reward": 0.4}, {"step": 1, "entropy": 0.5}]
    reward, entropy = plot_training(rows).axes
    assert reward.lines[0].get_xydata().tolist() == [[1, pytest.approx(0.3)]]
    assert entropy.lines[0].get_xydata().tolist() == [[1, 0.5]]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_rows_without_a_finite_value_are_left_out(value):
    rows = history(25, 10)
    rows[0]["mi/first_turn/retrieval_accuracy"] = value
    rows[3]["entropy"] = value
    rows[4]["snr/kept_fraction"] = value
    rows[5]["reward"] = value
    reward, dependence, entropy, fractions = plot_training(rows).axes
    assert list(dependence.lines[0].get_xdata()) == [11, 21]
    assert 4 not in line(entropy, "entropy").get_xdata()
    assert 5 not in line(fractions, "groups kept").get_xdata()
    assert 6 not in line(reward, "reward").get_xdata()


def test_measurements_that_are_all_nan_leave_the_figure_as_without():
    nothing = {"mi/first_turn/retrieval_accuracy": math.nan, "mi/first_turn/retrieval_chance": math.nan}
    assert len(plot_training(history(25, None, **nothing)).axes) == len(plot_training(history(25, None)).axes)


def test_rewards_that_are_all_nan_are_said_to_be_so():
    figure = plot_training(history(3, None, reward=math.nan))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no finite reward"]
    assert legend(figure.axes[0]) == []


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 0.0}]])
def test_a_history_without_a_reward_is_refused(rows):
    with pytest.raises(ValueError, match=f"has {len(rows)} rows, but none has a 'reward'"):
        plot_training(rows)


# Compute


def test_compute_is_drawn_beside_plain_trl_and_summed_up_to_what_is_saved():
    rows = [{"step": step, "snr/update_compute_fraction": value} for step, value in enumerate([1, 0.5, 0.6], start=1)]
    above, below = plot_compute(rows).axes
    assert set(line(above, "plain TRL").get_ydata()) == {1}
    assert list(line(above, "update compute").get_ydata()) == [1, 0.5, 0.6]
    (saved,) = below.lines
    assert list(saved.get_ydata()) == pytest.approx([0, 0.25, 0.3])
    assert legend(below) == ["saved so far: 30% at step 3"]


def test_compute_of_a_run_without_a_filter_is_refused():
    with pytest.raises(ValueError, match="has 9 rows, but none has a finite 'snr/update_compute_fraction'"):
        plot_compute(stock_history(9))


# Several runs

RUNS = {"filtered": history(140, 10), "stock": stock_history(90), "plain": history(40, 10)}


def test_runs_differ_by_colour_and_by_style_and_by_marker():
    figure = plot_comparison({f"run {i}": stock_history(20) for i in range(28)}, {})
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line._dash_pattern[1] and tuple(line._dash_pattern[1])) for line in lines}) == 28
    first = lines[:4]
    for look in ("get_color", "get_marker", "get_linestyle"):
        assert len({getattr(line, look)() for line in first[:3]}) == 3


def test_what_runs_have_in_common_is_compared_in_a_panel_each():
    figure = plot_comparison(RUNS, dict.fromkeys(RUNS, "success"))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    ends = {name: [max(line.get_xdata()) for line in axes.lines] for name, axes in panels.items()}
    assert ends == {
        "success": [140, 40],
        "reward": [140, 90, 40],  # as one run has no success
        "retrieval accuracy (dotted: chance)": [1, 131, 31],  # the first is chance, across the panel
        "entropy (nats per token)": [140, 90, 40],
        "fraction of groups kept": [140, 40],
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["filtered", "stock", "plain"]


def test_a_run_has_the_same_look_in_every_panel_and_in_the_legend():
    figure = plot_comparison(RUNS, dict.fromkeys(RUNS, "success"))
    looks = {(line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines}
    looks.discard(("#808080", "None"))  # chance
    assert {(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()} == looks


def test_reward_is_compared_only_where_a_run_has_no_success():
    runs = {"a": history(20, None), "b": history(20, None)}
    titles = [axes.get_title(loc="left") for axes in plot_comparison(runs, dict.fromkeys(runs, "success")).axes]
    assert titles == ["success", "entropy (nats per token)", "fraction of groups kept"]
    assert plot_comparison(runs, {}).axes[0].get_title(loc="left") == "reward"


def test_panels_that_no_run_has_data_for_are_left_out():
    figure = plot_comparison({"a": stock_history(20), "b": stock_history(20)}, {"a": None})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["reward", "entropy (nats per token)"]


def test_chance_has_the_colour_of_its_run_where_runs_differ_in_it():
    easier = history(40, 10)
    for row in easier:
        if "mi/first_turn/retrieval_chance" in row:
            row["mi/first_turn/retrieval_chance"] = 0.5
    axes = plot_comparison({"a": history(40, 10), "b": easier}, {}).axes[1]
    one, other, *runs = axes.lines
    assert [set(chance.get_ydata()) for chance in (one, other)] == [{0.25}, {0.5}]
    assert [chance.get_color() for chance in (one, other)] == [run.get_color() for run in runs]


@pytest.mark.parametrize("histories", [{}, {"a": [{"step": 1, "loss": 1.0}]}])
def test_a_comparison_of_nothing_is_refused(histories):
    with pytest.raises(ValueError, match="histories"):
        plot_comparison(histories, {})


def test_a_collapse_is_marked_at_its_step_beside_the_retrieval_accuracy_of_its_run():
    runs = {"healthy": history(40, 10), "drifted": history(40, 10)}
    figure = plot_comparison(runs, {}, {"drifted": (20, "template collapse")})
    marked = [axes for axes in figure.axes if axes.texts]
    assert [axes.get_title(loc="left").split(" (")[0] for axes in marked] == ["retrieval accuracy"]
    (text,) = marked[0].texts
    assert text.get_text() == "template collapse" and text.xy[0] == 20
    drifted = figure.legends[0].get_lines()[1]
    assert text.get_color() == drifted.get_color()
    assert any(set(line.get_xdata()) == {20} for line in marked[0].lines)


def test_a_collapse_of_a_run_without_a_line_so_far_has_the_colour_of_that_run():
    blank = history(40, 10, reward=math.nan)
    for row in blank:
        row.pop("mi/first_turn/retrieval_accuracy", None)
    figure = plot_comparison({"sound": history(40, 10), "blank": blank}, {}, {"blank": (20, "template collapse")})
    (text,) = (text for axes in figure.axes for text in axes.texts)
    assert text.get_color() == figure.legends[0].get_lines()[1].get_color()


# All figures

HOSTILE = '<script>alert(1)</script> $\\frac{$ \x00\x1b[2J\u202e" id="x" & ' + "long " * 30
FIGURES = {
    "matrix": lambda: plot_matrix(measurement(8, 4, gain=0.2)),
    "quadrant": lambda: plot_quadrant([(0.3, 1.0, "step 10"), (0.2, 0.1, HOSTILE)], upper_bound=2.77),
    "reward variance": lambda: plot_reward_variance(*groups(16, value=0.7)),
    "training": lambda: plot_training(history(25, 10), "success"),
    "compute": lambda: plot_compute(history(25, 10)),
    "comparison": lambda: plot_comparison({HOSTILE: history(25, 10), "b" * 60: stock_history(25)}, {}),
}
all_figures = pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)


@all_figures
def test_texts_overlap_neither_data_nor_each_other_and_lie_inside_the_picture(draw):
    figure = draw()
    texts = [text for axes in figure.axes for text in (axes.title, axes._left_title, *axes.texts)]
    texts += [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    texts = [text for text in texts if text.get_visible() and text.get_text()]
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    assert_nothing_overlaps([*legends, *texts])
    for axes in figure.axes:
        for artist in legends:
            assert_nothing_overlaps([artist, axes.patch])
    for box in map(extent, [*legends, *texts]):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


@all_figures
def test_letters_are_legible_at_the_width_of_a_phone(draw):
    text = svg(draw())
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes
    assert min(sizes) * 360 / width > 8  # pixels


@all_figures
def test_a_figure_gives_the_same_files_each_time(draw, tmp_path):
    figure = draw()
    one, again, other = (
        [path.read_bytes() for path in save_figure(drawn, tmp_path / name)]
        for drawn, name in ((figure, "one"), (figure, "again"), (draw(), "other"))
    )
    assert one == again == other


@all_figures
def test_a_figure_looks_the_same_whatever_the_callers_settings_are(draw):
    before = svg(draw())
    dark = {"figure.facecolor": "black", "font.size": 30, "axes.facecolor": "black", "text.usetex": True}
    with matplotlib.rc_context(dark):
        figure = draw()
        assert matplotlib.rcParams["font.size"] == 30  # and the caller keeps his
        assert svg(figure) == before


@all_figures
def test_an_inlined_figure_is_well_formed_and_says_what_it_shows(draw):
    figure = draw()
    root = minidom.parseString(svg(figure)).documentElement
    assert svg(figure).startswith("<svg ")
    assert (root.tagName, root.getAttribute("role")) == ("svg", "img")
    assert root.getAttribute("aria-label") == figure.get_label() != ""
    assert root.firstChild.tagName == "title"
    assert not root.getElementsByTagName("script")
    assert not root.getElementsByTagName("style")  # would hold for the whole page


def test_ids_of_inlined_figures_do_not_clash_and_all_references_have_their_target():
    texts = [svg(draw()) for draw in FIGURES.values()]
    texts += [svg(plot_training(history(25, 10), "success"), name="another run that is just alike")]
    ids = [re.findall(r'\bid="([^"]*)"', text.replace("&quot;", "")) for text in texts]
    everything = [name for names in ids for name in names]
    assert len(everything) == len(set(everything))
    for text, own in zip(texts, ids, strict=True):
        references = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', text)
        assert references
        assert {one or other for one, other in references} <= set(own)


def test_hostile_names_are_shown_as_text_on_one_line():
    figure = FIGURES["comparison"]()
    (hostile, long) = (text.get_text() for text in figure.legends[0].get_texts())
    assert hostile.startswith("<script>alert(1)")
    assert hostile.isprintable()
    assert len(hostile) == len(long) == 48
    shown = [node.firstChild.data for node in minidom.parseString(svg(figure)).getElementsByTagName("text")]
    assert hostile in shown


def test_both_files_of_a_figure_are_written_beside_each_other(tmp_path):
    vectors, pixels = save_figure(plot_training(history(25, 10)), tmp_path / "new" / "run.v1")
    assert (vectors.name, pixels.name) == ("run.v1.svg", "run.v1.png")
    assert minidom.parse(str(vectors)).documentElement.namespaceURI == "http://www.w3.org/2000/svg"
    picture = matplotlib.image.imread(pixels)
    assert picture.shape[1] == 900
    assert (picture[0, 0, :3] == 1).all()  # white, also on a dark page
    assert picture[..., :3].std() > 0.01  # not one colour all over
