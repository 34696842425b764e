"""Numbers in a graph that were the example's: a size written into a node, and a Python loop that was unrolled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from .divergence import show_frame
from .intermediates import EagerRun, stack_of

_SIZES = {  # operator → the inputs that are sizes, lengths or positions
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Slice": (1, 2),
    "ConstantOfShape": (0,),
    "Range": (0, 1),
    "Pad": (1,),
    "Split": (1,),
    "Resize": (3,),
    "OneHot": (1,),
    "TopK": (1,),
    "Gather": (1,),
    "Concat": tuple(range(16)),  # shapes are put together by Concat
    "Div": (1,),
    **dict.fromkeys(("Mul", "Add", "Sub", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max"), (0, 1)),
}
_SHAPED = ("Add", "Sub", "Mul", "Div", "Where", "Concat", "And", "Or", "MatMul", "GRU", "LSTM", "RNN")  # take whole tables
_MOST_NUMBERS = 16  # more than that is a table, not a shape


@dataclass(frozen=True)
class Baked:
    """A constant that is the example's size of `axis`."""

    value: str  # what the node that takes it makes
    what: str  # "constant [3, -1] in 'val_5'"
    relation: str  # "holds", "is as long as" or "holds a multiple of" the size
    axis: str


@dataclass(frozen=True)
class Unrolled:
    """A line of Python that PyTorch ran another number of times at another size, and the graph holds as often as traced."""

    line: str
    traced: int
    needed: int


def constants_of(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """Every constant of the graph by name."""
    constants = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            is_tensor = isinstance(value, onnx.TensorProto)
            constants[node.output[0]] = numpy_helper.to_array(value) if is_tensor else np.asarray(value)
    return constants


def nodes_behind(model: onnx.ModelProto, value: str, known: Collection[str]) -> Iterator[onnx.NodeProto]:
    """The node that makes `value` and those before it, nearest first; values in `known` are right and end the search."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    queue, seen = [value], {value}
    while queue:
        name = queue.pop(0)
        node = makers.get(name)
        if node is None:
            continue
        yield node
        for earlier in node.input:
            if earlier and earlier not in seen and earlier not in known:
                seen.add(earlier)
                queue.append(earlier)


def baked_constant(
    model: onnx.ModelProto, value: str, known: Collection[str], example: Mapping[str, int], axes: Collection[str]
) -> Baked | None:
    """The constant behind `value` that is the size itself, else a table as long, else a multiple of the size."""
    constants = constants_of(model)
    for axis in axes:
        if value in constants and example[axis] in constants[value].shape:  # made of the example's size while tracing
            return Baked(value, _described(value, constants[value]), "is as long as", axis)
    nodes = list(nodes_behind(model, value, known))
    relations = (("holds", _holds_size), ("is as long as", _is_as_long), ("holds a multiple of", _holds_multiple))
    for relation, fits in relations:
        for node in nodes:
            for position, name in enumerate(node.input):
                for axis in axes:
                    if name in constants and fits(node, position, constants[name], example[axis]):
                        return Baked(node.output[0], _described(name, constants[name]), relation, axis)
    return None


def unrolled_loop(program: torch.export.ExportedProgram, at_example: EagerRun, at_failure: EagerRun) -> Unrolled | None:
    """The first line that live PyTorch runs more or less often than at the example's sizes, and the program as often."""
    nodes = Counter((stack_of(node.meta.get("stack_trace")), node.target) for node in program.graph.nodes)
    for (stack, function), traced in at_example.calls.items():
        needed = at_failure.calls[stack, function]
        in_program = max((count for (line, _), count in nodes.items() if line == stack), default=0)
        if needed != traced and in_program >= traced:  # fewer: an operator stands for the loop
            return Unrolled(show_frame(stack[-1]), traced, needed)
    return None


def _holds_size(node: onnx.NodeProto, position: int, constant: NDArray[Any], size: int) -> bool:
    return _may_be_size(node, position, constant) and bool((constant == size).any())


def _holds_multiple(node: onnx.NodeProto, position: int, constant: NDArray[Any], size: int) -> bool:
    is_shape = node.op_type in ("Reshape", "Expand", "ConstantOfShape", "Concat") and size > 1
    return is_shape and _may_be_size(node, position, constant) and bool(((constant > 0) & (constant % size == 0)).any())


def _is_as_long(node: onnx.NodeProto, position: int, constant: NDArray[Any], size: int) -> bool:
    return node.op_type in _SHAPED and size in constant.shape


def _may_be_size(node: onnx.NodeProto, position: int, constant: NDArray[Any]) -> bool:
    if position not in _SIZES.get(node.op_type, ()) or constant.size > _MOST_NUMBERS:
        return False
    return constant.dtype.kind in "iu" or (constant.dtype.kind == "f" and constant.size == 1)  # a mean divides by a float


def _described(name: str, constant: NDArray[Any]) -> str:
    if constant.size <= _MOST_NUMBERS:
        return f"constant {constant.tolist()} in {name!r}"
    return f"constant of shape {list(constant.shape)} in {name!r}"
