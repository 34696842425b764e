"""Options that several verbs share."""

from __future__ import annotations

from math import isnan
from typing import Any

import click


class Amount(click.FloatRange):
    """A number that something can be compared with."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if isnan(number):
            self.fail(f"{value!r} is no amount; write a number, e.g. 0.5", param, ctx)
        return number


THREADS = click.IntRange(1, 1024)  # onnxruntime starts as many as it is told to
output = click.option("-o", "--output", required=True, metavar="PATH", help="Where to write the result.")
force = click.option("--force", is_flag=True, help="Replace PATH if edgekit wrote it.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
settings = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be given several times."
)
data = click.option(
    "--data", metavar="PATH", help="Your own data: .csv, .tsv, .npz, .txt, or a folder of images, one folder a class."
)
threads = click.option("--threads", type=THREADS, help="Threads for onnxruntime and PyTorch.  [default: all available cores]")
device = click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda, cuda:1, tensorrt, openvino, … or auto."
)


def thread_count(threads: int | None) -> int:
    from runtime.machine import available_cpus

    return threads or available_cpus()
