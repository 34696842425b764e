"""What a person sees in the terminal: results on stdout, progress on stderr, within 80 columns where that can be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import click


def say(text: str, end: str = "\n") -> None:
    """A result."""
    click.echo(text + end, nl=False)


def note(text: str) -> None:
    """Progress, or a remark that is not the result."""
    click.echo(text, err=True)


def print_json(document: Any) -> None:
    click.echo(json.dumps(_finite(document), indent=1, default=str))


def _finite(value: Any) -> Any:
    """With null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(str(row[column])) for row in (headers, *rows)) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        cells = [
            str(cell).ljust(width) if index == 0 else str(cell).rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, rows)])


def size_text(count: float) -> str:
    """12,345 → "12.3 kB"; units of 1000, as on a data sheet."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def time_text(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.3g} µs"
    if microseconds < 1e6:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds / 1e6:.3g} s"


def number_text(value: float) -> str:
    """A metric: two decimals, or four digits where it is huge."""
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.4g}"


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, a plain line now and then elsewhere. Call it with (done, total, remark)."""
    if sys.stderr.isatty():
        with _bar(label) as update:
            yield update
    else:
        yield _lines(label)


@contextmanager
def _bar(label: str) -> Iterator[Callable[..., None]]:
    with click.progressbar(
        length=1, label=label, file=sys.stderr, show_pos=True, width=16, item_show_func=lambda item: item or ""
    ) as bar:

        def update(done: int, total: int, remark: str = "") -> None:
            bar.length = total
            bar.update(done - bar.pos, remark)

        yield update


def _lines(label: str) -> Callable[..., None]:
    printed = [0]

    def update(done: int, total: int, remark: str = "") -> None:
        tenth = done * 10 // total
        if tenth > printed[0] or (remark and done == 1):
            printed[0] = max(tenth, printed[0])
            note(f"{label} {done}/{total}{'  ' + remark if remark else ''}")

    return update
