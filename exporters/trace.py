"""One graph of a network → ONNX, by torch.export and torch.onnx; what they say when they fail is turned into one line."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from torch import nn

from runtime.errors import SourceError

from .explain import explain
from .explain import reason_of as reason_of
from .exportable import GraphSource
from .graph import SMALL_WEIGHT, clean, fold_weights, rename_outputs
from .recurrent_operators import recurrent_modules_as_operators
from .tensors import map_in_place
from .translations import translations_read_once
from .weights import LARGEST_INLINE

DEFAULT_OPSET = 20  # 23 and later use the Attention operator, which onnxruntime's CPU kernel rejects for some masks

_OUTPUT = "output of the graph: "  # before a name while tracing: the tracer's own values may have the name too


def trace(graph: GraphSource, name: str, *, opset: int) -> torch.onnx.ONNXProgram:
    """Trace with torch.export and translate; what the tracer says is turned into one line."""
    inputs = examples_of(graph)
    module, by_keyword = _traceable(graph)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        recurrent_modules_as_operators(),
        translations_read_once(),
    ):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # the tracer logs its whole graph before it fails
        try:
            program = torch.onnx.export(
                module,
                () if by_keyword else tuple(inputs.values()),
                kwargs=dict(inputs) if by_keyword else None,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=list(inputs),
                output_names=[_OUTPUT + name for name in graph.output_names],
                dynamic_shapes=_dynamic_shapes(graph, module, by_keyword),
            )
        except Exception as error:
            raise SourceError(f"{name} cannot be traced: {explain(error, graph)}") from error
        finally:
            logging.disable(before)
    assert program is not None
    return program


def model_of(program: torch.onnx.ONNXProgram, graph: GraphSource, folder: Path) -> onnx.ModelProto:
    """The traced program as a lean ONNX model.

    Weights that no message can hold are written to GRAPH.data in `folder`, and mapped from there.
    """
    weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    if weights > LARGEST_INLINE:
        file = f"{graph.name}.data"
        onnx_ir.external_data.unload_from_model(program.model, folder, file, size_threshold_bytes=SMALL_WEIGHT)
    model = program.model_proto
    map_in_place(model, folder)
    return clean(fold_weights(rename_outputs(model, _OUTPUT)))


def examples_of(graph: GraphSource) -> dict[str, torch.Tensor]:
    """The example inputs with at least two rows along every dynamic axis: the tracer takes 0 and 1 for constants."""
    grown = {}
    for name, tensor in graph.inputs.items():
        for axis in graph.dynamic_axes.get(name, {}):
            if tensor.shape[axis] < 2:
                tensor = torch.cat([tensor] * 2, dim=axis) if tensor.shape[axis] else tensor
        grown[name] = tensor.contiguous()
    return grown


class _ByPosition(nn.Module):
    """A module that takes **keywords, as one that takes positions: torch.export cannot give the former dynamic axes."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.module(**dict(zip(self.names, tensors, strict=True)))


def _traceable(graph: GraphSource) -> tuple[nn.Module, bool]:
    """The module to trace, and whether it is called by keyword."""
    parameters = inspect.signature(graph.module.forward).parameters.values()
    if graph.by_keyword and any(item.kind is item.VAR_KEYWORD for item in parameters):
        return _ByPosition(graph.module, tuple(graph.inputs)).eval(), False
    return graph.module, graph.by_keyword


def _dynamic_shapes(graph: GraphSource, module: nn.Module, by_keyword: bool) -> Any:
    """The dynamic axes in the nesting of forward's parameters, where *args is one tuple."""
    shapes = {name: dict(graph.dynamic_axes.get(name, {})) for name in graph.inputs}
    if by_keyword:
        return shapes
    parameters = inspect.signature(module.forward).parameters.values()
    plain = sum(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters)
    values = tuple(shapes.values())
    return (*values[:plain], values[plain:]) if len(values) > plain else values
