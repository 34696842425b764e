"""What `edgekit quantize --scheme auto` tried, as a page: the plot of all candidates, the table, and what every node became."""

from __future__ import annotations

from typing import Any

from ..console import size_text, time_text
from .page import environment, style
from .plot import Point, draw


def render_search(report: Any, name: str) -> str:
    """The whole page as text, of a SearchReport on the bundle of this name."""
    final = report.report
    return (
        environment()
        .get_template("search.html")
        .render(
            name=name,
            search=report,
            final=final,
            points=report.tried,
            plot=draw(_points(report), time_text, size_text),
            style=style(),
        )
    )


def _points(report: Any) -> list[Point]:
    final = report.report
    before = final.latency_before_us
    points = [Point("fp32", before, final.bytes_before, before, before, _quality(final.metric_before, final.unit), "reference")]
    for found in report.tried:
        if found.problem is not None or (found.label not in report.front and found.label != report.chosen):
            continue
        ratio = found.ratio
        low, high = ratio.low or ratio.median, ratio.high or ratio.median
        kind = "winner" if found.label == report.chosen else "kept" if found.drop <= final.max_drop else "refused"
        quality = _quality(found.score, final.unit)
        points.append(Point(found.label, before * ratio.median, found.bytes, before * low, before * high, quality, kind))
    return points


def _quality(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}".strip()
