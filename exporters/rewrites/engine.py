"""What a rewrite is, and how one is applied.

A rewrite is three small functions. `pattern` looks at one node, the last of what it seeks, and says what it found or None.
`condition` says why that may not be replaced after all, or None. `replacement` builds new nodes and says which old value
becomes which new one; it never touches the graph itself. New values take the old names, so that a graph before and after can
be compared value by value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from .nodes import CONTRIB, STANDARD


@dataclass(frozen=True)
class Context:
    """What a rewrite may use."""

    opset: int  # of the standard operators
    portable: bool  # standard operators only


class Found(Protocol):
    """What a pattern found: any dataclass with the last node of it."""

    @property
    def root(self) -> ir.Node: ...


F = TypeVar("F", bound=Found)


@dataclass(frozen=True)
class Rewrite(Generic[F]):
    name: str
    description: str
    pattern: Callable[[ir.Node], F | None]
    condition: Callable[[F, Context], str | None]
    replacement: Callable[[F, Context], Mapping[ir.Value, ir.Value]]
    standard: bool = True  # False: what it makes runs in onnxruntime only
    doubtful: bool = False  # often slower: kept only where it was measured to be faster


@dataclass(frozen=True)
class Rewritten:
    model: onnx.ModelProto
    matches: int
    refusals: tuple[str, ...]  # why places that looked right were left alone, each reason once with its count


def apply(rewrite: Rewrite[Any], proto: onnx.ModelProto, *, portable: bool = False) -> Rewritten:
    """Replace every match in the graph and in the graphs inside it."""
    model = ir.from_proto(proto)
    opset = next((model.opset_imports[domain] for domain in STANDARD if domain in model.opset_imports), 1)
    context = Context(opset, portable)
    matches, refused = 0, Counter[str]()
    for node in list(model.graph.all_nodes()):
        if node.graph is None:  # an earlier match took it
            continue
        found = rewrite.pattern(node)
        if found is None:
            continue
        if reason := rewrite.condition(found, context):
            refused[reason] += 1
            continue
        _replace(model, found.root, rewrite.replacement(found, context))
        matches += 1
    if matches:
        common.RemoveUnusedNodesPass()(model)
        model.graph.sort()
    reasons = tuple(reason if count == 1 else f"{reason} ({count} places)" for reason, count in refused.items())
    return Rewritten(ir.to_proto(model) if matches else proto, matches, reasons)


def weight(name: str, array: NDArray[Any]) -> ir.Value:
    """A new constant for a replacement to use."""
    return ir.Value(name=name, const_value=ir.tensor(array, name=name))


def _replace(model: ir.Model, root: ir.Node, values: Mapping[ir.Value, ir.Value]) -> None:
    new = _new_nodes(list(values.values()))
    taken = root.outputs[0].name
    for index, node in enumerate(new):
        node.name = f"{node.op_type}_{taken}" if index == len(new) - 1 else f"{node.op_type}_{taken}.{index}"
        for position, output in enumerate(node.outputs):
            output.name = f"{taken}.{node.op_type}.{index}.{position}"
        for value in node.inputs:
            if value is not None and value.const_value is not None and value.producer() is None and value.graph is None:
                value.name = _free_name(model, f"{taken}.{value.name}")
                value.const_value.name = value.name
                value.shape, value.dtype = value.const_value.shape, value.const_value.dtype
                model.graph.register_initializer(value)
        if node.domain == CONTRIB:
            model.opset_imports.setdefault(CONTRIB, 1)
    root.graph.insert_before(root, new)
    old_nodes = []
    for before, after in values.items():
        after.shape, after.type = after.shape or before.shape, after.type or before.type
        name, before.name = before.name, f"{before.name}.replaced"
        after.name = name
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        old_nodes.append(before.producer())
    for node in new:
        for output in node.outputs:
            if not output.uses() and not output.is_graph_output():
                output.name = ""  # an optional output that nobody asked for
    _remove_unused([*old_nodes, root])


def _new_nodes(values: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes that a replacement made, each after those it needs."""
    ordered: list[ir.Node] = []

    def visit(value: ir.Value | None) -> None:
        node = None if value is None else value.producer()
        if node is None or node.graph is not None or node in ordered:
            return
        for item in node.inputs:
            visit(item)
        ordered.append(node)

    for value in values:
        visit(value)
    return ordered


def _remove_unused(nodes: Sequence[ir.Node | None]) -> None:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        waiting += makers


def _free_name(model: ir.Model, name: str) -> str:
    free, count = name, 1
    while free in model.graph.initializers:
        free, count = f"{name}.{count}", count + 1
    return free
