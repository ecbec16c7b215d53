"""Draw README's chart, docs/lossless.png, from the stored measurements of `lossless`.

    python scripts/draw_lossless.py

Bars are updates of `lossless`, the line is plain TRL's.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `ragen2_trl` of this checkout

from matplotlib.figure import Figure  # noqa: E402

from ragen2_trl.report.style import BLUE, ORANGE, drawn_in_style  # noqa: E402

MEASURED = ROOT / "research" / "benchmarks" / "results" / "lossless.md"
DRAWN = ROOT / "docs" / "lossless.png"
ROW = re.compile(r"^\| (.+?) \| (0\.\d+) \|(?: [^|]+ \|){2} ([\d.]+) \(([\d.]+) to ([\d.]+)\)", re.MULTILINE)
SHAPES = {  # of the stored table, by tokens of a prompt and of a completion
    "agent, long prompts": "agent: prompts of 1,024 tokens,\n128 written",
    "agent, one turn": "agent: 512 and 128",
    "agent, five turns": "agent, five turns: 512 and 250",
    "short maths": "maths: 100 and 60",
    "maths": "maths: 100 and 250",
}
DEAD = {"0.00": ("none", "#9DC3E2"), "0.50": ("half", BLUE), "0.75": ("three quarters", "#003A5C")}
HEIGHT = 0.27  # of a bar, where shapes are 1 apart


def measured() -> dict[tuple[str, str], tuple[float, float, float]]:
    """Ratio of update times and its interval, by shape and share of dead groups."""
    found = ROW.findall(MEASURED.read_text(encoding="utf-8"))
    return {(shape, dead): (float(mean), float(low), float(high)) for shape, dead, mean, low, high in found}


@drawn_in_style
def draw() -> Figure:
    ratios = measured()
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for place, (dead, (label, colour)) in enumerate(DEAD.items()):
        heights = [row + (place - 1) * HEIGHT for row in range(len(SHAPES))]
        means, lows, highs = zip(*(ratios[shape, dead] for shape in SHAPES), strict=True)
        spread = [[mean - low for mean, low in zip(means, lows, strict=True)]]
        spread += [[high - mean for mean, high in zip(means, highs, strict=True)]]
        line = {"ecolor": "#444444", "elinewidth": 1.2}
        axes.barh(heights, means, HEIGHT, xerr=spread, color=colour, label=label, error_kw=line)
        for height, mean, high in zip(heights, means, highs, strict=True):
            axes.text(high + 0.01, height, f"{mean:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=ORANGE)
    axes.text(0.99, -0.62, "plain TRL", color=ORANGE, ha="right", va="bottom")
    axes.set(yticks=range(len(SHAPES)), yticklabels=SHAPES.values(), xlim=(0, 1.05), ylim=(len(SHAPES) - 0.5, -0.95))
    axes.set_xlabel("time of one update, as a fraction of TRL's")
    axes.grid(visible=False, axis="y")
    axes.legend(title="groups with equal rewards", loc="lower right", bbox_to_anchor=(0.94, 0), title_fontsize=10)
    return figure


if __name__ == "__main__":
    draw().savefig(DRAWN, metadata={"Software": None})
