"""edgekit quantize"""

from __future__ import annotations

from pathlib import Path
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
    help="int8-dynamic, int8-static, fp16, bf16, int8-weights, int4-weights, or auto: the best mix, found by measuring.",
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
    type=options.Amount(0),
    metavar="X",
    help="Largest loss of quality, in percent: points of accuracy or of an error rate, or relative growth of mse or "
    "perplexity.  [default: 0.5 for accuracy and error rate, 2 for mse and perplexity, 5 for agreement and likelihood]",
)
@click.option("--max-size", metavar="X", help="Largest result, e.g. 2MB, or 0.3x of the original.")
@click.option("--max-latency", metavar="X", help="Longest call, e.g. 5ms, or 0.5x of the original's.")
@click.option("--time", "seconds", type=options.Amount(0), metavar="SECONDS", help="auto: stop trying after so long.")
@click.option("--report", metavar="FILE", help="auto: write what was tried, with a plot, as an HTML page; not after a refusal.")
@click.option(
    "--for-size", is_flag=True, help="Keep a result that is slower, and no second form of a decoder: only size matters."
)
@click.option("--batch", type=click.IntRange(1), help="Batch size to time at.  [default: 1, or the graph's own]")
@click.option(
    "--threads",
    type=options.THREADS,
    help="Threads for onnxruntime.  [default: all available cores; where calls are short, the number each is fastest with]",
)
@options.force
@options.as_json
def quantize(
    path: str,
    output: str,
    scheme: str,
    as_json: bool,
    threads: int | None,
    max_drop: float | None,
    max_size: str | None,
    max_latency: str | None,
    for_size: bool,
    report: str | None,
    **choices: Any,
) -> int:
    """Make a bundle smaller; kept only if it measurably wins.

    The result is timed against the original and its quality measured. It is
    refused (exit 1, with the figures) when it is not smaller, when it is slower
    without --for-size, or when quality drops by more than --max-drop.

    \b
    Examples:
      edgekit quantize lenet.bundle --scheme int8-static -o q.bundle
      edgekit quantize lenet.bundle --scheme int8-static --only Gemm -o q.bundle
      edgekit quantize gpt.bundle --scheme int8-weights -o q.bundle
      edgekit quantize gpt.bundle --scheme auto --report tried.html -o q.bundle
    """
    from exporters.quantize import MeasuredRefusal
    from exporters.search import AUTO, SearchReport
    from runtime.errors import OptionError

    from ..quantization import Limits, quantize_path

    if report is not None and scheme != AUTO:
        raise OptionError(f"--report is for --scheme auto; {scheme} prints all there is to say")
    if report is not None:
        _refuse_report(Path(report), Path(output), force=choices["force"])
    limits = Limits(max_drop, max_size, max_latency, for_size)
    try:
        found = quantize_path(path, output, scheme=scheme, limits=limits, threads=threads, progress=note, **choices)
    except MeasuredRefusal as refusal:
        if as_json:
            print_json(refusal.report.to_json())
        else:
            say(_table(refusal.report))
        raise
    if report is not None and isinstance(found, SearchReport):
        _write_page(found, Path(path), Path(report))
    if as_json:
        print_json(found.to_json())
    elif isinstance(found, SearchReport):
        _say_search(found, output)
    else:
        _say(found, found.nodes, output)
    return 0


def _say(report: Any, nodes: Any, output: str) -> None:
    say(_table(report))
    for text in report.notes:
        say(text)
    for item in nodes:
        if not item.quantized:
            say(f"left in fp32: {item.node} ({item.operator}): {item.reason}")
        elif item.operator in ("RNN", "GRU", "LSTM"):  # which can be quantized in several ways
            say(f"{item.node} ({item.operator}): {item.reason}")
    say(f"bundle: {output}")


def _say_search(found: Any, output: str) -> None:
    from ..benchmark import ratio_text

    unit = found.report.unit
    rows = []
    for item in sorted(found.tried, key=lambda item: (item.problem is not None, item.ratio.median, item.bytes)):
        if item.problem is not None:
            rows.append([item.label, "–", "–", "–", "cannot be used"])
            continue
        mark = "chosen" if item.label == found.chosen else "front" if item.label in found.front else ""
        score = f"{number_text(item.score)} {unit}".strip()
        rows.append([item.label, size_text(item.bytes), f"x{ratio_text(item.ratio)}", score, mark])
    say(table(["tried", "size", "latency", found.report.metric, ""], rows))
    for item in found.tried:
        if item.problem is not None:
            say(f"{item.label}: {item.problem}")
    if not found.complete:
        rest = f", and these schemes not at all: {', '.join(found.untried)}" if found.untried else ""
        say(f"time was up before everything had been tried{rest}")
    _say(found.report, found.nodes, output)


def _refuse_report(target: Path, output: Path, *, force: bool) -> None:
    """A search takes minutes: what it cannot be written to, or with, is told before."""
    from runtime.errors import OptionError, OutputExists
    from runtime.files import refuse_unwritable

    from ..report.page import environment, is_page

    environment()  # without what makes pages this ends with what to install
    if not target.parent.is_dir():
        raise OptionError(f"--report {target}: there is no folder {target.parent}; make it, or name another file")
    if target.is_dir():
        raise OptionError(f"--report {target} is a folder; name a file in it, e.g. {target / 'tried.html'}")
    if target.resolve() == output.resolve():
        raise OptionError(f"--report and -o are both {target}; name another file for the report, e.g. tried.html")
    if (target.exists() or target.is_symlink()) and not force:
        raise OutputExists(f"--report {target} already exists; choose another file, or pass --force to replace it")
    if (target.exists() or target.is_symlink()) and not is_page(target):
        raise OutputExists(f"--report {target} is no page that edgekit wrote; --force will not replace it; choose another file")
    refuse_unwritable(target)


def _write_page(found: Any, path: Path, target: Path) -> None:
    from runtime.files import write_file

    from ..report.search_page import render_search

    write_file(target, render_search(found, path.name.removesuffix(".bundle")))
    note(f"report: {target}")


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
