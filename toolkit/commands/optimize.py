"""edgekit optimize"""

from __future__ import annotations

from pathlib import Path

import click

from ..console import note, print_json, say, size_text, table
from . import options


@click.command()
@click.argument("path", metavar="BUNDLE|.onnx")
@options.output
@options.force
@options.as_json
def optimize(path: str, output: str, force: bool, as_json: bool) -> None:
    """Simplify a bundle's graph; every pass is verified on its own.

    A pass that changes the answers is reverted and named; one that found
    nothing to do says so.

    Example: edgekit optimize lenet.bundle -o lenet-lean.bundle
    """
    from exporters.optimize import optimize as optimize_bundle
    from runtime.bundle import MANIFEST
    from runtime.files import refuse_existing

    from ..opening import opened

    refuse_existing(Path(output), force=force, marker=MANIFEST)
    with opened(path, note) as bundle:
        report = optimize_bundle(bundle, output, force=force)
    if as_json:
        print_json(report.to_json())
        return
    rows = [
        [item.name, f"{item.nodes_before} → {item.nodes_after}", size_text(item.bytes_after), item.outcome]
        for item in report.passes
    ]
    say(table(["pass", "nodes", "size", "outcome"], rows))
    say("" if report.changed else "nothing to do: the graph is already lean")
    say(f"bundle: {output}")
