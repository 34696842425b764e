"""external-data: weights kept in separate files are there, and inside the model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from runtime.onnx_file import external_files

from ..finding import Finding, Graph, Rule


def run(graph: Graph) -> Iterator[Finding]:
    for name in sorted(external_files(graph.path)):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield Finding(
                "external-data", "error", name, "the weights file lies outside the model's folder", "move it beside the model"
            )
        elif not (graph.path.parent / name).is_file():
            yield Finding("external-data", "error", name, "the weights file is missing", "copy it beside the model")


RULE = Rule("external-data", "weights in separate files are there and inside the model's folder", run)
