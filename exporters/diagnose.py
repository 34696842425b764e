"""Why a graph disagrees with PyTorch: the smallest sizes that show it, the first node that differs, and what was baked in.

A disagreement has one of two causes, and they are told apart by the program torch.export traced, which lies between. Either
the graph is not what was traced: then graph and program differ, and are compared by name. Or the trace is not what PyTorch
does: a size or a loop of the example was written into it; then the graph and live PyTorch are compared, line by line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch

from runtime.bundle import Tolerance
from runtime.signature import GraphSignature

from .baked import baked_constant, unrolled_loop
from .divergence import Comparison, Difference, Place, graph_against_eager, graph_against_program, place_of
from .exportable import GraphSource
from .intermediates import Arrays, Run, output_nodes, run_eager, run_onnx, run_program, stack_of
from .parity import Case, compare_cases, torch_reference
from .shrink import axes_that_matter, resized, shrink
from .trace import examples_of, reason_of
from .weights import open_model

_FX_NODE = re.compile(r"%(\w+) :")


@dataclass(frozen=True)
class Culprit:
    """What of the example is written into the graph."""

    what: str  # "constant [3, -1] in 'val_5' holds the example's batch=3"
    place: Place  # the node that takes it, or the line of a loop

    def __str__(self) -> str:
        return f"{self.what}, at {self.place}"


@dataclass(frozen=True)
class Diagnosis:
    sizes: Mapping[str, int]  # the smallest that still fail
    axes: tuple[str, ...] = ()  # those that must differ from the example; none if the example fails too
    difference: Difference | None = None  # the first value that differs from PyTorch's
    place: Place | None = None  # the node that makes it
    culprit: Culprit | None = None
    unknown: str = ""  # why the difference could not be located

    def text(self) -> str:
        """One line for an error message."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items()) or "the example's"
        matters = f" (depends on {' and '.join(map(repr, self.axes))})" if self.axes else ""
        parts = [f"smallest failing sizes: {sizes}{matters}"]
        if self.difference and self.place:
            parts.append(f"first difference: {self.place}: {self.difference.problem}")
        if self.culprit:
            there = self.culprit.place == self.place  # once is enough
            parts.append(f"baked in: {self.culprit.what if there else self.culprit}")
        if self.unknown:
            parts.append(self.unknown)
        return "; ".join(parts)


def diagnose(
    graph: GraphSource,
    model: onnx.ModelProto,
    signature: GraphSignature,
    case: Case,
    tolerances: Mapping[str, Tolerance],
    program: torch.onnx.ONNXProgram,
) -> Diagnosis:
    """Explain the failing `case`; `program` is what `model` was made from."""
    sizes = dict(case.sizes)
    axes: tuple[str, ...] = ()
    try:
        sizes, axes, feeds, examples = _smallest(graph, model, signature, case, tolerances)
        example = signature.check_feeds(examples)
        return _locate(_Evidence(graph, model, program, feeds, examples), sizes, axes, example)
    except Exception as error:  # the failure to report is the disagreement, whatever happens while explaining it
        return Diagnosis(sizes, axes, unknown=f"not located: {reason_of(error)}")


def _smallest(
    graph: GraphSource, model: onnx.ModelProto, signature: GraphSignature, case: Case, tolerances: Mapping[str, Tolerance]
) -> tuple[dict[str, int], tuple[str, ...], Arrays, Arrays]:
    """The smallest failing sizes, the axes that matter, and inputs at those sizes and at the example's."""
    session = open_model(model, signature)
    reference = torch_reference(graph)
    tensors = examples_of(graph)
    example = signature.check_feeds({spec.name: tensors[spec.name].numpy() for spec in signature.inputs})
    sizes = signature.check_feeds(case.inputs)

    def fails(candidate: dict[str, int]) -> bool:
        feeds = resized(signature, case.inputs, candidate)
        try:
            return not compare_cases(session, reference, tolerances, [(candidate, feeds)])[0]
        except Exception:  # PyTorch itself cannot run at these sizes, which proves nothing
            return False

    if fails(sizes):
        sizes = shrink(fails, sizes, example)
    axes = axes_that_matter(fails, sizes, example)
    return sizes, axes, resized(signature, case.inputs, sizes), resized(signature, case.inputs, example)


@dataclass(frozen=True)
class _Evidence:
    """What the comparisons work on: the graph, the program it was made of, and the inputs to run both on."""

    graph: GraphSource
    model: onnx.ModelProto
    traced: torch.onnx.ONNXProgram
    failing: Arrays
    examples: Arrays

    @property
    def program(self) -> torch.export.ExportedProgram:
        assert self.traced.exported_program is not None
        return self.traced.exported_program

    def against_program(self, feeds: Arrays) -> tuple[Comparison, Run, Run]:
        ran, traced = run_onnx(self.model, feeds), run_program(self.graph, self.program, feeds, nudge=False)
        nudged = run_program(self.graph, self.program, feeds, nudge=True)
        return graph_against_program(self.model, ran, traced, nudged, output_nodes(self.graph, self.program)), ran, traced

    def against_eager(self, feeds: Arrays) -> Comparison:
        """The graph's values under the program's names, and the program's own where the graph has none."""
        names = output_nodes(self.graph, self.program)
        ours = {names.get(name, name): array for name, array in run_onnx(self.model, feeds).values.items()}
        plain, nudged = (run_program(self.graph, self.program, feeds, nudge=nudge) for nudge in (False, True))
        outputs = torch_reference(self.graph)(feeds)
        expected = {names[name]: array for name, array in outputs.items() if name in names}
        eager = run_eager(self.graph, feeds, self.lines())
        return graph_against_eager(self.program, plain.values | ours, nudged, eager, expected)

    def lines(self) -> set[tuple[str, int, str]]:
        return {frame for node in self.program.graph.nodes for frame in stack_of(node.meta.get("stack_trace"))}

    def origins(self) -> dict[str, torch.fx.Node]:
        """Value of the graph → the program's node it comes from."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        origins = dict(nodes)
        for node in self.traced.model_proto.graph.node:
            written = next((item.value for item in node.metadata_props if item.key == "pkg.torch.onnx.fx_node"), "")
            found = _FX_NODE.match(written)
            if found and found[1] in nodes:
                origins |= {name: nodes[found[1]] for name in node.output if name not in nodes}
        return origins | {name: nodes[node] for name, node in output_nodes(self.graph, self.program).items() if node in nodes}


def _locate(evidence: _Evidence, sizes: dict[str, int], axes: tuple[str, ...], example: Mapping[str, int]) -> Diagnosis:
    """The first difference and what is baked in. Where the example passes, a value that differs there is no evidence."""
    compared, ran, traced = evidence.against_program(evidence.failing)
    difference = compared.first(evidence.against_program(evidence.examples)[0] if axes else None)
    of_trace = difference is None and not (ran.failed and not traced.failed)
    if of_trace:
        compared = evidence.against_eager(evidence.failing)
        difference = compared.first(evidence.against_eager(evidence.examples) if axes else None)
    difference = difference or _failure(ran)
    if difference is None:
        return Diagnosis(
            sizes, axes, unknown="all values agree with PyTorch's, so it is what the graph declares that is untrue"
        )
    value = _graph_name(evidence, difference.value)
    origins = evidence.origins()
    culprit = _unrolled(evidence) if of_trace and axes else None
    culprit = culprit or _baked(evidence.model, value, compared.agreed, axes, example, origins)
    return Diagnosis(sizes, axes, difference, place_of(value, evidence.model, origins), culprit)


def _failure(ran: Run) -> Difference | None:
    """The node that broke the run off, as a difference."""
    if not ran.failed:
        return None
    return Difference(ran.failed, f"onnxruntime cannot run it: {ran.problem}", float("inf"), 0.0)


def _unrolled(evidence: _Evidence) -> Culprit | None:
    before, now = (run_eager(evidence.graph, feeds, evidence.lines()) for feeds in (evidence.examples, evidence.failing))
    loop = unrolled_loop(evidence.program, before, now)
    if loop is None:
        return None
    what = f"a Python loop, unrolled {loop.traced} times as for the example; PyTorch now runs it {loop.needed} times"
    return Culprit(what, Place(line=loop.line))


def _baked(
    model: onnx.ModelProto,
    value: str,
    agreed: frozenset[str],
    axes: tuple[str, ...],
    example: Mapping[str, int],
    origins: Mapping[str, torch.fx.Node],
) -> Culprit | None:
    baked = baked_constant(model, value, agreed, example, axes)
    if baked is None:
        return None
    what = f"{baked.what} {baked.relation} the example's {baked.axis}={example[baked.axis]}"
    return Culprit(what, place_of(baked.value, model, origins))


def _graph_name(evidence: _Evidence, value: str) -> str:
    """The graph's name of a value of the program."""
    outputs = {node: name for name, node in output_nodes(evidence.graph, evidence.program).items()}
    return outputs.get(value, value)
