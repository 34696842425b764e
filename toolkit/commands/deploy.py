"""edgekit deploy"""

from __future__ import annotations

import click

from ..console import note, print_json, say
from . import options


@click.command()
@click.argument("source")
@options.output
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    metavar="NAME",
    help="Quantization to try; may be given several times.  [default: all that apply]",
)
@click.option("--max-drop", type=options.Amount(0), metavar="X", help="As for quantize.")
@options.data
@options.settings
@options.threads
@options.force
@options.as_json
def deploy(
    source: str,
    output: str,
    schemes: tuple[str, ...],
    max_drop: float | None,
    data: str | None,
    settings: tuple[str, ...],
    threads: int | None,
    force: bool,
    as_json: bool,
) -> int:
    """Do everything in order, and write one HTML report.

    Train (if SOURCE is a recipe), export, check, optimize, quantize, verify,
    evaluate and time. A scheme that is refused is tried on one operator type
    alone before it is given up. Exit 1 if the graph check found errors, or if
    none of the schemes named was kept.

    \b
    Examples:
      edgekit deploy lenet -o demo
      edgekit deploy runs/lenet -o demo
      edgekit deploy my_model.py:build -o my-report
    """
    from ..deployment import deploy as deploy_source
    from ..report.deploy_report import summary

    report = deploy_source(
        source,
        output,
        schemes=schemes,
        max_drop=max_drop,
        data=data,
        settings=settings,
        threads=options.thread_count(threads),
        force=force,
        progress=note,
    )
    if as_json:
        print_json(report.to_json())
    else:
        say(summary(report, output))
    wanted = [item for item in report.variants if item.name.split()[0] in schemes]
    failed = not report.check["passed"] or (bool(schemes) and not any(item.verdict == "kept" for item in wanted))
    return 1 if failed else 0
