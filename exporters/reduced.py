"""How closely an original that rounds coarsely itself (int8, fp16) can be compared.

A float32 graph answers alike however it is run. A quantized one does not: onnxruntime computes Q → Conv → DQ in integers or in
floats as it sees fit, and a value that lies between two steps falls to one side or the other. So what such a graph may differ
by is measured, plain against optimized and against disturbed, and is never less than a step of its own precision.
"""

from __future__ import annotations

import numpy as np
import onnx

from runtime.bundle import Tolerance
from runtime.errors import ParityRefused
from runtime.verify import max_error

from .graph import operators_of, precision_of
from .parity import MARGIN, Arrays, Reference, refuse_random

_LARGEST_SHARE = 0.1  # of an output's size: a graph that rounds away more than that answers by chance


_NOISE_MARGIN = 2.0  # as for the graphs that are quantized here
# The least that is allowed, relative to the largest value: 8-bit steps, as many as the noise margin; and for narrow floats as
# many rounding errors as float32 graphs are allowed of theirs.
_FLOORS = {"int8": _NOISE_MARGIN / 255, "fp16": MARGIN * 2.0**-10, "bf16": MARGIN * 2.0**-7}


def coarse_precision(model: onnx.ModelProto) -> str | None:
    """ "int8", "fp16" or "bf16" if the graph computes in it, else None."""
    names = operators_of(model)
    if any("Quantize" in name or "QLinear" in name or name.endswith("Integer") for name in names):
        return "int8"
    edges = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    precision = "fp16" if onnx.TensorProto.FLOAT16 in edges else precision_of(model)
    return precision if precision in ("fp16", "bf16") else None


def reduced_tolerance(
    precision: str, plain: Reference, alternatives: tuple[Reference, ...], cases: list[Arrays]
) -> dict[str, Tolerance]:
    """For each output: twice the noise between `plain` and its alternatives, but no less than the precision's own floor."""
    noise: dict[str, float] = {}
    scale: dict[str, float] = {}
    exact: set[str] = set()
    for inputs in cases:
        answer = plain(inputs)
        refuse_random(answer, plain(inputs))
        others = [run(inputs) for run in alternatives]
        for name, values in answer.items():
            if values.dtype.kind == "f" and np.isnan(values).any():
                raise ParityRefused(f"output {name!r} has NaN values in the original itself, so nothing can be compared")
            finite = np.abs(values[np.isfinite(values)].astype(np.float64))
            scale[name] = max(scale.get(name, 0.0), float(np.max(finite, initial=0.0)))
            errors = [max_error(other[name], values) for other in others if other[name].shape == values.shape]
            noise[name] = max(noise.get(name, 0.0), *errors, 0.0)
            if values.dtype.kind == "b":
                exact.add(name)
    return {name: _tolerance(name, precision, noise[name], scale[name], name in exact) for name in noise}


def _tolerance(name: str, precision: str, measured: float, scale: float, exact: bool) -> Tolerance:
    if exact and not measured:
        return Tolerance(0.0, 0.0, "booleans must be equal")
    if measured > _LARGEST_SHARE * scale:
        raise ParityRefused(
            f"output {name!r} changes by {measured:.2e} between two ways to run the same {precision} graph, and its values "
            f"reach only {scale:.2e}: nothing can be proved of it; adopt the float32 original and quantize that"
        )
    floor = _FLOORS[precision] * scale
    text = (
        f"the larger of {_NOISE_MARGIN:g} x {measured:.2e} (the original plain against optimized and disturbed) "
        f"and {floor:.2e} ({_FLOORS[precision]:.2g} of the largest value, for {precision})"
    )
    return Tolerance(max(_NOISE_MARGIN * measured, floor), measured, text)
