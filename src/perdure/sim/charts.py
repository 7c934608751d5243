"""Pictures as SVG text: lines over an axis, and stacked bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 132.0, 28.0, 42.0
BAR, GAP = 26.0, 12.0


@dataclass(frozen=True, slots=True)
class Line:
    """One series: `css` is its class, `label` stands at its end."""

    label: str
    css: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: (css class, words for the pointer, value) of each part, from left to right."""

    label: str
    parts: tuple[tuple[str, str, float], ...]
    note: str


def nice_step(span: float, count: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides `span` about `count` times."""
    if span <= 0:
        return 1.0
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 5, 10) if rough <= factor * power * (1 + 1e-9))


def ticks(top: float, count: int = 5) -> list[float]:
    """Round values from 0 to at most `top`."""
    step = nice_step(top, count)
    return [index * step for index in range(int(top / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A short form of a number."""
    return f"{value:,.10g}" if abs(value) < 1e7 else f"{value:.3g}"


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    height: float = 300.0,
    logarithmic: bool = False,
    y_scale: float = 1.0,
    y_top: float | None = None,
) -> str:
    """Lines over a linear or logarithmic x axis; y starts at 0 and is shown divided by `y_scale`."""
    xs = [x for line in lines for x, _ in line.points]
    top = y_top or max((y for line in lines for _, y in line.points), default=1.0) or 1.0
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM

    def place_x(x: float) -> float:
        if logarithmic:
            span = math.log(high / low) if high > low else 1.0
            return LEFT + inner_width * (math.log(x / low) / span if high > low else 0.5)
        return LEFT + inner_width * ((x - low) / (high - low) if high > low else 0.5)

    def place_y(y: float) -> float:
        return TOP + inner_height * (1 - y / (top * 1.02))

    parts = [_open(height, y_label)]
    for value in ticks(top / y_scale):
        y = place_y(value * y_scale)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, number(value), "end"))
    marks = sorted(set(xs)) if logarithmic else [low + value for value in ticks(high - low, 7)]
    for value in marks:
        parts.append(_text(place_x(value), height - BOTTOM + 18, number(value), "middle"))
    parts.append(_text(LEFT + inner_width / 2, height - 4, x_label, "middle"))
    parts.append(_text(LEFT - 54, 11, y_label))
    for line in lines:
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line {line.css}" points="{path}"/>')
        if logarithmic:
            parts.extend(
                f'<circle class="dot {line.css}" cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3"/>'
                for x, y in line.points
            )
    parts.extend(_end_labels(lines, place_y, height))
    parts.append("</svg>")
    return "".join(parts)


def _open(height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">'


def _text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _end_labels(lines: Sequence[Line], place_y: Callable[[float], float], height: float) -> list[str]:
    """Each line's name at its end, moved apart where lines end together."""
    ends = [(place_y(line.points[-1][1]), line) for line in lines if line.points]
    ends.sort(key=lambda end: end[0])
    placed: list[float] = []
    for wanted, _ in ends:
        placed.append(max(wanted, placed[-1] + 14) if placed else wanted)
    overflow = placed[-1] - (height - BOTTOM) if placed else 0.0
    if overflow > 0:
        for index in range(len(placed) - 1, -1, -1):
            limit = height - BOTTOM if index == len(placed) - 1 else placed[index + 1] - 14
            placed[index] = min(placed[index], limit)
    x = WIDTH - RIGHT
    return [
        f'<line class="leader" x1="{x}" y1="{wanted:.1f}" x2="{x + 12}" y2="{y:.1f}"/>'
        + _text(x + 16, y + 4, line.label, css=f"name {line.css}")
        for (wanted, line), y in zip(ends, placed, strict=True)
    ]


def stacked_bars(bars: Sequence[Bar], x_label: str) -> str:
    """Horizontal bars, all of the same total, with a note at the end of each."""
    height = TOP + len(bars) * (BAR + GAP) + BOTTOM
    total = max((sum(value for *_, value in bar.parts) for bar in bars), default=1.0) or 1.0
    inner = WIDTH - LEFT - 20 - RIGHT
    left = LEFT + 20
    parts = [_open(height, x_label)]
    for value in ticks(total):
        x = left + inner * value / total
        bottom = height - BOTTOM
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 16, number(value), "middle"))
    for index, bar in enumerate(bars):
        y = TOP + index * (BAR + GAP)
        middle = y + BAR / 2 + 4
        parts.append(_text(left - 10, middle, bar.label, "end", "name"))
        x = left
        for css, words, value in bar.parts:
            width = inner * value / total
            if width > 0:
                parts.append(
                    f'<rect class="{css}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR}">'
                    f"<title>{escape(words)}</title></rect>"
                )
            x += width
        parts.append(_text(left + inner + 10, middle, bar.note))
    parts.append(_text(left + inner / 2, height - 6, x_label, "middle"))
    parts.append("</svg>")
    return "".join(parts)
