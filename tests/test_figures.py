"""Figures: what is drawn is what was measured, it can be read wherever it is shown, and no text in it does harm."""

import math
import re
from xml.dom import minidom

import matplotlib
import matplotlib.colors
import matplotlib.image
import pytest
import torch
from plotted import (
    assert_nothing_overlaps,
    extent,
    groups,
    heights,
    held_out_curve,
    history,
    legend,
    line,
    measurement,
    stock_history,
)

from ragen2_trl.report import (
    plot_comparison,
    plot_held_out,
    plot_matrix,
    plot_quadrant,
    plot_reward_variance,
    plot_training,
    save_figure,
    svg,
)
from ragen2_trl.report.figures import REGIME_CORNERS

pytestmark = pytest.mark.slow

# All of them


HOSTILE = '<script>alert(1)</script> $\\frac{$ \x00\x1b[2J\u202e" id="x" & ' + "long " * 30
FIGURES = {
    "matrix": lambda: plot_matrix(measurement(8, 4, gain=0.2)),
    "quadrant": lambda: plot_quadrant([(0.3, 1.0, "step 10"), (0.2, 0.1, HOSTILE)], upper_bound=2.77),
    "reward variance": lambda: plot_reward_variance(*groups(16, value=0.7)),
    "training": lambda: plot_training(history(25, 10), "success"),
    "held out": lambda: plot_held_out({name: held_out_curve(name) for name in ("frozen_lake", HOSTILE, "sokoban")}),
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
def test_a_figure_gives_the_same_files_each_time(draw, tmp_path):
    figure = draw()
    one, again, other = (
        [path.read_bytes() for path in save_figure(drawn, tmp_path / name)]
        for drawn, name in ((figure, "one"), (figure, "again"), (draw(), "other"))
    )
    assert one == again == other


@pytest.mark.slow
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


# Training


def test_all_that_was_logged_has_a_panel_named_in_a_legend():
    figure = plot_training(history(25, 10), "success")
    assert [legend(axes) for axes in figure.axes] == [
        ["reward", "success in training"],
        ["retrieval accuracy", "chance"],
        ["entropy"],
        ["completions kept", "zero-variance groups", "update compute"],
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["reward", "fraction", "nats per token", "fraction"]


def test_a_history_of_the_stock_trainer_shows_its_own_share_of_zero_variance_groups():
    figure = plot_training(stock_history(25))
    assert [legend(axes) for axes in figure.axes] == [["reward"], ["entropy"], ["zero-variance groups"]]
    assert set(figure.axes[-1].lines[0].get_ydata()) == {0.3}


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


@pytest.mark.parametrize("step", [{}, {"step": None}])
def test_rows_without_a_step_are_left_out(step):
    stray = {"reward": 9.0, "snr/update_compute_fraction": 9.0} | step
    rows = [*history(25, 10), stray]
    assert svg(plot_training(rows)) == svg(plot_training(rows[:-1]))
    assert svg(plot_comparison({"a": rows}, {})) == svg(plot_comparison({"a": rows[:-1]}, {}))
    with pytest.raises(ValueError, match="has 1 rows, but none has a 'reward' to plot at its 'step'"):
        plot_training([stray])


def test_a_long_run_is_drawn_with_as_many_points_as_can_be_seen():
    rows = history(2000, 10)
    figure = plot_training(rows, "success")
    thin = figure.axes[0].lines[0]
    assert len(thin.get_xdata()) <= 600
    assert sum(thin.get_ydata()) / len(thin.get_ydata()) == pytest.approx(0.2, abs=1e-6)
    assert len(svg(figure)) < 400_000
    assert len(figure.axes[1].lines[0].get_xdata()) == 200  # measurements are all there


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
    assert 5 not in line(fractions, "completions kept").get_xdata()
    assert 6 not in line(reward, "reward").get_xdata()


def test_rewards_that_are_all_nan_are_said_to_be_so():
    figure = plot_training(history(3, None, reward=math.nan))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no finite reward"]
    assert legend(figure.axes[0]) == []


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 0.0}]])
def test_a_history_without_a_reward_is_refused(rows):
    with pytest.raises(ValueError, match=f"has {len(rows)} rows, but none has a 'reward'"):
        plot_training(rows)


# Several runs


RUNS = {"filtered": history(140, 10), "stock": stock_history(90), "plain": history(40, 10)}


def test_what_runs_have_in_common_is_compared_in_a_panel_each():
    figure = plot_comparison(RUNS, dict.fromkeys(RUNS, "success"))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    ends = {name: [max(line.get_xdata()) for line in axes.lines] for name, axes in panels.items()}
    assert ends == {
        "success": [140, 40],
        "reward": [140, 90, 40],  # as one run has no success
        "retrieval accuracy (dotted: chance)": [131, 131, 31, 31],  # each with its chance
        "entropy (nats per token)": [140, 90, 40],
        "fraction of completions kept": [140, 40],
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["filtered", "stock", "plain"]


@pytest.mark.parametrize("histories", [{}, {"a": [{"step": 1, "loss": 1.0}]}])
def test_a_comparison_of_nothing_is_refused(histories):
    with pytest.raises(ValueError, match="histories"):
        plot_comparison(histories, {})


def test_held_out_success_is_drawn_with_the_band_of_its_interval():
    curves = {
        "frozen_lake": held_out_curve("frozen_lake", num_prompts=256.0),
        "sokoban": held_out_curve("sokoban", [0]),
    }
    figure = plot_held_out(curves)
    (axes,) = figure.axes
    for drawn, curve in zip(axes.lines, curves.values(), strict=True):
        assert drawn.get_xydata().tolist() == [[point.step, point.success] for point in curve.points]
    band, alone = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {
        (point.step, bound) for point in curves["frozen_lake"].points for bound in (point.low, point.high)
    } <= corners
    assert alone.get_segments()[0].tolist() == [[0, 0.3 - 0.1], [0, 0.3 + 0.1]]  # an interval of one evaluation
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["frozen_lake (256 tasks), best 80% at step 140", "sokoban, best 30% at step 0"]
    with pytest.raises(ValueError, match="curves must hold at least one task, got none"):
        plot_held_out({})


# Measurements


def test_matrix_of_a_dependent_policy_has_a_bright_diagonal():
    figure = plot_matrix(measurement(8, 4, gain=0.2))
    (image,) = figure.axes[0].images
    values = torch.tensor(image.get_array())  # (32, 8)
    own = torch.arange(8).repeat_interleave(4)
    assert (values.argmax(dim=1) == own).all()
    assert (values.gather(1, own[:, None]) == 0).all()
    title = figure.axes[0].get_title(loc="left")
    assert "100%" in title and "chance 12.5%" in title


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
    "negative": [(0.3, -0.4, "step 10"), (0.02, 0.1, "step 20")],
}


def test_a_score_that_is_not_finite_counts_as_zero():
    (axes,) = plot_reward_variance([math.nan, 0.5, math.inf], [False, True, False]).axes
    assert heights(axes.patches[0]) == [0.5, 0, 0]


@pytest.mark.parametrize(
    ("scores", "kept", "message"),
    [([], None, "scores must hold at least one group"), ([0.1, 0.2], [True], "each of the 2 scores, got 1")],
)
def test_groups_that_do_not_fit_are_refused(scores, kept, message):
    with pytest.raises(ValueError, match=message):
        plot_reward_variance(scores, kept)


@pytest.mark.parametrize("points", PATHS.values(), ids=PATHS)
def test_quadrant_holds_all_points_and_names_its_ends(points):
    figure = plot_quadrant(points, upper_bound=2.77)
    (axes,) = figure.axes
    bound, path, *ends = axes.lines
    assert set(bound.get_ydata()) == {2.77}
    assert list(zip(*path.get_data(), strict=True)) == [point[:2] for point in points]
    assert legend(axes) == list(dict.fromkeys([points[0][2], points[-1][2]]))
    assert [(end.get_xdata()[0], end.get_ydata()[0]) for end in ends][-1] == points[-1][:2]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left <= x < right and bottom < y < top for x, y, _ in points)
    drawn = [axes.transData.transform(point[:2]) for point in points]
    assert not [text for text in axes.texts for point in drawn if extent(text).contains(*point)]
    with pytest.raises(ValueError, match="points must hold at least one"):
        plot_quadrant([], upper_bound=1.0)


@pytest.mark.parametrize("count", [8, 512])
def test_groups_are_drawn_from_the_largest_score_down_and_kept_ones_in_colour(count):
    scores, kept = groups(count, value=0.7)
    (axes,) = plot_reward_variance(scores, kept, score="reward_std").axes
    kept_bars, other_bars = axes.patches
    assert [max(pair) for pair in zip(heights(kept_bars), heights(other_bars), strict=True)] == sorted(
        scores, reverse=True
    )
    held = [score for score, keep in zip(scores, kept, strict=True) if keep]
    assert sorted(filter(None, heights(kept_bars))) == sorted(held)
    share = f"{sum(held) / sum(scores):.0%} of the sum"
    assert legend(axes) == [f"kept: {sum(kept)} of {count} groups, {share}", f"left out: {count - sum(kept)}"]
    assert axes.get_ylabel() == "reward std"
    shades = [sum(matplotlib.colors.to_rgb(bars.get_facecolor())) / 3 for bars in axes.patches]
    assert shades[1] - shades[0] > 0.25  # apart in greyscale
