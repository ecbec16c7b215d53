"""Figures over training and of several runs: what is drawn in them is what was measured."""

import math

import pytest
from plotted import assert_nothing_overlaps, held_out_curve, history, legend, line, stock_history

from ragen2_trl.record.run import running_means
from ragen2_trl.report import plot_comparison, plot_held_out, plot_training, svg

pytestmark = pytest.mark.slow

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


def test_a_history_without_mutual_information_has_no_panel_of_it():
    figure = plot_training(history(25, None))
    assert [legend(axes)[0] for axes in figure.axes] == ["reward", "entropy", "completions kept"]


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
    assert 5 not in line(fractions, "completions kept").get_xdata()
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
        "fraction of completions kept": [140, 40],
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
    assert titles == ["success", "entropy (nats per token)", "fraction of completions kept"]
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


def test_names_of_collapses_at_the_same_step_do_not_lie_on_each_other():
    names = ["first", "second", "third", "fourth"]
    collapses = {name: (20 + number, "template collapse") for number, name in enumerate(names)}
    figure = plot_comparison({name: history(40, 10) for name in names}, {}, collapses)
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.texts]
    assert len(texts) == 4
    assert_nothing_overlaps(texts)


# Held-out success


def test_the_random_baseline_is_a_dotted_line():
    figure = plot_held_out({"sokoban": held_out_curve("sokoban", random_success=0.06)})
    (baseline,) = [one for one in figure.axes[0].lines if one.get_linestyle() == ":"]
    assert list(baseline.get_ydata()) == [0.06, 0.06]


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
