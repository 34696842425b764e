"""frozen-axes: an axis that is declared dynamic really moves.

Declarations lie: a Reshape to a constant, or an unrolled recurrence, works at the example's size only. So the graph is run at
other sizes, and the shapes that come out are compared with the declared ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import numpy_helper

from runtime.errors import EdgekitError
from runtime.feeds import batch_axis_of, example_feeds
from runtime.session import Session
from runtime.signature import bind_sizes

from ..finding import Finding, Graph, Rule
from ..graph import missing_external

_SIZES = (2, 3, 5)


def run(graph: Graph) -> Iterator[Finding]:
    signature = graph.signature
    if signature is None or missing_external(graph.path):
        return
    if not signature.dynamic_axes:
        shown = ", ".join(map(str, signature.inputs))
        yield Finding(
            "frozen-axes",
            "info",
            "",
            f"every input size is fixed ({shown})",
            "export with a dynamic batch axis if the device varies it",
        )
        return
    try:
        session = Session(graph.path, signature, device="cpu", optimization="basic")
    except EdgekitError as error:
        yield Finding("frozen-axes", "error", "", str(error), "upgrade onnxruntime, or export for the version that is there")
        return
    axis = batch_axis_of(signature) or signature.dynamic_axes[0]
    for size in _SIZES:
        sizes = dict.fromkeys(signature.dynamic_axes, _SIZES[0]) | {axis: size}
        feeds = example_feeds(signature, sizes)
        try:
            outputs = session.run(feeds)
            for spec in signature.outputs:
                bind_sizes(spec, outputs[spec.name], dict(sizes))
        except EdgekitError as error:
            culprit = _constant_reshape(graph)
            yield Finding(
                "frozen-axes",
                "error",
                culprit or axis,
                f"axis {axis!r} is declared dynamic but fails at {size}: {str(error)[:200]}",
                "let the network read the size from its input (x.flatten(1), x.shape[0]) instead of a number",
            )
            return


def _constant_reshape(graph: Graph) -> str:
    """The first Reshape to a constant whose leading size is a number: the usual holder of a baked batch."""
    constants = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.model.graph.initializer if len(tensor.dims) == 1
    }
    for node in graph.model.graph.node:
        if node.op_type == "Reshape" and node.input[1] in constants:
            shape = constants[node.input[1]]
            if shape.size and shape[0] > 1:
                return f"{node.name or 'Reshape'} to {shape.tolist()}"
    return ""


RULE = Rule("frozen-axes", "axes declared dynamic really move", run)
