"""The size–latency–quality plot, drawn as SVG text: no library, no script, sharp at any zoom."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 96, 200, 24, 56
_LETTER = 7.0  # width of one of a label's, bold


@dataclass(frozen=True)
class Point:
    label: str
    x: float  # latency, µs
    y: float  # size, bytes
    low: float  # interval of x
    high: float
    quality: str
    kind: str  # "reference", "kept", "refused" or "winner"


def ticks(low: float, high: float) -> list[float]:
    """Round values on a logarithmic axis: powers of ten, and 2 and 5 times those where there is room for the labels."""
    factors = (1, 2, 5) if high / low < 60 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def draw(points: list[Point], x_text: Callable[[float], str], y_text: Callable[[float], str]) -> str:
    """SVG of size against latency on logarithmic axes; a bar through a point is its 95 % interval. Labels fit."""
    if not points:
        return ""
    right = max(RIGHT, 16 + round(_LETTER * max(len(_label(point)) for point in points)))
    width = WIDTH - RIGHT + right
    x_low, x_high = min(min(p.low, p.x) for p in points) / 1.35, max(max(p.high, p.x) for p in points) * 1.35
    y_low, y_high = min(p.y for p in points) / 1.5, max(p.y for p in points) * 1.5

    def place_x(value: float) -> float:
        return LEFT + (width - LEFT - right) * math.log(value / x_low) / math.log(x_high / x_low)

    def place_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / y_low) / math.log(y_high / y_low)

    parts = []
    for value in ticks(x_low, x_high):
        x = place_x(value)
        parts += [_line("grid", x, TOP, x, HEIGHT - BOTTOM), _text("tick", x, HEIGHT - BOTTOM + 18, x_text(value), "middle")]
    for value in ticks(y_low, y_high):
        y = place_y(value)
        parts += [_line("grid", LEFT, y, width - right, y), _text("tick", LEFT - 8, y + 4, y_text(value), "end")]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        _text("axis", (LEFT + width - right) / 2, HEIGHT - 12, "latency of one call (further left is faster)", "middle")
    )
    parts.append(f'<g transform="rotate(-90 16 {middle})">{_text("axis", 16, middle, "size (lower is smaller)", "middle")}</g>')
    for label_y, point in _spread([(place_y(p.y), p) for p in points]):
        x, y = place_x(point.x), place_y(point.y)
        parts.append(_line(f"interval {point.kind}", place_x(point.low), y, place_x(point.high), y))
        parts.append(_line("leader", x, y, width - right + 6, label_y))
        parts.append(f'<circle class="point {point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
        parts.append(_text(f"label {point.kind}", width - right + 10, label_y + 4, _label(point), "start"))
    head = f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="size against latency of every variant" class="plot">'
    return "\n".join([head, *parts, "</svg>"])


def _label(point: Point) -> str:
    return f"{point.label}  {point.quality}"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _spread(wanted: list[tuple[float, Point]], gap: float = 19.0) -> list[tuple[float, Point]]:
    """Label heights near their points' that do not overlap."""
    placed: list[tuple[float, Point]] = []
    for y, point in sorted(wanted, key=lambda item: item[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else max(y, TOP), point))
    overflow = max(0.0, placed[-1][0] - (HEIGHT - BOTTOM))
    return [(y - overflow, point) for y, point in placed]
