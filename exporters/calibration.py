"""Ranges of activations, streamed: one batch is in memory at a time, and of each tensor only its running extremes are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import DataError

Feeds = Mapping[str, NDArray[Any]]


def activation_ranges(model: onnx.ModelProto, batches: Iterable[Feeds]) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of every float tensor that a node computes or an input brings, over all batches."""
    observed, names = _with_all_outputs(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # fused nodes would hide their insides
    session = ort.InferenceSession(observed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ranges: dict[str, tuple[float, float]] = {}
    count = 0
    for feeds in batches:
        count += 1
        outputs = dict(zip(names, session.run(names, dict(feeds)), strict=True))
        for name, values in {**feeds, **outputs}.items():
            if values.dtype != np.float32 or not values.size:
                continue
            low, high = float(values.min()), float(values.max())
            if not (np.isfinite(low) and np.isfinite(high)):
                raise DataError(f"calibration sample batch {count} gives NaN or infinite values in {name!r}; look at the data")
            known = ranges.get(name, (low, high))
            ranges[name] = (min(known[0], low), max(known[1], high))
    if not count:
        raise DataError("there is no calibration data; pass --data with at least one sample")
    return ranges


def _with_all_outputs(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    observed = onnx.shape_inference.infer_shapes(model)  # a new model; the one given is left as it is
    floats = {
        value.name
        for value in (*observed.graph.value_info, *observed.graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    names = [name for node in observed.graph.node for name in node.output if name in floats]
    present = {value.name for value in observed.graph.output}
    for name in names:
        if name not in present:
            observed.graph.output.append(onnx.ValueInfoProto(name=name))
    return observed, names
