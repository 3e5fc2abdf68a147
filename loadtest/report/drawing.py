"""How every picture is drawn and kept: as PNG, and as SVG that takes the colours of the page it stands in.

Kept here: the same document gives the same bytes, with no date and no random name in them; no text is read as
mathematics, so that no name can break a picture; nothing refers to anything outside.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvforge.process.installation import install_command
from kvforge.protocol.errors import Unavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#24292f", "#d0d7de"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b82f6", "#e8890c", "#16a373", "#e5484d", "#8b5cf6", "#8b98a9"
WIDTH_IN = 9.0
STYLE: Any = {
    "svg.hashsalt": "kvforge",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 100,
}
# Those of a picture must not meet those of another one on the same page.
_NAMES = re.compile(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)')
_OUTSIDE = re.compile(
    r"<metadata>.*?</metadata>|\s(?:xmlns|xmlns:\w+)=\"[^\"]*\"|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL
)
_SIZE = re.compile(r'<svg([^>]*?) width="[^"]*"([^>]*?)>')


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its file. alt: what somebody who cannot see it must know. svg: to be put into a page as it is."""

    name: str
    title: str
    alt: str
    caption: str
    svg: str
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """Everything is drawn within it. Raises Unavailable where the extra `loadtest` is missing."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        problem = f"pictures need the extra `loadtest` ({error}): {install_command('loadtest')}"
        raise Unavailable(problem) from error
    with mpl.rc_context(STYLE):
        yield


def draw(
    name: str,
    title: str,
    *,
    alt: str,
    caption: str,
    draws: Callable[[Any], None],
    panels: tuple[int, int] = (1, 1),
    height_in: float = 3.0,
    **subplots: Any,
) -> Picture:
    """One picture. draws: gets the axes, [rows] or [rows, columns] of them, or the one there is."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draws(figure.subplots(*panels, **subplots))
        svg = _svg(figure, name)
        figure.set_layout_engine("none")  # everything has its place by now, which took as long as drawing it
        return Picture(name, title, alt, caption, svg, _png(figure))


def log_axis(axes: Axes, which: str) -> None:
    """`x` or `y` becomes logarithmic, with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    # Over less than two decades a power of ten alone would leave the axis nearly bare.
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * max(low, 1e-12) else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes) -> None:
    """Above the axes, at the right: it hides nothing. Nothing where nothing has a label."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=8, borderaxespad=0.2, handlelength=1.4)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _svg(figure: Figure, name: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = _OUTSIDE.sub("", out.getvalue())
    text = _NAMES.sub(f"{name}-", text).replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return _SIZE.sub(r"<svg\1\2>", re.sub(r' height="[^"]*"(?=[^>]*viewBox)', "", text, count=1), count=1).strip()
