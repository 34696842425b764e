"""Network → bundle. The graph is compared with PyTorch before anything is written; one that differs is not written."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from runtime.bundle import Bundle, GoldenEntry, GraphEntry, Manifest, Tolerance, lineage_step, pack_golden, write_bundle
from runtime.errors import ParityRefused, SourceError
from runtime.session import Session
from runtime.signature import GraphSignature

from .graph import MODEL_FILE, clean, precision_of, requirements_of, signature_of
from .parity import Arrays, Case, compare_cases, derive_tolerance, fresh_inputs, fuzz_cases, torch_reference
from .source import Exportable

GRAPH = "model"
DEFAULT_OPSET = 20  # 23 and later use the Attention operator, which onnxruntime's CPU kernel rejects for some masks
_GOLDENS = 3
_GOLDEN_BYTES = 8 << 20  # a golden is a proof to carry, not a data set
_MIN_SIZES = 3  # fresh sizes an axis must have been tried at before it may be called dynamic

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExportReport:
    bundle: Bundle
    cases: tuple[Case, ...]
    tolerance: Mapping[str, Tolerance]
    refused_by_reference: tuple[str, ...]  # sizes at which the original itself fails, which proves nothing either way

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle.root),
            "passed": True,
            "bytes": self.bundle.graph_bytes,
            "tolerance": {name: vars(tolerance) for name, tolerance in self.tolerance.items()},
            "cases": [
                {"sizes": dict(case.sizes), "errors": {item.output: item.error for item in case.comparisons}}
                for case in self.cases
            ],
            "refused_by_reference": list(self.refused_by_reference),
        }

    def worst(self, output: str) -> float:
        return max(item.error for case in self.cases for item in case.comparisons if item.output == output)


def export(
    network: Exportable,
    target: str | Path,
    *,
    opset: int = DEFAULT_OPSET,
    force: bool = False,
    progress: Progress = lambda step: None,
) -> ExportReport:
    """Write `network` as a bundle at `target`, proved equal to PyTorch."""
    progress("tracing the network")
    model = to_onnx(network, opset=opset)
    signature = signature_of(model)
    _refuse_frozen_axes(network, signature)
    _refuse_other_task(network, signature)
    progress("comparing with PyTorch")
    examples = {name: tensor.numpy() for name, tensor in _examples(network).items()}
    reference = torch_reference(network)
    inputs, skipped = _runnable_cases(network, signature, examples, reference)
    tolerance = derive_tolerance(reference, torch_reference(network, torch.float64), [feeds for _, feeds in inputs])
    session = Session(model.SerializeToString(), signature, device="cpu")
    cases = compare_cases(session, reference, tolerance, inputs)
    refuse_failures(network.name, cases)
    progress("writing the bundle")
    goldens = choose_goldens(cases)
    manifest = Manifest(
        name=network.name,
        task=network.task,
        precision=precision_of(model),
        graphs={GRAPH: GraphEntry(MODEL_FILE, signature)},
        goldens=tuple(GoldenEntry(GRAPH, name) for name in goldens),
        tolerance={GRAPH: tolerance},
        requirements=requirements_of(model),
        lineage=lineage_step(
            "export", None, source=dict(network.source), opset=opset, torch=torch.__version__, onnx=onnx.__version__
        ),
        labels=network.labels,
        preprocessing=network.preprocessing,
        data=network.data,
    )
    bundle = write_bundle(target, manifest, {MODEL_FILE: model.SerializeToString(), **goldens}, force=force)
    return ExportReport(bundle, tuple(cases), tolerance, skipped)


def to_onnx(network: Exportable, *, opset: int) -> onnx.ModelProto:
    """Trace with torch.export and translate; what the tracer says is turned into one line."""
    inputs = _examples(network)
    module, by_keyword = _traceable(network)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
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
                output_names=list(network.output_names),
                dynamic_shapes=_dynamic_shapes(network, module, by_keyword),
            )
        except Exception as error:
            raise SourceError(f"{network.name} cannot be traced: {_advice(error)}") from error
        finally:
            logging.disable(before)
    assert program is not None
    return clean(program.model_proto)


def choose_goldens(cases: list[Case]) -> dict[str, bytes]:
    """The first few cases that fit, as files. In the order they were tried: small batches at the example's other sizes."""
    goldens: dict[str, bytes] = {}
    room = _GOLDEN_BYTES
    for case in cases:
        if len(goldens) == _GOLDENS or (goldens and _bytes_of(case) > room):
            break
        room -= _bytes_of(case)
        goldens[f"goldens/{GRAPH}-{len(goldens)}.npz"] = pack_golden(case.inputs, case.expected)
    return goldens


def refuse_failures(name: str, cases: list[Case]) -> None:
    """Raise ParityRefused for the smallest failing case."""
    failed = [case for case in sorted(cases, key=_bytes_of) if not case]
    if not failed:
        return
    worst = next(item for item in failed[0].comparisons if not item)
    raise ParityRefused(
        f"{name} was not written: the graph disagrees with the original in {len(failed)} of {len(cases)} cases; "
        f"smallest: at {failed[0]}, output {worst.output!r}: {worst.problem} (allowed {worst.allowed:.2e})"
    )


def _examples(network: Exportable) -> dict[str, torch.Tensor]:
    """The example inputs with at least two rows along every dynamic axis: the tracer takes 0 and 1 for constants."""
    grown = {}
    for name, tensor in network.inputs.items():
        for axis in network.dynamic_axes.get(name, {}):
            if tensor.shape[axis] < 2:
                tensor = torch.cat([tensor] * 2, dim=axis) if tensor.shape[axis] else tensor
        grown[name] = tensor.contiguous()
    return grown


def _runnable_cases(
    network: Exportable, signature: GraphSignature, examples: Mapping[str, NDArray[Any]], reference: Callable[[Arrays], Arrays]
) -> tuple[list[tuple[dict[str, int], Arrays]], tuple[str, ...]]:
    """The fuzz cases that PyTorch itself can run, and a note on those it cannot."""
    axes: dict[str, int] = {}
    for name, entry in network.dynamic_axes.items():
        for axis, label in entry.items():
            axes.setdefault(label, int(np.shape(examples[name])[axis]))
    runnable, skipped = [], []
    for seed, sizes in enumerate(fuzz_cases(axes)):
        feeds = fresh_inputs(signature, examples, sizes, seed)
        try:
            reference(feeds)
        except Exception as error:  # the original's own limit, such as a kernel larger than a 1x1 image
            skipped.append(f"{', '.join(f'{axis}={size}' for axis, size in sizes.items())}: {_reason(error)}")
        else:
            runnable.append((sizes, feeds))
    for label, example in axes.items():
        tried = {sizes[label] for sizes, _ in runnable if sizes[label] != example}
        if len(tried) < _MIN_SIZES:
            raise SourceError(
                f"axis {label!r} is declared dynamic, but PyTorch itself runs at only {len(tried)} other sizes ({skipped[0]}); "
                "declare it fixed by leaving it out of dynamic_axes"
            )
    return runnable, tuple(skipped)


class _ByPosition(nn.Module):
    """A module that takes **keywords, as one that takes positions: torch.export cannot give the former dynamic axes."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.module(**dict(zip(self.names, tensors, strict=True)))


def _traceable(network: Exportable) -> tuple[nn.Module, bool]:
    """The module to trace, and whether it is called by keyword."""
    parameters = inspect.signature(network.module.forward).parameters.values()
    if network.by_keyword and any(item.kind is item.VAR_KEYWORD for item in parameters):
        return _ByPosition(network.module, tuple(network.inputs)).eval(), False
    return network.module, network.by_keyword


def _dynamic_shapes(network: Exportable, module: nn.Module, by_keyword: bool) -> Any:
    """The dynamic axes in the nesting of forward's parameters, where *args is one tuple."""
    shapes = {name: dict(network.dynamic_axes.get(name, {})) for name in network.inputs}
    if by_keyword:
        return shapes
    parameters = inspect.signature(module.forward).parameters.values()
    plain = sum(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters)
    values = tuple(shapes.values())
    return (*values[:plain], values[plain:]) if len(values) > plain else values


def _refuse_other_task(network: Exportable, signature: GraphSignature) -> None:
    """A task is a promise about the first output."""
    spec = signature.outputs[0]
    if network.task == "classification":
        classes = spec.shape[-1] if len(spec.shape) == 2 else None
        if not isinstance(classes, int) or classes < 2:
            raise SourceError(
                f"the task is classification, but the first output is {spec}; expected [batch, classes] with 2 or more classes"
            )
        if network.labels is not None and len(network.labels) != classes:
            raise SourceError(
                f"there are {len(network.labels)} labels but {spec} has {classes} classes; give one label for each"
            )
    if network.task == "regression" and spec.shape[1:] not in ((), (1,)):
        raise SourceError(
            f"the task is regression, but the first output is {spec}; expected [batch] or [batch, 1], or use task='tensors'"
        )


def _refuse_frozen_axes(network: Exportable, signature: GraphSignature) -> None:
    declared = {spec.name: spec.shape for spec in signature.inputs}
    for name, axes in network.dynamic_axes.items():
        if name not in declared:
            raise ParityRefused(
                f"{network.name} was not written: input {name!r} is not used by the network and vanished from the graph"
            )
        for axis, label in axes.items():
            if isinstance(declared[name][axis], int):
                raise ParityRefused(
                    f"{network.name} was not written: axis {axis} ({label!r}) of {name!r} was frozen at "
                    f"{declared[name][axis]} while tracing; the network's code depends on that size"
                )


def _bytes_of(case: Case) -> int:
    return sum(array.nbytes for array in (*case.inputs.values(), *case.expected.values()))


def _advice(error: BaseException) -> str:
    reason = _reason(error)
    if any(word in reason for word in ("data-dependent", "Data-dependent", "GuardOnDataDependent", "Could not guard", "bool(")):
        return (
            "its forward branches on values of a tensor, which a graph cannot; use torch.where instead of if ("
            + reason[:120]
            + ")"
        )
    return reason


def _reason(error: BaseException) -> str:
    """The line of an exporter's report that tells the cause."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(root).__name__}: {(lines[0] if lines else '')[:300]}"
