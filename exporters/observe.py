"""Runs a graph with every intermediate tensor in view: what each node really gives at some sizes, and where it fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from .graph import copy_of

_FEW = 64  # integers of a tensor that are kept: shapes and indices, not data
_FAILED_NODE = re.compile(r"Name:'#(\d+)'")


@dataclass(frozen=True)
class Seen:
    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, ...] | None = None  # of small integer tensors


@dataclass(frozen=True)
class Observation:
    tensors: Mapping[str, Seen]
    failed: int | None = None  # index of the first node that could not run; what lies after it was not seen
    fault: str = ""


def observe(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> Observation:
    """Run the main graph node by node as it stands, without onnxruntime's own optimizations."""
    count, failed, fault = len(model.graph.node), None, ""
    while count:
        try:
            return Observation(_run(_bared(model, count), feeds), failed, fault)
        except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
            text = " ".join(str(error).split())
            place = _FAILED_NODE.search(text)
            if place is None or int(place[1]) >= count:
                return Observation({}, failed, fault or text)
            failed = count = int(place[1])
            fault = text
    return Observation({}, failed, fault)


def _bared(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """The first `count` nodes, numbered, with all their results as outputs."""
    bare = copy_of(model)
    del bare.graph.node[count:]
    del bare.graph.output[:]
    del bare.graph.value_info[:]  # exporters leave shapes there that are true at one size only
    for index, node in enumerate(bare.graph.node):
        node.name = f"#{index}"
        bare.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    return bare


def _run(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Seen]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {item.name for item in session.get_inputs()}
    values = session.run(names, {name: array for name, array in feeds.items() if name in taken})
    pairs = [*zip(names, values, strict=True), *feeds.items()]
    return {name: _seen(value) for name, value in pairs if isinstance(value, np.ndarray)}  # sequences are passed over


def _seen(array: NDArray[Any]) -> Seen:
    keep = array.dtype.kind in "iu" and array.size <= _FEW
    return Seen(array.shape, str(array.dtype), tuple(int(item) for item in array.reshape(-1)) if keep else None)
