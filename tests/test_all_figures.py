"""What holds for every figure: it can be read wherever it is shown, and holds no text that does harm."""

import re
from xml.dom import minidom

import matplotlib
import matplotlib.colors
import matplotlib.image
import pytest
from plotted import (
    assert_nothing_overlaps,
    extent,
    groups,
    held_out_curve,
    history,
    measured_history,
    measurement,
    stock_history,
)

from ragen2_trl.report import (
    plot_arrows,
    plot_comparison,
    plot_held_out,
    plot_matrix,
    plot_proxies,
    plot_quadrant,
    plot_reward_variance,
    plot_training,
    save_figure,
    svg,
)
from ragen2_trl.report.plots import Arrow

pytestmark = pytest.mark.slow

HOSTILE = '<script>alert(1)</script> $\\frac{$ \x00\x1b[2J\u202e" id="x" & ' + "long " * 30
FIGURES = {
    "matrix": lambda: plot_matrix(measurement(8, 4, gain=0.2)),
    "quadrant": lambda: plot_quadrant([(0.3, 1.0, "step 10"), (0.2, 0.1, HOSTILE)], upper_bound=2.77),
    "reward variance": lambda: plot_reward_variance(*groups(16, value=0.7)),
    "proxies": lambda: plot_proxies(measured_history(200)),
    "proxies, long ticks": lambda: plot_proxies(
        [
            {key: value / 200 if key.startswith("mi/") else value for key, value in row.items()}
            for row in measured_history(200)
        ]
    ),
    "arrows": lambda: plot_arrows(
        {HOSTILE: Arrow((2, 1), (0.4, 0.5), (0.1, 0.6)), "b": Arrow((1, 1), (1, 1), (0, 0))}
    ),
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


def test_both_files_of_a_figure_are_written_beside_each_other(tmp_path):
    vectors, pixels = save_figure(plot_training(history(25, 10)), tmp_path / "new" / "run.v1")
    assert (vectors.name, pixels.name) == ("run.v1.svg", "run.v1.png")
    assert minidom.parse(str(vectors)).documentElement.namespaceURI == "http://www.w3.org/2000/svg"
    picture = matplotlib.image.imread(pixels)
    assert picture.shape[1] == 900
    assert (picture[0, 0, :3] == 1).all()  # white, also on a dark page
    assert picture[..., :3].std() > 0.01  # not one colour all over
