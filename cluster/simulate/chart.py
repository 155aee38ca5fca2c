"""Charts as SVG, with nothing but the standard library: panels side by side, of lines, points and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NamedTuple

WIDTH, HEIGHT = 440, 330
LEFT, TOP, INNER_WIDTH, INNER_HEIGHT = 64, 34, 350, 210
COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#8c8c8c", "#d98b5f")
STYLE = "text{font:12px sans-serif;fill:#333} .grid{stroke:#ddd} polyline{fill:none;stroke-width:1.8}"

Kind = Literal["line", "points", "steps"]


class Series(NamedTuple):
    """kind: joined points, single ones (labelled by `labels` where there are some), or a staircase."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Kind = "line"
    labels: Sequence[str] = ()


class Panel(NamedTuple):
    """log: of the y axis. Linear axes begin at 0 unless `from_zero` is False."""

    title: str
    x_label: str
    series: Sequence[Series]
    log: bool = False
    from_zero: bool = True


def chart(panels: Sequence[Panel]) -> str:
    """The whole picture, each panel with its legend."""
    parts = [_draw(panel, number * WIDTH) for number, panel in enumerate(panels)]
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}</svg>\n'
    )


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: Sequence[float]
    log: bool

    def share(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _axis(values: Sequence[float], *, log: bool, from_zero: bool) -> _Axis:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        low = 10.0 ** math.floor(math.log10(max(low, 1e-9)))
        high = 10.0 ** math.ceil(math.log10(max(high, low * 1.01)))
        decades = round(math.log10(high / low))
        ticks = [low * 10**decade * step for decade in range(decades) for step in (1, 2, 5)]
        return _Axis(low, high, [*ticks, high], True)
    low = min(0.0, low) if from_zero else low
    high = high if high > low else low + 1
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(step * unit for step in (1, 2, 5, 10) if step * unit >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return _Axis(first * step, last * step, [tick * step for tick in range(first, last + 1)], False)


class _Frame:
    """Where values of a panel lie in the picture."""

    def __init__(self, panel: Panel, offset: float) -> None:
        every = panel.series
        self.offset = offset
        self.x = _axis([x for one in every for x in one.x], log=False, from_zero=panel.from_zero)
        self.y = _axis([y for one in every for y in one.y], log=panel.log, from_zero=panel.from_zero)

    def place(self, x: float, y: float) -> tuple[float, float]:
        across, up = self.x.share(x), self.y.share(y)
        return self.offset + LEFT + across * INNER_WIDTH, TOP + (1 - up) * INNER_HEIGHT


def _draw(panel: Panel, offset: float) -> str:
    frame = _Frame(panel, offset)
    parts = [_text(offset + LEFT, 18, panel.title)]
    right = offset + LEFT + INNER_WIDTH
    for tick in frame.y.ticks:
        _, y = frame.place(frame.x.low, tick)
        parts.append(f'<line class="grid" x1="{offset + LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>\n')
        parts.append(_text(offset + LEFT - 6, y + 4, f"{tick:,.6g}", "end"))
    for tick in frame.x.ticks:
        x, y = frame.place(tick, frame.y.low)
        parts.append(_text(x, y + 16, f"{tick:,.6g}", "middle"))
    parts.append(_text(offset + LEFT + INNER_WIDTH / 2, TOP + INNER_HEIGHT + 34, panel.x_label, "middle"))
    for number, series in enumerate(panel.series):
        parts.append(_marks(frame, series, COLOURS[number % len(COLOURS)]))
    return "".join(parts) + _legend(panel, offset)


def _marks(frame: _Frame, series: Series, colour: str) -> str:
    places = [frame.place(x, y) for x, y in zip(series.x, series.y, strict=True)]
    if series.kind == "points":
        drawn = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>\n' for x, y in places]
        drawn += [_text(x + 7, y + 4, label) for (x, y), label in zip(places, series.labels, strict=False)]
        return "".join(drawn)
    if series.kind == "steps":
        places = [
            corner for before, after in pairwise(places) for corner in (before, (after[0], before[1]))
        ] + places[-1:]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" stroke="{colour}"/>\n'


def _legend(panel: Panel, offset: float) -> str:
    parts = []
    x, y = offset + LEFT, TOP + INNER_HEIGHT + 54
    for number, series in enumerate(panel.series):
        width = 34 + 7 * len(series.name)
        if x + width > offset + WIDTH and x > offset + LEFT:
            x, y = offset + LEFT, y + 16
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="9" fill="{colour}"/>')
        parts.append(_text(x + 20, y, series.name))
        x += width
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>\n'
