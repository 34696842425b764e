"""edgekit quantize"""

from __future__ import annotations

from typing import Any

import click

from ..console import note, number_text, print_json, say, size_text, table, time_text
from . import options


@click.command()
@click.argument("path", metavar="BUNDLE|.onnx")
@options.output
@click.option(
    "--scheme",
    required=True,
    metavar="NAME",
    help="int8-dynamic, int8-static, fp16, int8-weights or int4-weights; networks on text take the last two.",
)
@click.option(
    "--only", multiple=True, metavar="OPERATOR", help="Quantize this operator type only, e.g. Gemm; may be given several times."
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="OPERATOR",
    help="Leave this operator type as it is, e.g. Conv; may be given several times.",
)
@options.settings
@options.data
@click.option(
    "--max-drop",
    type=click.FloatRange(0),
    metavar="X",
    help="Largest loss of quality, in percent: points of accuracy, or relative growth of an error.  "
    "[default: 0.5 for accuracy, 2 for mse, 5 for agreement and for likelihood]",
)
@click.option(
    "--for-size", is_flag=True, help="Keep a result that is slower, and no second form of a decoder: only size matters."
)
@click.option("--batch", type=click.IntRange(1), help="Batch size to time at.  [default: 1, or the graph's own]")
@options.threads
@options.force
@options.as_json
def quantize(path: str, output: str, scheme: str, as_json: bool, threads: int | None, **choices: Any) -> int:
    """Make a bundle smaller; kept only if it measurably wins.

    The result is timed against the original and its quality measured. It is
    refused (exit 1, with the figures) when it is not smaller, when it is slower
    without --for-size, or when quality drops by more than --max-drop.

    \b
    Examples:
      edgekit quantize lenet.bundle --scheme int8-static -o q.bundle
      edgekit quantize lenet.bundle --scheme int8-static --only Gemm -o q.bundle
      edgekit quantize gpt.bundle --scheme int8-weights -o q.bundle
    """
    from exporters.quantize import MeasuredRefusal

    from ..quantization import quantize_path

    try:
        report = quantize_path(path, output, scheme=scheme, threads=options.thread_count(threads), progress=note, **choices)
    except MeasuredRefusal as refusal:
        if as_json:
            print_json(refusal.report.to_json())
        else:
            say(_table(refusal.report))
        raise
    if as_json:
        print_json(report.to_json())
    else:
        say(_table(report))
        for text in report.notes:
            say(text)
        for item in report.nodes:
            if not item.quantized:
                say(f"left in fp32: {item.node} ({item.operator}): {item.reason}")
        say(f"bundle: {output}")
    return 0


def _table(report: Any) -> str:
    from ..benchmark import ratio_text

    def score(value: float) -> str:
        return f"{number_text(value)} {report.unit}".strip()

    latency = [time_text(report.latency_before_us), time_text(report.latency_after_us)]
    change = f"drop {report.drop:.2f}" if report.unit == "%" else f"{report.drop:+.2f} %"
    rows = [
        ["size", size_text(report.bytes_before), size_text(report.bytes_after), f"x{report.size_ratio:.2f}"],
        [f"latency, batch {report.batch}", *latency, f"x{ratio_text(report.latency_ratio)}"],
        ["  the original twice", "", "", f"x{ratio_text(report.noise)}"],
        [report.metric, score(report.metric_before), score(report.metric_after), change],
    ]
    return table([report.label, "before", "after", "change"], rows)
