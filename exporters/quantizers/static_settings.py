"""What can be chosen of int8-static, and what of it depends on the weights and the activations of a product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx

from runtime.errors import OptionError, QuantizationRefused

from ..calibration import Activations, Statistics
from ..graph import opset_of
from ..tensors import array_of
from ..wiring import attribute
from .ranges import METHODS, MINMAX, PERCENTILE, Range, ranges_of
from .saturation import EXACT, FULL, can_saturate, kernel_rows, quantize_weight
from .scheme import Remark, Request

_USUAL_PERCENTILE = 99.99
_SCALES_BY_AXIS = 13  # the opset from which on DequantizeLinear has an axis
TYPES = ("u8s8", "s8s8")
AUTO, ALWAYS, NEVER = "auto", "always", "never"


@dataclass(frozen=True)
class StaticSettings:
    ranges: str = MINMAX
    percentile: float = _USUAL_PERCENTILE  # of the values that lie within the range, with ranges=percentile
    per_channel: bool | None = None  # a scale for each output of a weight; None: where it pays
    types: str = "u8s8"  # of activations and weights
    reduce_range: str = ALWAYS  # weights of seven bits: auto, where a CPU without VNNI could saturate

    def __post_init__(self) -> None:
        for key, known in (("ranges", METHODS), ("types", TYPES), ("reduce_range", (AUTO, ALWAYS, NEVER))):
            value = getattr(self, key)
            if value not in known:
                raise OptionError(
                    f"setting {key!r} is {value!r}, expected one of: {', '.join(known)}; e.g. --set {key}={known[0]}"
                )
        if not 50 <= self.percentile < 100:
            raise OptionError(f"setting 'percentile' is {self.percentile:g}, expected 50 or more and less than 100, e.g. 99.9")
        if self.percentile != _USUAL_PERCENTILE and self.ranges != PERCENTILE:
            raise OptionError(
                f"setting 'percentile' is for ranges={PERCENTILE}, and ranges is {self.ranges}; add --set ranges={PERCENTILE}"
            )


def by_channel(request: Request, usual: bool) -> bool:
    """Whether weights have a scale for each output: as it is wanted, or else as is usual where operators can take it."""
    wanted, opset = request.settings.per_channel, opset_of(request.model)
    if wanted and opset < _SCALES_BY_AXIS:
        raise QuantizationRefused(
            f"per_channel=true needs opset {_SCALES_BY_AXIS} or later, and this graph has {opset}; leave per_channel out, or "
            "export the network again"
        )
    return (usual and opset >= _SCALES_BY_AXIS) if wanted is None else wanted


def observed(request: Request, tensors: Iterable[str], products: Iterable[onnx.NodeProto]) -> dict[str, Activations]:
    """The activations that ranges are made of; of the inputs of `products` also what saturation is told by."""
    assert request.calibration is not None
    settings: StaticSettings = request.settings
    axes: dict[str, set[int]] = {name: set() for name in tensors}
    if settings.reduce_range != ALWAYS:
        for node in products:
            axes.setdefault(node.input[0], set()).add(_input_axis(node))
    statistics, counted = request.statistics or Statistics(), settings.ranges != MINMAX
    return statistics.of(request.model, axes, request.calibration, counted=counted, progress=request.progress)


def ranges_for(settings: StaticSettings, found: Mapping[str, Activations]) -> dict[str, Range]:
    return ranges_of(found, settings.ranges, settings.percentile)


def flat_products(products: Iterable[onnx.NodeProto], found: Mapping[str, Activations]) -> frozenset[str]:
    """The names of those whose input has two axes."""
    return frozenset(node.name for node in products if node.op_type != "Conv" and found[node.input[0]].axes == 2)


def _input_axis(node: onnx.NodeProto) -> int:
    """The axis of a product's input that its sums run along."""
    return 1 if node.op_type == "Conv" else -1


def output_axis(node: onnx.NodeProto) -> int:
    """The axis of a product's weight that its outputs lie along."""
    return 0 if node.op_type == "Conv" or (node.op_type == "Gemm" and attribute(node, "transB", 0)) else 1


def reduced_products(
    request: Request,
    products: Iterable[onnx.NodeProto],
    found: Mapping[str, Activations],
    ranges: Mapping[str, Range],
    per_channel: Callable[[onnx.NodeProto], bool],
) -> frozenset[str]:
    """The names of the products whose weights take seven bits; of others that need a CPU's help it is told."""
    chosen = list(products)
    settings: StaticSettings = request.settings
    if settings.reduce_range == ALWAYS:
        return frozenset(node.name for node in chosen)
    weights = {tensor.name: tensor for tensor in request.model.graph.initializer}
    reduced = set()
    for node in chosen:
        highest = found[node.input[0]].highest[_input_axis(node)]
        axis = output_axis(node)
        weight = array_of(weights[node.input[1]])
        numbers, _ = quantize_weight(weight, FULL, axis if per_channel(node) else None)
        if node.op_type == "Conv":
            rows, highest = kernel_rows(numbers, highest)
        else:
            rows = numbers if axis == 1 else numbers.T
        if not can_saturate(rows, highest, ranges[node.input[0]]):
            continue
        if settings.reduce_range == AUTO:
            reduced.add(node.name)
            request.remark(Remark(node.name, "seven-bit weights: eight could saturate on CPUs without VNNI"))
        else:
            request.remark(Remark(node.name, "can saturate on CPUs without VNNI", EXACT))
    return frozenset(reduced)
