"""edgekit check"""

from __future__ import annotations

import textwrap

import click

from ..console import print_json, say
from . import options


@click.command()
@click.argument("path", metavar="BUNDLE|.onnx")
@click.option(
    "--fail-on", type=click.Choice(["error", "warning"]), default="error", show_default=True, help="What makes the exit code 1."
)
@options.as_json
def check(path: str, fail_on: str, as_json: bool) -> int:
    """Find what will hurt on a device, and say how to fix it.

    Example: edgekit check lenet.bundle
    """
    from exporters.check import check as check_path

    report = check_path(path)
    if as_json:
        print_json(report.to_json())
    else:
        for finding in report.findings:
            place = f" {finding.node}:" if finding.node else ""
            say(_wrapped(f"{finding.severity:<7} [{finding.rule}]{place} {finding.reason}"))
            if finding.severity != "info":
                say(_wrapped(f"        fix: {finding.fix}"))
        count = report.count()
        say(f"{count['error']} errors, {count['warning']} warnings, {count['info']} remarks")
    bad = report.count()["error"] + (report.count()["warning"] if fail_on == "warning" else 0)
    return 1 if bad else 0


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent=" " * 8, break_long_words=False)
