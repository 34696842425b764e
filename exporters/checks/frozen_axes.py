"""frozen-axes: an axis that is declared dynamic really moves.

Declarations lie: a Reshape to a constant, or an unrolled recurrence, works at the example's size only. So the graph is run at
other sizes, and the shapes that come out are compared with the declared ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import numpy_helper

from runtime.errors import EdgekitError
from runtime.feeds import example_feeds
from runtime.session import Session
from runtime.signature import bind_sizes

from ..finding import Finding, Graph, Rule

_STEPS = (1, 2, 3)  # how far beyond its base size an axis is moved
_BASES = (2, 8, 32, 224)  # tried in turn where no size is known to work: images are large, batches small


def run(graph: Graph) -> Iterator[Finding]:
    signature = graph.signature
    if signature is None or not graph.complete:
        return
    if not signature.dynamic_axes:
        shown = ", ".join(map(str, signature.inputs))
        fix = "export with a dynamic batch axis if the device varies it"
        yield Finding("frozen-axes", "info", "", f"every input size is fixed ({shown})", fix)
        return
    try:
        session = Session(graph.path, signature, device="cpu", optimization="basic", log_level=4)
    except EdgekitError as error:
        fix = "upgrade onnxruntime, or export for the version that is there"
        yield Finding("frozen-axes", "error", "", str(error), fix)
        return
    known = [dict(graph.sizes)] if graph.sizes else [dict.fromkeys(signature.dynamic_axes, size) for size in _BASES]
    base = next((sizes for sizes in known if _runs(session, sizes)), None)
    if base is None:
        fix = "name the sizes it takes when it is exported"
        reason = f"it runs at none of the sizes tried ({_fault(session, known[0])}), so its axes are unproved"
        culprit = _constant_reshape(graph)
        yield Finding("frozen-axes", "error" if culprit or graph.sizes else "warning", culprit, reason[:300], fix)
        return
    for axis in signature.dynamic_axes:
        for step in (0, *_STEPS):
            size = base[axis] + step
            if fault := _fault(session, base | {axis: size}):
                yield Finding(
                    "frozen-axes",
                    "error",
                    _constant_reshape(graph) or axis,
                    f"axis {axis!r} is declared dynamic but fails at {size}: {fault[:200]}",
                    "let the network read the size from its input (x.flatten(1), x.shape[0]) instead of a number",
                )
                break


def _runs(session: Session, sizes: dict[str, int]) -> bool:
    try:
        session.run(example_feeds(session.signature, sizes))
    except EdgekitError:
        return False
    return True


def _fault(session: Session, sizes: dict[str, int]) -> str | None:
    """Why the graph does not run at these sizes, or gives shapes other than declared; None if it does well."""
    bound = dict(sizes)
    try:
        outputs = session.run(example_feeds(session.signature, sizes))
        for spec in session.signature.outputs:
            bind_sizes(spec, outputs[spec.name], bound)
    except EdgekitError as error:
        return str(error)
    return None


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
