"""edgekit export"""

from __future__ import annotations

import textwrap

import click

from ..console import note, print_json, say, size_text
from . import options


@click.command()
@click.argument("source")
@options.output
@click.option("--opset", type=click.IntRange(18, 24), help="ONNX operator set.  [default: 20]")
@options.settings
@options.force
@options.as_json
def export(source: str, output: str, opset: int | None, settings: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Write a network as a bundle, proved equal to PyTorch.

    SOURCE is a run, an architecture's name (fresh weights), a function that
    returns (module, example_inputs), or a .onnx file. A graph that disagrees
    with its original is not written (exit 1).

    \b
    Examples:
      edgekit export runs/lenet -o lenet.bundle
      edgekit export my_model.py:build -o my.bundle
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

        if settings or opset:
            raise OptionError("--set and --opset are for networks; a .onnx file has its own settings and operator set")
        report = adopt(source, output, force=force, progress=note)
    else:
        from exporters.export import export as export_network
        from exporters.source import find_source
        from exporters.trace import DEFAULT_OPSET

        report = export_network(
            find_source(source, parse_settings(settings)), output, opset=opset or DEFAULT_OPSET, force=force, progress=note
        )
    if as_json:
        print_json(report.to_json())
        return
    for name, tolerance in report.tolerance.items():
        say(f"{name}: error {report.worst(name):.2e} at most in {len(report.cases)} cases, allowed {tolerance.allowed:.2e}")
    sizes = "; ".join(str(case) for case in report.cases)
    say(textwrap.fill(f"sizes tried: {sizes}", 80, subsequent_indent="  "))
    for text in report.refused_by_reference:
        note(f"not tried, the original itself fails at {text}")
    say(f"bundle: {report.bundle.root} ({size_text(report.bundle.graph_bytes)})")
