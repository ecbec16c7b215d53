"""The look that all figures share, and their way into files and web pages.

Readable in print, in greyscale and for every kind of colour vision: colours are Okabe and Ito's, and no two lines
differ by their colour alone. Six inches wide with letters of 10 to 11 points, so that they stay legible on a phone.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec
from xml.dom import minidom

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ragen2_trl.record.files import write_text
from ragen2_trl.saved_state import replace_whole

P = ParamSpec("P")

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#808080"
LINE_COLOURS = (BLUE, ORANGE, GREEN, "#000000", "#CC79A7", "#E69F00", "#56B4E9")
# Four styles beside seven colours: the pairs repeat after 28 lines. Dots are left to chance levels.
LINE_STYLES = ("-", "--", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

LIGHT_GREY = "#B8B8B8"  # groups left out, far lighter than kept ones in greyscale too

WIDTH, LETTERS = 6.0, 60  # inches, and letters of a row of a legend
LINE_WIDTH, THIN = 1.8, 0.8  # points
GUIDE_LINE: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.4}  # chance, bounds, plain TRL

STYLE = {
    "font.family": "sans-serif",
    # The first ships with matplotlib; where the reader of a page lacks it, the second is as wide.
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "legend.borderpad": 0.1,
    "legend.columnspacing": 1.1,
    "legend.handletextpad": 0.5,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "lines.linewidth": LINE_WIDTH,
    "lines.markersize": 5,
    "figure.dpi": 150,
    "figure.facecolor": "white",  # also on a dark page
    "text.parse_math": False,  # names of runs may hold dollar signs
    "svg.fonttype": "none",  # letters stay letters: small, searchable, in any script
    "svg.hashsalt": "ragen2-trl",
}


def drawn_in_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Gives the figures of `draw` the common look, whatever the caller's settings are, and fixes their layout.

    Matplotlib makes ticks only when it draws and lays out again whenever it does: drawn once in here, a figure looks
    the same in every file.
    """

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style.context(["default", STYLE]):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine(None)  # with "none", which only looks like it, each file is drawn twice
        return figure

    return in_style


def look(number: int) -> dict[str, Any]:
    """Colour and line of the line with this number."""
    return {
        "color": LINE_COLOURS[number % len(LINE_COLOURS)],
        "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
    }


def make_panels(count: int, height: float, names: Sequence[str] = ()) -> tuple[Figure, Sequence[Axes]]:
    """A figure of its own, without pyplot: no global state, no display needed.

    Args:
        count: panels, one below the other with a common horizontal axis.
        height: of each in inches.
        names: of its lines, which `legend_outside` then writes above all panels.
    """
    rows = math.ceil(len(names) / _columns(names)) if names else 0
    figure = Figure(figsize=(WIDTH, count * height + 0.6 + 0.22 * rows), layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)
    return figure, list(panels[:, 0])


def legend_above(axes: Axes) -> None:
    """Names the lines of `axes` in a row above it, where they hide nothing; none without a named line."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), borderaxespad=0.2)


def legend_outside(figure: Figure, names: Sequence[str]) -> None:
    """Names the lines of all panels once, above them, in as many columns as there is room for."""
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    handles = [lines[name] for name in names if name in lines]
    figure.legend(handles=handles, loc="outside upper left", ncols=_columns(names), handlelength=3.2, borderpad=0.6)


def _columns(names: Sequence[str]) -> int:
    return max(1, min(3, len(names), LETTERS // (max(map(len, names)) + 5)))


def whole_numbers() -> MaxNLocator:
    """Up to nine ticks at whole numbers, also on a short axis."""
    return MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def number_steps(axes: Axes) -> None:
    """Names the horizontal axis, which has optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(whole_numbers())
    left, right = axes.get_xlim()
    if right - left < 1:  # a single step
        axes.set_xlim(left - 1, right + 1)


def plain_name(text: str, max_chars: int = 48) -> str:
    """`text` on one line, without characters that no picture or page may hold, its middle left out if it is long."""
    printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    half = max_chars // 2
    return printable if len(printable) <= max_chars else f"{printable[: half - 1]}…{printable[-half:]}"


def svg(figure: Figure, name: str = "") -> str:
    """The figure as an `<svg>` element to put into a page, titled with what it shows for those who do not see it.

    The same figure gives the same text. Ids are made from all of its content, so that figures do not clash in a page.

    Args:
        figure: from one of the plot functions.
        name: tells apart figures of one page that may be drawn alike; it is not shown.
    """
    file = BytesIO()
    with style.context(["default", STYLE]):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    prefix = hashlib.sha256(name.encode("utf-8", "backslashreplace") + file.getvalue()).hexdigest()[:12]
    document: Any = minidom.parseString(file.getvalue())
    root = document.documentElement
    for sheet in root.getElementsByTagName("style"):
        sheet.parentNode.removeChild(sheet)  # it would hold for the whole page; the root's attributes say the same
    root.setAttribute("stroke-linejoin", "round")
    root.setAttribute("stroke-linecap", "butt")
    for element in root.getElementsByTagName("*"):
        _prefix_ids(element, prefix)
    root.setAttribute("role", "img")
    root.setAttribute("aria-label", str(figure.get_label()))
    title = document.createElement("title")
    title.appendChild(document.createTextNode(str(figure.get_label())))
    root.insertBefore(title, root.firstChild)
    return root.toxml()


def save_figure(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Writes `path` with the endings .svg and .png, byte for byte the same for the same figure.

    Args:
        figure: from one of the plot functions.
        path: without a suffix; its folder is made if need be.

    Returns:
        The two files, in that order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    vectors, pixels = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    write_text(vectors, svg(figure) + "\n")
    with style.context(["default", STYLE]):
        replace_whole(pixels, functools.partial(figure.savefig, format="png", metadata={"Software": None}))
    return vectors, pixels


def _prefix_ids(element: minidom.Element, prefix: str) -> None:
    """Renames an element's id and its references to others'."""
    for key, value in list(element.attributes.items()):
        if key == "id":
            element.setAttribute(key, f"{prefix}-{value}")
        elif key == "xlink:href" and value.startswith("#"):
            element.setAttribute(key, f"#{prefix}-{value[1:]}")
        elif "url(#" in value:
            element.setAttribute(key, value.replace("url(#", f"url(#{prefix}-"))
