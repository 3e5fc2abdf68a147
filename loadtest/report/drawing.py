"""Drawing of all pictures, as PNG and as SVG that adapts to the colours of its page.

Invariants: the same document gives the same bytes (no dates, no random ids); no text is parsed as mathematics, so names
cannot break a picture; nothing refers to external resources.
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
# Ids must be unique among all pictures of a page.
_NAMES = re.compile(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)')
_OUTSIDE = re.compile(
    r"<metadata>.*?</metadata>|\s(?:xmlns|xmlns:\w+)=\"[^\"]*\"|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL
)
_SIZE = re.compile(r'<svg([^>]*?) width="[^"]*"([^>]*?)>')


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture.

    Attributes:
        name: The name of its file.
        title: Its title.
        alt: Its text alternative.
        caption: Its caption.
        svg: SVG to embed into a page.
        png: PNG.
    """

    name: str
    title: str
    alt: str
    caption: str
    svg: str
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """Set the drawing style within a `with` block. Raises Unavailable if the extra `loadtest` is missing."""
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
    """Draw one picture. `draws` gets the axes: [rows], [rows, columns] or a single one."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draws(figure.subplots(*panels, **subplots))
        svg = _svg(figure, name)
        figure.set_layout_engine("none")  # the layout is final; computing it again takes as long as drawing
        return Picture(name, title, alt, caption, svg, _png(figure))


def log_axis(axes: Axes, which: str) -> None:
    """Make the axis `x` or `y` logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    # Below two decades, powers of ten alone would give too few labels.
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * max(low, 1e-12) else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes) -> None:
    """Add a legend above the axes at the right, if anything has a label."""
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
