"""stray-casts: Casts that change nothing, or that are undone by the next one."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..finding import Finding, Graph, Rule
from ..wiring import attribute, label

_FIX = "run: edgekit optimize; or drop the .to(…) in the network"


def run(graph: Graph) -> Iterator[Finding]:
    for node in graph.wiring.nodes:
        if node.op_type != "Cast":
            continue
        kind, before = attribute(node, "to"), graph.kinds.get(node.input[0])
        if before == kind:
            yield Finding("stray-casts", "warning", label(node), f"a Cast from {_name(kind)} to the same type", _FIX)
            continue
        first = graph.wiring.maker(node.input[0])
        if first is None or first.op_type != "Cast" or graph.kinds.get(first.input[0]) != kind:
            continue
        between = _name(attribute(first, "to"))
        if _holds(between, _name(kind)):
            reason = f"a Cast from {_name(kind)} to {between} that the next Cast undoes"
            yield Finding("stray-casts", "warning", label(first), reason, _FIX)


def _name(kind: int) -> str:
    return onnx.TensorProto.DataType.Name(kind).lower()


_WIDTHS = {
    "bool": 1,
    "uint8": 8,
    "int8": 8,
    "uint16": 16,
    "int16": 16,
    "float16": 16,
    "bfloat16": 16,
    "uint32": 32,
    "int32": 32,
}
_WIDTHS |= {"float": 32, "uint64": 64, "int64": 64, "double": 64}


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of `narrow` survives being a `wide`: only then is the pair of Casts without effect."""
    if narrow == "bool":
        return True
    float_wide, float_narrow = "float" in wide or wide == "double", "float" in narrow or narrow == "double"
    if float_narrow:
        return float_wide and _WIDTHS[wide] > _WIDTHS[narrow]
    if float_wide:
        return _WIDTHS[narrow] <= {"float16": 8, "bfloat16": 8, "float": 16, "double": 32}[wide]
    signed = narrow.startswith("int")
    return _WIDTHS[wide] > _WIDTHS[narrow] and (wide.startswith("int") or not signed)


RULE = Rule("stray-casts", "no Cast that changes nothing or is undone", run)
