"""edgekit evaluate"""

from __future__ import annotations

import click

from ..console import print_json, progress_bar, say
from . import options


@click.command()
@click.argument("bundle")
@options.data
@options.device
@options.threads
@options.as_json
def evaluate(bundle: str, data: str | None, device: str, threads: int | None, as_json: bool) -> None:
    """Measure a bundle's task metric on held-out data.

    Without --data it is the test part of the data set the network was trained
    on. The file it was trained on, given with --data, is split the same way.
    Language models are judged by bits per character (bpc) and perplexity,
    encoder-decoders by error rates of tokens (per) and whole texts (wer) and
    BLEU of what they decode greedily.

    Example: edgekit evaluate lenet.bundle
    """
    from ..evaluation import evaluate as evaluate_bundle

    with progress_bar("evaluating") as update:
        report = evaluate_bundle(bundle, data, device=device, threads=threads, progress=update)
    if as_json:
        print_json(report.to_json())
        return
    for name, value in report.metrics.items():
        unit = " %" if name in ("accuracy", "per", "wer") else ""
        say(f"{name}: {value:.4g}{unit}")
    say(f"on {report.data}")
