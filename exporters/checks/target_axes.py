"""target-axes: sizes that vary where the target wants them fixed."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.feeds import BATCH

from ..finding import Finding, Graph, Rule
from ..wiring import label

_WANTS = {
    "mobile": "NNAPI and CoreML take fixed sizes only, and leave the rest to the CPU",
    "webgpu": "WebGPU graph capture, which saves most of the overhead of small steps, needs fixed sizes",
    "tensorrt": "TensorRT needs an optimization profile for them, and builds a new engine for sizes outside it",
}
_DEPENDS_ON_DATA = {"NonZero", "Compress", "Unique", "NonMaxSuppression", "StringSplit", "SequenceAt"}


def run(graph: Graph) -> Iterator[Finding]:
    wants = _WANTS.get(graph.target)
    if wants is None or graph.signature is None:
        return
    if axes := graph.signature.dynamic_axes:
        sizes = graph.sizes or {}
        fixes = " ".join(f"--fix {axis}={1 if axis == BATCH else sizes.get(axis, 'SIZE')}" for axis in axes if " " not in axis)
        profile = "; or give profiles: trt_profile_min_shapes, …_opt_shapes, …_max_shapes" if graph.target == "tensorrt" else ""
        reason = f"{', '.join(axes)} {'vary' if len(axes) > 1 else 'varies'}: {wants}"
        yield Finding(
            "target-axes", "warning", "", reason, f"fix what the device never varies: edgekit export {fixes}{profile}"
        )
    for node in graph.wiring.nodes:
        if node.op_type in _DEPENDS_ON_DATA:
            reason = f"the size of what {node.op_type} gives depends on the data: no size can be fixed below it"
            fix = "use a mask of the full size in the network: torch.where(…), top-k with a constant k"
            yield Finding("target-axes", "warning", label(node), reason, fix)


RULE = Rule("target-axes", "no varying size that the target cannot take", run)
