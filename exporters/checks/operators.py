"""operators: opset and operators that a host may not have."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Graph, Rule
from ..graph import operators_of
from ..wiring import label, operator

_OLDEST, _NEWEST = 11, 22  # the range that the hosts in use (onnxruntime 1.20 and later, mobile and web builds) all run


def run(graph: Graph) -> Iterator[Finding]:
    for item in graph.model.opset_import:
        if item.domain in ("", "ai.onnx"):
            if item.version < _OLDEST:
                yield Finding(
                    "operators",
                    "warning",
                    "",
                    f"opset {item.version} is old: its quantized forms are missing",
                    f"convert it to opset {_OLDEST} or later with onnx.version_converter",
                )
            if item.version > _NEWEST:
                yield Finding(
                    "operators",
                    "warning",
                    "",
                    f"opset {item.version} is newer than many hosts run",
                    f"export with --opset {_NEWEST} or lower",
                )
    foreign = [name for name in operators_of(graph.model) if "::" in name]
    if foreign:
        yield Finding(
            "operators",
            "info",
            next(label(node) for node in graph.wiring.nodes if operator(node) == foreign[0]),
            f"{', '.join(foreign)}: not standard operators, so only some hosts run them",
            "use them only where the host is onnxruntime",
        )
    inventory = ", ".join(f"{count} {name}" for name, count in operators_of(graph.model).most_common())
    yield Finding("operators", "info", "", f"{sum(operators_of(graph.model).values())} nodes: {inventory}", "nothing to do")


RULE = Rule("operators", "opset and operators that hosts have", run)
