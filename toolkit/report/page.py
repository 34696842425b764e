"""Turns a DeployReport into HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..console import number_text, size_text, time_text
from .plot import Point, draw

_HERE = Path(__file__).resolve().parent
_SIGN = b'<meta name="generator" content="edgekit">'


def environment() -> Any:
    """Where templates are found, and how they write figures."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {"size": size_text, "time": time_text, "estimate": _estimate, "number": _number}
    return found


def is_page(path: Path) -> bool:
    """Whether it is one of these pages."""
    try:
        return _SIGN in path.read_bytes()[:1000]
    except OSError:
        return False


def style() -> str:
    return (_HERE / "page.css").read_text(encoding="utf-8")


def render(report: Any, output: Path) -> str:
    """The whole page as text. `output` is the folder it will lie in, for the commands it shows."""
    winner = report.variant(report.winner)
    return (
        environment()
        .get_template("page.html")
        .render(
            report=report,
            winner=winner,
            fp32=report.variant("fp32"),
            output=str(output),
            plot=draw(_points(report), time_text, size_text),
            style=style(),
            machine=report.bench["machine"],
        )
    )


def _points(report: Any) -> list[Point]:
    points = []
    for item in report.variants:
        if item.latency is None or not item.bytes:
            continue
        kind = "winner" if item.name == report.winner else item.verdict
        quality = "" if item.metric is None else f"{_number(item.metric)} {report.unit}".strip()
        low, high = item.latency.low or item.latency.median, item.latency.high or item.latency.median
        points.append(Point(item.name, item.latency.median, item.bytes, low, high, quality, kind))
    return points


def _estimate(value: Any, digits: int = 2) -> str:
    if value is None:
        return "–"
    if value.low is None:
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else number_text(value)
