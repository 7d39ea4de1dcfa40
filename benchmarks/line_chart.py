"""Line charts of percentages, as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 360, 260  # pixels of a panel's plot
LEFT, TOP, GAP, BOTTOM = 56, 34, 40, 44  # pixels around plots
LEGEND_ROW = 20  # pixels
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito's, for all eyes
DASHES = ("none", "6 3", "2 2", "8 3 2 3", "4 2", "10 4")  # curves that coincide can be told apart
Y_TICKS = range(0, 101, 20)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One of several plots with the same axes, side by side."""

    title: str
    curves: Mapping[str, Points]  # (x, y) in percent by name; names are the same in all panels


def line_chart(panels: Sequence[Panel], x_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    """Return an SVG document of panels whose x axis runs from the first of `x_ticks` to the last."""
    names = list(panels[0].curves)
    width = LEFT + len(panels) * (WIDTH + GAP)
    legend_top = TOP + HEIGHT + BOTTOM
    height = legend_top + LEGEND_ROW * len(names) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(14, TOP + HEIGHT / 2, y_label, f'transform="rotate(-90 14 {TOP + HEIGHT / 2})"'),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (WIDTH + GAP), x_ticks, x_label)
    for number, name in enumerate(names):
        y = legend_top + LEGEND_ROW * (number + 0.5)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 40}" y2="{y}" {_stroke(number)}/>')
        parts.append(_text(LEFT + 48, y + 4, name, anchor="start"))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: int, x_ticks: Sequence[float], x_label: str) -> list[str]:
    first, last = x_ticks[0], x_ticks[-1]

    def x_of(value: float) -> float:
        return round(left + (value - first) / (last - first) * WIDTH, 1)

    def y_of(value: float) -> float:
        return round(TOP + HEIGHT - value / 100 * HEIGHT, 1)

    parts = [_text(left + WIDTH / 2, TOP - 14, panel.title, 'font-weight="bold"')]
    for tick in Y_TICKS:
        y = y_of(tick)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + WIDTH}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{tick}", anchor="end"))
    parts += [_text(x_of(tick), TOP + HEIGHT + 16, f"{tick:g}") for tick in x_ticks]
    parts.append(_text(left + WIDTH / 2, TOP + HEIGHT + 34, x_label))
    for number, points in enumerate(panel.curves.values()):
        corners = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in points)
        parts.append(f'<polyline points="{corners}" fill="none" {_stroke(number)}/>')
    return parts


def _stroke(number: int) -> str:
    color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
    return f'stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'


def _text(x: float, y: float, text: str, attributes: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {attributes}>{escape(text)}</text>'
