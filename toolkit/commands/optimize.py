"""edgekit optimize"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..console import note, print_json, progress_bar, say, size_text, table, time_text
from . import options

if TYPE_CHECKING:
    from exporters.optimize import GraphResult, OptimizeReport, PassResult


@click.command()
@click.argument("path", metavar="BUNDLE|.onnx")
@options.output
@options.force
@click.option("--portable", is_flag=True, help="Keep to standard operators, for hosts other than onnxruntime.")
@click.option("--no-timing", is_flag=True, help="Do not measure; keep every pass that gives the same answers.")
@click.option("--head", metavar="HEAD", help="argmax or top-k=8: the graph gives tokens instead of logits.")
@options.as_json
def optimize(path: str, output: str, force: bool, portable: bool, no_timing: bool, head: str | None, as_json: bool) -> None:
    """Simplify and fuse a bundle's graphs; every pass is verified on its own.

    A pass that changes the answers is reverted and named, and so is one that
    measures slower; one that found nothing to do says so.

    Example: edgekit optimize bert.bundle -o bert-fast.bundle
    """
    from exporters.heads import Head
    from exporters.optimize import optimize as optimize_bundle
    from runtime.bundle import MANIFEST
    from runtime.files import refuse_existing

    from ..opening import opened

    chosen = None if head is None else Head.parse(head)
    refuse_existing(Path(output), force=force, marker=MANIFEST)
    with opened(path, note) as bundle, progress_bar("pass") as update:
        report = optimize_bundle(
            bundle, output, force=force, portable=portable, timing=not no_timing, head=chosen, progress=update
        )
    if as_json:
        print_json(report.to_json())
        return
    _print(report, output)


def _print(report: OptimizeReport, output: str) -> None:
    for graph in report.graphs:
        results = [item for item in report.passes if item.graph == graph.graph]
        if len(report.graphs) > 1:
            say(f"{graph.graph}:")
        say(table(["pass", "nodes", "size", "latency", "outcome"], [_row(item) for item in results]))
        for item in results:
            if item.outcome.startswith("reverted"):
                say(f"{item.name} {item.outcome}")
            for reason in item.refusals:
                say(f"{item.name} left alone: {reason}")
        for line in _lines(graph):
            say(line)
        say("")
    if not report.changed:
        say("nothing to do: the graph is already lean")
    say(f"bundle: {output}")


def _row(item: PassResult) -> list[str]:
    slowest = max(item.pace, key=lambda pace: pace.ratio.median, default=None)
    latency = "" if slowest is None else f"x{slowest.ratio.median:.2f}"
    places = "1 place" if item.matches == 1 else f"{item.matches} places"
    outcome = f"{item.outcome} ({places})" if item.applied and item.matches else item.outcome.split(":")[0]
    return [item.name, f"{item.nodes_before} → {item.nodes_after}", size_text(item.bytes_after), latency, outcome]


def _lines(graph: GraphResult) -> list[str]:
    lines = [
        f"{graph.nodes_before} → {graph.nodes_after} nodes, {size_text(graph.bytes_before)} → {size_text(graph.bytes_after)}"
    ]
    return lines + [
        f"at {pace.sizes}: {time_text(pace.before.median)} → {time_text(pace.after.median)}, ratio {pace.ratio}"
        for pace in graph.pace
    ]
