"""Scheme: a way to make weights smaller, and which nodes it would touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import onnx

from runtime.errors import OptionError, QuantizationRefused, UnknownName

from ..calibration import Feeds, Samples, Statistics
from ..graph import copy_of, graphs_of, opset_of

# CPUs with AVX2 and no VNNI add two products of uint8 and int8 in 16 bits, which overflow: on such a machine a plain MLP was
# 10–16 % wrong with eight-bit weights and 1.5 % with seven-bit ones. Seven bits cannot overflow on any CPU.
REDUCED_RANGE = True

FEWEST_WEIGHTS = 1024  # of a matrix product: quantizing fewer saves under 3 kB and costs a conversion of its input on every run
_MATRIX_PRODUCTS = ("Gemm", "MatMul")
HALVES = ("fp16", "bf16")  # schemes that convert no input
MIXED = "mixed"  # the precision of a bundle that several schemes made
_FIRST_WITHOUT = 4  # the IR version from which on a weight need not be an input too


Shapes = Mapping[str, tuple[int, ...]]  # of the float32 weights
Calibration = Callable[[str], Iterable[Feeds]]  # the samples of the graph of this name, again from the start at every call


@dataclass(frozen=True)
class NodeDecision:
    node: str
    operator: str
    weights: int
    quantized: bool
    reason: str
    scheme: str | None = None  # that took it
    cpu_features: tuple[str, ...] = ()  # a device without any of these may give other answers


@dataclass(frozen=True)
class Remark:
    """What a scheme found out about a node while it quantized it."""

    node: str
    text: str
    cpu_features: tuple[str, ...] = ()


def _ignore(said: Any) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """What a scheme is given: the model, the nodes it may touch, the samples to calibrate on, and its settings."""

    model: onnx.ModelProto
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    narrowed: bool  # operators were chosen; then only those are touched
    calibration: Samples | None
    settings: Any = None  # a dataclass of the kind that the scheme has
    many_rows: bool = False  # use the form for many rows at once, of a scheme that has one
    tied: frozenset[str] = frozenset()  # digests of the tables that some graph of the bundle also multiplies by
    statistics: Statistics | None = None  # of the same samples, as far as they have been gathered
    remark: Callable[[Remark], None] = _ignore
    progress: Callable[[str], None] = _ignore
    by_node: bool = False  # of the nodes that it could take, only some were chosen
    large_batch: bool = False  # many rows are of many texts, so that a recurrent layer too has many at every step


@dataclass(frozen=True)
class NoSettings:
    """Of a scheme that can be done in one way only."""


def _as_it_is(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _no_objection(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    return None


def none(model: onnx.ModelProto) -> Mapping[str, str]:
    return {}


def _in_the_only_way(node: onnx.NodeProto, shapes: Shapes, settings: Any) -> str:
    return "chosen"


@dataclass(frozen=True)
class Scheme:
    name: str
    description: str
    operators: tuple[str, ...]  # those whose weights it can make smaller
    needs_calibration: bool
    apply: Callable[[Request], onnx.ModelProto]
    prepare: Callable[[onnx.ModelProto], onnx.ModelProto] = _as_it_is  # before nodes are chosen
    why_not: Callable[[onnx.NodeProto, Shapes], str | None] = _no_objection  # a node with weights that it cannot take
    leaves: Callable[[onnx.ModelProto], Mapping[str, str]] = none  # names of nodes that it is slower on, and why
    how: Callable[[onnx.NodeProto, Shapes, Any], str] = _in_the_only_way  # it takes a node that it can take in several ways
    takes_text: bool = False  # answers of a row do not depend on its neighbours, and several graphs share weights
    opset: int = 1  # the first that has the operators it writes
    has_many_rows: bool = False  # has another form, faster on many rows at once
    settings: Any = NoSettings()  # a frozen dataclass: what `--set key=value` can change, at its defaults


def quantizable(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node has a unique name, which quantizers pick it by, and weights that some exporters write as
    Constant nodes are initializers, where quantizers look for them. None of these is an input too, as in old files."""
    copied = copy_of(model)
    taken = {node.name for node in copied.graph.node}
    seen: set[str] = set()
    for index, node in enumerate(copied.graph.node):
        if not node.name or node.name in seen:
            new = (f"{node.op_type}_{number}" for number in count(index))
            node.name = next(name for name in new if name not in taken | seen)
        seen.add(node.name)
    for node in [node for node in copied.graph.node if node.op_type == "Constant"]:
        tensor = next((item.t for item in node.attribute if item.name == "value"), None)
        if tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims:
            copied.graph.initializer.add().CopyFrom(tensor)
            copied.graph.initializer[-1].name = node.output[0]
            copied.graph.node.remove(node)
    weights = {tensor.name for tensor in copied.graph.initializer}
    for value in [value for value in copied.graph.input if value.name in weights]:
        copied.graph.input.remove(value)
        copied.ir_version = max(copied.ir_version, _FIRST_WITHOUT)
    return copied


def decide(scheme: Scheme, model: onnx.ModelProto, only: tuple[str, ...], exclude: tuple[str, ...]) -> list[NodeDecision]:
    """For each node with weights: will the scheme touch it, and why (not)."""
    return decide_all(scheme, {"": model}, only, exclude)[""]


def decide_all(
    scheme: Scheme,
    models: Mapping[str, onnx.ModelProto],
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    settings: Any = None,
) -> dict[str, list[NodeDecision]]:
    """As `decide`, for every graph of a bundle; one of them at least must have something to quantize."""
    if only and exclude:
        raise OptionError("--only and --exclude cannot be combined; use one of them")
    present = {node.op_type for model in models.values() for node in model.graph.node}
    for operator in (*only, *exclude):
        if operator not in present:
            raise UnknownName.of("operator in this graph", operator, present & set(scheme.operators) or present)
    if (oldest := min(opset_of(model) for model in models.values())) < scheme.opset:
        raise QuantizationRefused(
            f"{scheme.name} needs opset {scheme.opset} or later, and this graph has {oldest}; export the network again"
        )
    settings = scheme.settings if settings is None else settings
    decisions = {name: _decisions(scheme, model, only, exclude, settings) for name, model in models.items()}
    every = [decision for of_graph in decisions.values() for decision in of_graph]
    if not any(decision.quantized for decision in every):
        why = "; ".join(f"{item.node} ({item.operator}): {item.reason}" for item in every[:4]) or _why_nothing(models.values())
        raise QuantizationRefused(f"{scheme.name} has nothing to quantize here: {why}")
    return decisions


def _why_nothing(models: Iterable[onnx.ModelProto]) -> str:
    why = "no node has float32 weights it can quantize"
    inside = sum(len(graph.node) for model in models for graph in list(graphs_of(model))[1:])
    return f"{why}, and the {inside} nodes inside its If, Loop or Scan are left alone" if inside else why


def _decisions(
    scheme: Scheme, model: onnx.ModelProto, only: tuple[str, ...], exclude: tuple[str, ...], settings: Any
) -> list[NodeDecision]:
    shapes = {
        tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT
    }
    left = scheme.leaves(model)
    decisions = []
    for node in model.graph.node:
        weights = max((prod(shapes[name]) for name in node.input if name in shapes), default=0)
        if not weights or (node.op_type not in scheme.operators and node.op_type not in only):
            continue
        reason = None
        if node.op_type not in scheme.operators:
            reason = f"{scheme.name} has no quantized form of {node.op_type}"
        elif (only and node.op_type not in only) or node.op_type in exclude:
            reason = "left out by --only" if only else "left out by --exclude"
        elif weights < FEWEST_WEIGHTS and node.op_type in _MATRIX_PRODUCTS and scheme.name not in HALVES:
            reason = f"{weights} weights are too few to pay for converting its input"
        elif objection := scheme.why_not(node, shapes) or left.get(node.name):
            reason = objection
        taken = scheme.name if reason is None else None
        why = scheme.how(node, shapes, settings) if reason is None else reason
        decisions.append(NodeDecision(node.name, node.op_type, weights, taken is not None, why, taken))
    return decisions
