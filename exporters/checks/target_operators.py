"""target-operators: operators and types that the target lacks, or runs somewhere slower.

Whatever the target, onnxruntime must be able to load the graph on a CPU: all its targets fall back to that. For phones the
conversion to .ort is tried as well. The rest is looked up in the tables of exporters/targets.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime as ort

from ..finding import Finding, Graph, Rule
from ..wiring import label, operator
from .tables import ACCELERATORS, Target, accelerated, target_named

_NAME = "target-operators"


def run(graph: Graph) -> Iterator[Finding]:
    target = target_named(graph.target)
    if graph.complete and (fault := _load_fault(graph.path)):
        fix = "upgrade onnxruntime, or export for the version that is there"
        yield Finding(_NAME, "error", "", f"onnxruntime {ort.__version__} cannot load it: {fault}", fix)
        return
    yield from _missing(graph, target)
    if target.operators:
        yield from _fallbacks(graph, target)
    if target.name == "mobile" and graph.complete:
        yield from _phone(graph)


def _load_fault(path: Path, save_as: Path | None = None) -> str | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    if save_as is not None:
        options.optimized_model_filepath = str(save_as)
        options.add_session_config_entry("session.save_model_format", "ORT")
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
        return " ".join(str(error).split())[:300]
    return None


def _missing(graph: Graph, target: Target) -> Iterator[Finding]:
    """What makes the model fail on the target when it is loaded."""
    lacking: dict[str, onnx.NodeProto] = {}
    for node in graph.wiring.nodes:
        if node.domain in target.missing_domains or operator(node) in target.missing:
            lacking.setdefault(operator(node), node)
    for name, node in lacking.items():
        fix = "export or optimize again for portable operators; layouts of one CPU come from optimization level all"
        yield Finding(_NAME, "error", label(node), f"{target.version} has no {name}", fix)
    for name, kind in graph.kinds.items():
        if (shown := onnx.TensorProto.DataType.Name(kind).lower()) in target.missing_types:
            fix = "cast it to a type the target has in the network: float32 or int32"
            yield Finding(_NAME, "error", name, f"{target.version} is built without {shown} tensors", fix)


def _fallbacks(graph: Graph, target: Target) -> Iterator[Finding]:
    """What runs elsewhere than on the accelerator, one finding an operator."""
    elsewhere: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.wiring.nodes:
        name = operator(node)
        if name in target.missing or node.domain in target.missing_domains:
            continue
        kinds = target.types.get(name)
        kind = onnx.TensorProto.DataType.Name(graph.kinds.get(node.input[0], 0)).lower() if node.input else ""
        if name not in target.operators:
            elsewhere.setdefault(name, []).append(node)
        elif kinds and kind != "undefined" and kind not in kinds:
            elsewhere.setdefault(f"{name} on {kind}", []).append(node)
    for name, nodes in elsewhere.items():
        times = "" if len(nodes) == 1 else f" ({len(nodes)} nodes)"
        reason = f"{target.version} has no {name}{times}: it runs on {target.fallback}, with copies to and fro"
        fix = "write it with operators the target has, or keep this graph on the CPU"
        if "Quantize" in name or name.startswith(("MatMulInteger", "ConvInteger", "QLinear")):
            fix = (
                "quantize with --scheme int8-static, whose weights and activations are signed and whose operators are standard"
            )
        yield Finding(_NAME, "warning", label(nodes[0]), reason, fix)


def _phone(graph: Graph) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "model.ort"
        fault = _load_fault(graph.path, converted) or _load_fault(converted)
    if fault:
        fix = "export with a lower --opset, or take out the operator named"
        yield Finding(_NAME, "error", "", f"it cannot be converted to .ort: {fault}", fix)
    for accelerator in ACCELERATORS:
        known = accelerated(accelerator)
        rest = Counter(
            operator(node) for node in graph.wiring.nodes if operator(node) not in known and node.op_type != "Constant"
        )
        if known and rest:
            names = ", ".join(f"{count} {name}" for name, count in rest.most_common(6))
            more = f" and {len(rest) - 6} other operators" if len(rest) > 6 else ""
            total = len(graph.wiring.nodes)
            reason = f"{accelerator} leaves {sum(rest.values())} of {total} nodes to the CPU: {names}{more}"
            yield Finding(
                _NAME, "info", "", reason, f"measure with and without {accelerator}: each change of place costs a copy"
            )


RULE = Rule(_NAME, "operators and types that the target has", run)
