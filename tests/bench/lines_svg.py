"""Line charts as SVG, with nothing but the standard library: panels side by side, x in octaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 300
LEFT, TOP, INNER_WIDTH, INNER_HEIGHT = 50, 34, 310, 200
COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8c8c8c", "#8172b2", "#ccb974")


@dataclass
class Panel:
    """lines: y values by name, one for each x; y starts at 0."""

    title: str
    x_label: str
    x: list[float]
    lines: dict[str, list[float]]


def line_chart(panels: Sequence[Panel], y_label: str) -> str:
    """The whole picture; the first panel carries the legend."""
    parts = [_panel(panel, number * WIDTH, y_label) for number, panel in enumerate(panels)]
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    style = "text{font:12px sans-serif;fill:#333} .grid{stroke:#ddd} polyline{fill:none;stroke-width:2}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, offset: int, y_label: str) -> str:
    low, high = math.log(panel.x[0]), math.log(panel.x[-1])
    most = max(max(values) for values in panel.lines.values())
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if most / step <= 8)
    top = step * math.ceil(most / step)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / (high - low) if high > low else 0.5
        return offset + LEFT + across * INNER_WIDTH, TOP + (1 - y / top) * INNER_HEIGHT

    parts = [_text(offset + LEFT, 18, f"{panel.title}: {y_label}")]
    for value in range(0, top + 1, step):
        _, y = place(panel.x[0], value)
        right = offset + LEFT + INNER_WIDTH
        parts.append(f'<line class="grid" x1="{offset + LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>\n')
        parts.append(_text(offset + LEFT - 6, y + 4, str(value), "end"))
    for number in panel.x:
        x, y = place(number, 0)
        parts.append(_text(x, y + 16, f"{number:,.0f}", "middle"))
    parts.append(_text(offset + LEFT + INNER_WIDTH / 2, TOP + INNER_HEIGHT + 34, panel.x_label, "middle"))
    for values, colour in zip(panel.lines.values(), COLOURS, strict=False):
        points = [place(x, y) for x, y in zip(panel.x, values, strict=True)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{drawn}" stroke="{colour}"/>\n')
    return "".join(parts) + _legend(panel, offset)


def _legend(panel: Panel, offset: int) -> str:
    parts, x = [], offset + LEFT
    for name, colour in zip(panel.lines, COLOURS, strict=False):
        y = TOP + INNER_HEIGHT + 54
        parts.append(
            f'<line x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(x + 20, y, name))
        x += 34 + 7 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>\n'
