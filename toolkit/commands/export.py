"""edgekit export"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from ..console import note, print_json, say, size_text
from . import options

if TYPE_CHECKING:
    from exporters.export import ExportReport


@click.command()
@click.argument("source")
@options.output
@click.option(
    "--profile",
    help="portable: standard operators only. onnxruntime: fused attention, cache in place.  [default: onnxruntime for networks"
    " that generate text, else portable]",
)
@click.option("--opset", type=click.IntRange(18, 24), help="ONNX operator set.  [default: 20]")
@click.option("--fix", "fixed", multiple=True, metavar="AXIS=SIZE", help="A fixed size for a dynamic axis, e.g. batch=1.")
@click.option("--external-data", is_flag=True, help="Keep weights in a file of their own (always so above 2 GB).")
@click.option("--attention", is_flag=True, help="Add a graph of the attention to the source, where there is such.")
@click.option("--thorough", is_flag=True, help="Prove it at more sizes and on more texts.")
@options.settings
@options.force
@options.as_json
def export(
    source: str,
    output: str,
    profile: str | None,
    opset: int | None,
    fixed: tuple[str, ...],
    external_data: bool,
    attention: bool,
    thorough: bool,
    settings: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a network as a bundle, proved equal to PyTorch.

    SOURCE is a run, an architecture's name (fresh weights), a function that
    returns (module, example_inputs), or a .onnx file. A graph that disagrees
    with its original, or a decoder that breaks a law of decoding, is not
    written (exit 1).

    \b
    Examples:
      edgekit export runs/lenet -o lenet.bundle
      edgekit export gpt -o gpt.bundle --profile portable
      edgekit export my_model.py:build -o my.bundle --fix batch=1
      edgekit export someone.onnx -o theirs.bundle
    """
    from pathlib import Path

    from architectures.settings import parse_settings
    from runtime.bundle import MANIFEST
    from runtime.errors import OptionError
    from runtime.files import refuse_existing

    refuse_existing(Path(output), force=force, marker=MANIFEST)
    if source.lower().endswith(".onnx"):
        from exporters.adopt import adopt

        if settings or opset or profile or fixed or external_data or attention or thorough:
            raise OptionError(
                "--set, --opset, --profile, --fix, --external-data, --attention and --thorough are for networks; "
                "a .onnx file is what it is"
            )
        report = adopt(source, output, force=force, progress=note)
    else:
        from exporters.export import export as export_network
        from exporters.fix import fix_sizes
        from exporters.source import find_source
        from exporters.trace import DEFAULT_OPSET

        network = find_source(source, parse_settings(settings), profile=profile, attention=attention)
        report = export_network(
            fix_sizes(network, _sizes(fixed)),
            output,
            opset=opset or DEFAULT_OPSET,
            thorough=thorough,
            external_data=external_data,
            force=force,
            progress=note,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)


def _sizes(fixed: tuple[str, ...]) -> dict[str, int]:
    from runtime.errors import OptionError

    sizes = {}
    for text in fixed:
        name, _, size = text.partition("=")
        if not name or not (size.isascii() and size.isdecimal()):
            raise OptionError(f"--fix {text!r} is not understood; expected AXIS=SIZE, e.g. --fix batch=1")
        if name in sizes:
            raise OptionError(f"--fix {name} is given twice; give it once")
        sizes[name] = int(size)
    return sizes


def _show(report: ExportReport) -> None:
    for graph in report.graphs:
        if len(report.graphs) > 1:
            say(f"{graph.name}:")
        states = {state.output for state in graph.signature.states}
        shown = [name for name in graph.tolerance if name not in states]
        for name in shown:
            allowed = graph.tolerance[name].allowed
            say(f"{name}: error {report.worst(name):.2e} at most in {len(graph.cases)} cases, allowed {allowed:.2e}")
        if carried := [name for name in graph.tolerance if name in states]:
            worst = max(report.worst(name) / (graph.tolerance[name].allowed or 1) for name in carried)
            say(f"{len(carried)} states ({carried[0]} …): at most {worst:.2f} of what is allowed")
        sizes = "; ".join(str(case) for case in graph.cases)
        say(textwrap.fill(f"sizes tried: {sizes}", 80, subsequent_indent="  "))
    for law in report.laws:
        figures = f"not checked: {law.skipped}" if law.skipped else f"error {law.error:.2e}, allowed {law.allowed:.2e}"
        say(f"law: {law.law}: {figures}")
    for text in report.refused_by_reference:
        note(f"not tried, the original itself fails at {text}")
    about = f"{report.profile} profile, " if report.laws else ""
    say(f"bundle: {report.bundle.root} ({about}{size_text(report.bundle.graph_bytes)})")
