"""external-data: weights kept in separate files are there, whole, and inside the model's folder."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.onnx_file import external_files

from ..finding import Finding, Graph, Rule


def run(graph: Graph) -> Iterator[Finding]:
    folder = graph.path.parent
    faults = 0
    for name in sorted(external_files(graph.path)):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            fault, fix = "the weights file lies outside the model's folder", "move it beside the model"
        elif not (folder / name).is_file():
            fault, fix = "the weights file is missing", "copy it beside the model"
        else:
            continue
        faults += 1
        yield Finding("external-data", "error", name, fault, fix)
    if not graph.complete and not faults:
        yield Finding("external-data", "error", "", "a weights file is shorter than the model says", "get the files again")


RULE = Rule("external-data", "weights in separate files are there, whole, and inside the model's folder", run)
