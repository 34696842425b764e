"""edgekit check"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from ..console import print_json, say, size_text, table
from . import options

if TYPE_CHECKING:
    from exporters.check import CheckReport
    from exporters.finding import Finding

_TARGETS = ("cpu", "cuda", "mobile", "web", "webgpu", "tensorrt")
_SHOWN = 4  # places of a group of findings that are named; all are in --json


@click.command()
@click.argument("path", metavar="BUNDLE|.onnx")
@click.option("--target", type=click.Choice(_TARGETS), default="cpu", show_default=True, help="Where the graphs will run.")
@click.option(
    "--fail-on", type=click.Choice(["error", "warning"]), default="error", show_default=True, help="What makes the exit code 1."
)
@options.as_json
def check(path: str, target: str, fail_on: str, as_json: bool) -> int:
    """Find what will hurt on a device, and say how to fix it.

    Example: edgekit check lenet.bundle --target mobile
    """
    from exporters.check import check as check_path

    report = check_path(path, target)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    bad = report.count()["error"] + (report.count()["warning"] if fail_on == "warning" else 0)
    return 1 if bad else 0


def _print(report: CheckReport) -> None:
    for group in report.groups():
        first = group[0]
        say(_wrapped(f"{first.severity:<7} [{first.rule}]{_place(group)} {first.reason}"))
        if others := _others(group):
            say(_wrapped(f"        also: {others}"))
        if first.severity != "info":
            say(_wrapped(f"        fix: {first.fix}"))
    say("")
    say(_figures(report))
    count = report.count()
    say(f"\n{count['error']} errors, {count['warning']} warnings, {count['info']} remarks")


def _place(group: list[Finding]) -> str:
    first = group[0]
    parts = [
        f"×{len(group)}" if len(group) > 1 else "",
        f"{first.graph}:" if first.graph else "",
        f"{first.node}:" if first.node else "",
    ]
    return "".join(f" {part}" for part in parts if part)


def _others(group: list[Finding]) -> str:
    names = list(dict.fromkeys(finding.node for finding in group[1:] if finding.node))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _figures(report: CheckReport) -> str:
    """A small table of what each graph costs, and the sizes that it is stated at."""
    columns = ("graph", "parameters", "weights", "FLOPs", "activations", "cache/token")
    rows = [
        (
            name,
            _count(figures.parameters),
            size_text(figures.weight_bytes),
            "?" if figures.flops is None else _count(figures.flops),
            "?" if figures.peak_activation_bytes is None else size_text(figures.peak_activation_bytes),
            "-" if figures.kv_cache_bytes_per_token is None else size_text(figures.kv_cache_bytes_per_token),
        )
        for name, figures in report.figures.items()
    ]
    lines = [table(columns, rows)]
    for name, figures in report.figures.items():
        at = ", ".join(f"{axis}={size}" for axis, size in figures.sizes.items())
        remarks = [f"at {at}" if at else "at its fixed sizes", *figures.notes]
        lines.append(_wrapped(f"{name + ': ' if len(rows) > 1 else ''}{'; '.join(remarks)}"))
    return "\n".join(lines)


def _count(number: int) -> str:
    """61,706 → "61.7 k"; exact numbers are in --json."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
