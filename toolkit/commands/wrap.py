"""edgekit wrap"""

from __future__ import annotations

import click

from ..console import note, print_json, say, size_text
from . import options


@click.command()
@click.argument("bundle")
@options.output
@click.option("--beams", type=int, default=1, show_default=True, help="Beam search with so many texts; 1 is greedy.")
@click.option("--max-new-tokens", type=int, help="Most tokens where a caller does not say.  [default: what fits, at most 256]")
@options.force
@options.as_json
def wrap(bundle: str, output: str, beams: int, max_new_tokens: int | None, force: bool, as_json: bool) -> None:
    """Put the whole generation into one graph, for hosts without a decoding loop.

    Encoder, decoder and the choice of tokens become one ONNX graph that takes a
    prompt and gives a text. It is refused (exit 1) unless it gives the texts of
    the loop outside the graph. Quantize first, then wrap.

    Example: edgekit wrap g2p.bundle -o g2p-one.bundle --beams 4
    """
    from pathlib import Path

    from exporters.targets.wrap import wrap as wrap_bundle
    from runtime.bundle import MANIFEST, Bundle
    from runtime.files import refuse_existing

    refuse_existing(Path(output), force=force, marker=MANIFEST)
    report = wrap_bundle(Bundle.open(bundle), output, beams=beams, max_new_tokens=max_new_tokens, force=force, progress=note)
    if as_json:
        print_json(report.to_json())
        return
    how = "greedy" if beams == 1 else f"{beams} beams"
    ties = f", {report.ties} of them up to ties within noise" if report.ties else ""
    say(f"{report.texts} texts equal those of the loop outside the graph ({how}){ties}; scores differ by {report.error:.1e}")
    say(f"size {size_text(report.bytes_before)} → {size_text(report.bytes_after)}; {report.goldens} texts travel as goldens")
    say(f"bundle: {output}")
