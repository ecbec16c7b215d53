"""Figures: the files are pictures, and what is drawn in them is what was measured."""

import math

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ragen2_trl.diagnosis import Measurement
from ragen2_trl.information import information_metrics
from ragen2_trl.reporting import plot_matrix, plot_quadrant, plot_training
from ragen2_trl.reporting.plots import REGIME_CORNERS


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, in order."""
    saved = []
    save = Figure.savefig

    def remember(figure, *args, **kwargs):
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    return saved


def assert_picture(path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 500
    assert pixels[..., :3].std() > 0.01  # not one colour all over


def assert_nothing_overlaps(figure, artists) -> None:
    figure.draw_without_rendering()  # at the resolution that extents are in
    boxes = [artist.get_window_extent() for artist in artists]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]


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
def test_matrix_is_a_picture_with_readable_ticks(num_prompts, group_size, gain, tmp_path, figures):
    plot_matrix(measurement(num_prompts, group_size, gain), tmp_path / "matrix.png")
    assert_picture(tmp_path / "matrix.png")
    axes = figures[0].axes[0]
    for axis, count in ((axes.xaxis, num_prompts), (axes.yaxis, num_prompts * group_size)):
        shown = [tick for tick in axis.get_major_ticks() if 0.5 <= tick.get_loc() <= count + 0.5]
        assert 1 <= len(shown) <= 10
        assert {tick.get_loc() % 1 for tick in shown} == {0.0}
        assert_nothing_overlaps(figures[0], [tick.label1 for tick in shown])


def test_matrix_of_a_dependent_policy_has_a_bright_diagonal(tmp_path, figures):
    plot_matrix(measurement(8, 4, gain=0.2), tmp_path / "matrix.png")
    (image,) = figures[0].axes[0].images
    values = torch.tensor(image.get_array())  # (32, 8)
    own = torch.arange(8).repeat_interleave(4)
    assert (values.argmax(dim=1) == own).all()
    assert (values.gather(1, own[:, None]) == 0).all()
    assert "100% of reasonings (chance 12.5%)" in figures[0].axes[0].get_title()


def test_matrix_frames_the_own_prompt_of_each_reasoning(tmp_path, figures):
    plot_matrix(measurement(4, 3, gain=0.2), tmp_path / "matrix.png")
    frames = [patch for patch in figures[0].axes[0].patches if isinstance(patch, Rectangle)]
    corners = [(frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) for frame in frames]
    assert corners == [(i + 0.5, 3 * i + 0.5, 1, 3) for i in range(4)]


def test_one_absurd_pair_does_not_set_the_colours_of_the_others(tmp_path, figures):
    measured = measurement(8, 4, gain=0.2)
    measured.cross_logps[0, (measured.prompt_index[0] + 1) % 8] = -1e6
    plot_matrix(measured, tmp_path / "matrix.png")
    low, high = figures[0].axes[0].images[0].get_clim()
    assert -1 < low < 0
    assert high == 0


def test_matrix_of_a_policy_blind_to_its_prompt_is_of_one_colour(tmp_path, figures):
    blind = measurement(4, 2, gain=0.0)
    blind.cross_logps[:] = blind.cross_logps[:, :1] + 1e-5 * torch.rand(8, 4)
    plot_matrix(blind, tmp_path / "matrix.png")
    image = figures[0].axes[0].images[0]
    assert image.norm(image.get_array()).min() > 0.99


# The plane of regimes


def test_quadrant_names_each_regime_in_its_corner(tmp_path, figures):
    plot_quadrant([(0.3, 2.7, "here")], tmp_path / "quadrant.png", upper_bound=2.77)
    assert_picture(tmp_path / "quadrant.png")
    corners = {text.get_text(): text.xy for text in figures[0].axes[0].texts if text.get_text() in REGIME_CORNERS}
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
}


@pytest.mark.parametrize("points", PATHS.values(), ids=PATHS)
def test_quadrant_holds_all_points_and_its_texts_do_not_overlap(points, tmp_path, figures):
    plot_quadrant(points, tmp_path / "quadrant.png", upper_bound=2.77)
    axes = figures[0].axes[0]
    bound, path, last = axes.lines
    assert set(bound.get_ydata()) == {2.77}
    assert list(zip(*path.get_data(), strict=True)) == [point[:2] for point in points]
    assert (last.get_xdata()[0], last.get_ydata()[0]) == points[-1][:2]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left < x < right and bottom < y < top for x, y, _ in points)
    assert_nothing_overlaps(figures[0], axes.texts)


def test_low_entropy_lies_on_the_left_whatever_the_largest_is(tmp_path, figures):
    plot_quadrant([(0.05, 1.0, "a")], tmp_path / "quadrant.png", upper_bound=2.77)
    left, right = figures[0].axes[0].get_xlim()
    assert (0.05 - left) / (right - left) < 0.25


def test_labels_are_not_read_as_formulas(tmp_path):
    plot_quadrant([(0.3, 1.0, r"$\frac{$")], tmp_path / "quadrant.png", upper_bound=2.77)
    assert_picture(tmp_path / "quadrant.png")


def test_quadrant_without_a_point_is_refused(tmp_path):
    with pytest.raises(ValueError, match="points must hold at least one"):
        plot_quadrant([], tmp_path / "quadrant.png", upper_bound=1.0)


# Training


def history(steps: int, measured_every: int | None, **changes) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": 0.1 * (step % 5), "snr/kept_fraction": 0.6, "entropy": 0.4}
        if measured_every and step % measured_every == 1:
            row |= {"mi/first_turn/retrieval_accuracy": 0.9, "mi/first_turn/retrieval_chance": 0.25}
        rows.append(row | changes)
    return rows


def test_a_history_without_mutual_information_has_two_panels(tmp_path, figures):
    plot_training(history(25, None), tmp_path / "training.png")
    assert_picture(tmp_path / "training.png")
    assert len(figures[0].axes) == 2
    assert [axes.get_ylabel() for axes in figures[0].axes] == ["training reward", "fraction"]


def test_measurements_are_drawn_as_they_are_beside_chance_and_entropy(tmp_path, figures):
    rows = history(25, 10)
    rows[10]["mi/first_turn/retrieval_accuracy"] = 0.5
    plot_training(rows, tmp_path / "training.png")
    assert_picture(tmp_path / "training.png")
    _, _, dependence, entropy = figures[0].axes
    accuracy, chance = dependence.lines
    assert list(accuracy.get_xdata()) == [1, 11, 21]
    assert list(accuracy.get_ydata()) == [0.9, 0.5, 0.9]
    assert accuracy.get_marker() == "o"
    assert (chance.get_linestyle(), set(chance.get_ydata())) == (":", {0.25})
    assert dependence.get_ylim()[0] == 0
    assert dependence.get_ylim()[1] >= 1
    assert entropy.lines[-1].get_linestyle() == "--"
    assert entropy.get_ylabel() == "nats per token"


@pytest.mark.parametrize("measured_every", [None, 10])
def test_legends_overlap_neither_data_nor_each_other_nor_scales(measured_every, tmp_path, figures):
    plot_training(history(25, measured_every), tmp_path / "training.png")
    legends = [axes.get_legend() for axes in figures[0].axes if axes.get_legend()]
    assert len(legends) == (3 if measured_every else 2)
    scales = [axes.yaxis.label for axes in figures[0].axes]
    scales += [tick.label2 for axes in figures[0].axes[3:] for tick in axes.yaxis.get_major_ticks()]
    for scale in scales:
        assert_nothing_overlaps(figures[0], [*legends, scale])
    assert_nothing_overlaps(figures[0], [*legends, figures[0].axes[0].patch])
    assert all(legend.get_window_extent().x1 <= figures[0].bbox.x1 for legend in legends)  # inside the picture


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_rows_without_a_finite_value_leave_gaps(value, tmp_path, figures):
    rows = history(25, 10)
    rows[0]["mi/first_turn/retrieval_accuracy"] = value
    rows[3]["entropy"] = value
    rows[4]["snr/kept_fraction"] = value
    plot_training(rows, tmp_path / "training.png")
    _, below, dependence, entropy = figures[0].axes
    assert list(dependence.lines[0].get_xdata()) == [11, 21]
    assert 4 not in entropy.lines[-1].get_xdata()
    assert 5 not in below.lines[-1].get_xdata()


def test_measurements_that_are_all_nan_leave_the_figure_as_without(tmp_path, figures):
    nothing = {"mi/first_turn/retrieval_accuracy": math.nan, "mi/first_turn/retrieval_chance": math.nan}
    plot_training(history(25, None, **nothing), tmp_path / "training.png")
    assert len(figures[0].axes) == 2


@pytest.mark.parametrize("entropy", [None, 0.0])
def test_measurements_need_no_entropy(entropy, tmp_path):
    plot_training(history(25, 10, entropy=entropy), tmp_path / "training.png")
    assert_picture(tmp_path / "training.png")


def test_a_history_without_a_reward_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 1 rows, but none has a 'reward'"):
        plot_training([{"step": 1, "loss": 0.0}], tmp_path / "training.png")
