"""shape-inference: shapes are consistent, and known for every tensor, so that memory can be planned ahead."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule


def run(graph: Graph) -> Iterator[Finding]:
    try:
        inferred = onnx.shape_inference.infer_shapes(graph.model, strict_mode=True, data_prop=True)
    except Exception as error:
        contrib = any(node.domain not in ("", "ai.onnx") for node in graph.model.graph.node)
        severity = "info" if contrib else "error"
        reason = " ".join(str(error).split())[:300]
        yield Finding(
            "shape-inference", severity, "", f"shapes cannot be inferred: {reason}", "look at the node named and its inputs"
        )
        return
    known = {
        value.name for value in (*inferred.graph.value_info, *inferred.graph.output) if value.type.tensor_type.HasField("shape")
    }
    unknown = [(node, name) for node in inferred.graph.node for name in node.output if name and name not in known]
    if unknown:
        node, name = unknown[0]
        yield Finding(
            "shape-inference",
            "info",
            node.name or node.op_type,
            f"the shape of {name!r} and {len(unknown) - 1} other tensors is known only when the graph runs",
            "fix the input sizes the device will use",
        )


RULE = Rule("shape-inference", "shapes are consistent and known ahead", run)
