"""Bundle → leaner bundle: a list of small passes, each verified on its own. One that breaks parity is reverted and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from runtime.bundle import Bundle, lineage_step, write_bundle
from runtime.errors import EdgekitError
from runtime.session import Session
from runtime.verify import compare

from .graph import clean, copy_of, read_model, requirements_of
from .quantizers.quiet import quiet


@dataclass(frozen=True)
class Pass:
    name: str
    description: str
    apply: Callable[[onnx.ModelProto], onnx.ModelProto]


@dataclass(frozen=True)
class PassResult:
    name: str
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    outcome: str  # "applied", "nothing to do", or "reverted: …"
    error: float  # largest difference from the goldens after the pass

    @property
    def applied(self) -> bool:
        return self.outcome == "applied"


@dataclass(frozen=True)
class OptimizeReport:
    bundle: str
    passes: tuple[PassResult, ...]
    bytes_before: int
    bytes_after: int

    @property
    def changed(self) -> bool:
        return any(result.applied for result in self.passes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changed": self.changed}


def _ir_passes(*passes: Callable[[], Any]) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    def apply(model: onnx.ModelProto) -> onnx.ModelProto:
        graph = onnx_ir.from_proto(model)
        for make in passes:
            make()(graph)
        return onnx_ir.to_proto(graph)

    return apply


def _fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxscript import optimizer

    graph = onnx_ir.from_proto(model)
    optimizer.fold_constants(graph)
    return onnx_ir.to_proto(graph)


PASSES = (
    Pass("fold-constants", "compute now what does not depend on the input", _fold_constants),
    Pass("remove-identities", "drop nodes that hand on their input", _ir_passes(common.IdentityEliminationPass)),
    Pass(
        "merge-duplicates",
        "share equal weights and equal computations",
        _ir_passes(common.DeduplicateInitializersPass, common.CommonSubexpressionEliminationPass),
    ),
    Pass("remove-unused", "drop nodes and weights that no output needs", _ir_passes(common.RemoveUnusedNodesPass)),
)


def optimize(bundle: Bundle, target: str | Path, *, force: bool = False, passes: tuple[Pass, ...] = PASSES) -> OptimizeReport:
    """Write the optimized bundle at `target` and say what each pass did."""
    name, graph = bundle.graph()
    model = read_model(bundle.graph_path(name))
    original = model.ByteSize()
    results = []
    for item in passes:
        model, result = _run(item, model, bundle)
        results.append(result)
    lineage = lineage_step("optimize", bundle, passes=[asdict(result) for result in results])
    requirements = requirements_of(model) | {"cpu_features": bundle.manifest.requirements["cpu_features"]}
    graphs = {name: replace(graph, weights=())}  # weights from separate files are inside the graph now
    manifest = replace(bundle.manifest, graphs=graphs, lineage=lineage, requirements=requirements)
    files: dict[str, bytes | Path] = {golden.file: bundle.root / golden.file for golden in bundle.manifest.goldens}
    write_bundle(target, manifest, {graph.file: model.SerializeToString(), **files}, force=force)
    return OptimizeReport(str(target), tuple(results), original, model.ByteSize())


def _run(item: Pass, model: onnx.ModelProto, bundle: Bundle) -> tuple[onnx.ModelProto, PassResult]:
    """The model after the pass, or the one before it if the pass changed nothing or broke something."""

    def result(after: onnx.ModelProto, outcome: str, error: float = 0.0) -> PassResult:
        return PassResult(
            item.name, len(model.graph.node), len(after.graph.node), model.ByteSize(), after.ByteSize(), outcome, error
        )

    try:
        with quiet():
            after = clean(item.apply(copy_of(model)))
    except Exception as failure:  # a library's pass may stumble over a graph; the graph before it still stands
        return model, result(
            model, f"reverted: it failed with {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        )
    if _shape_of(after) == _shape_of(model):
        return model, result(model, "nothing to do")
    try:
        error, problem = _parity(after, bundle)
    except EdgekitError as failure:
        error, problem = float("inf"), str(failure)
    if problem:
        return model, result(model, f"reverted: {problem}", error)
    if len(after.graph.node) >= len(model.graph.node) and after.ByteSize() >= model.ByteSize():
        return model, result(model, "nothing to do")  # it only shuffled names
    return after, result(after, "applied", error)


def _parity(model: onnx.ModelProto, bundle: Bundle) -> tuple[float, str | None]:
    """Largest error against the goldens, and the first thing that is out of tolerance."""
    name, graph = bundle.graph()
    session = Session(model.SerializeToString(), graph.signature, device="cpu")
    worst = 0.0
    for entry, inputs, expected in bundle.goldens():
        actual: Mapping[str, NDArray[Any]] = session.run(inputs)
        for output, reference in expected.items():
            comparison = compare(entry.file, output, actual[output], reference, bundle.manifest.tolerance[name][output].allowed)
            worst = max(worst, comparison.error)
            if not comparison:
                return worst, f"{output} of {entry.file} {comparison.problem} (allowed {comparison.allowed:.2e})"
    return worst, None


def _shape_of(model: onnx.ModelProto) -> tuple[Any, ...]:
    nodes = tuple((node.op_type, tuple(node.input), tuple(node.output)) for node in model.graph.node)
    return nodes, tuple(sorted(tensor.name for tensor in model.graph.initializer))
