"""onnx-standard: the model is valid ONNX by the standard's own checker."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule


def run(graph: Graph) -> Iterator[Finding]:
    if not graph.complete:
        return  # the checker would stop at the missing file; the external-data rule names it
    try:
        onnx.checker.check_model(graph.model)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        yield Finding(
            "onnx-standard", "error", "", f"the ONNX checker refuses it: {first}", "export it again from its framework"
        )


RULE = Rule("onnx-standard", "the model is valid ONNX by the standard's checker", run)
