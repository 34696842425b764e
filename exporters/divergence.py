"""The first node that gives something else than PyTorch: where the graph left the traced program, or the program live PyTorch.

What a value may be off by is measured, as for the outputs: MARGIN times what one rounding step of every weight and input
changes in it, and at least MARGIN roundings of its largest element.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from runtime.verify import max_error

from .intermediates import TORCH, EagerRun, Frame, Run, stack_of
from .parity import MARGIN


@dataclass(frozen=True)
class Place:
    """A node of the graph, and where in the user's code it comes from."""

    node: str = ""
    operator: str = ""
    inputs: tuple[str, ...] = ()
    module: str = ""  # path of the submodule, e.g. "layers.1.key"
    line: str = ""  # "model.py:12: y = x.view(3, -1)"

    def __str__(self) -> str:
        inputs = f"({', '.join(self.inputs)})" if self.inputs else ""
        node = f"{self.operator} {self.node!r}{inputs}" if self.node else ""
        return ", ".join(filter(None, [node, f"module {self.module!r}" if self.module else "", self.line]))


@dataclass(frozen=True)
class Difference:
    """A value unlike PyTorch's."""

    value: str
    problem: str  # what came out
    error: float
    allowed: float


@dataclass(frozen=True)
class Comparison:
    """The values of two runs, in the order they were computed."""

    agreed: frozenset[str]
    differences: tuple[Difference, ...]

    def first(self, besides: Comparison | None) -> Difference | None:
        """The first difference that was not there in `besides`, a run that is known to be right."""
        ignored = {item.value for item in besides.differences} if besides else set()
        return next((item for item in self.differences if item.value not in ignored), None)


def graph_against_program(
    model: onnx.ModelProto, graph: Run, program: Run, nudged: Run, names: Mapping[str, str]
) -> Comparison:
    """Values of one name. `names` gives the program's name of a graph output; all others have theirs on both sides."""
    agreed, differences = set(), []
    for node in model.graph.node:
        for value in node.output:
            ours, theirs = graph.values.get(value), program.values.get(names.get(value, value))
            if ours is None or theirs is None:
                continue
            allowed = allowed_error(theirs, nudged.values.get(names.get(value, value)))
            problem, error = difference(ours, theirs, allowed)
            if problem:
                differences.append(Difference(value, problem, error, allowed))
            else:
                agreed.add(value)
    return Comparison(frozenset(agreed), tuple(differences))


def graph_against_eager(
    program: torch.export.ExportedProgram,
    values: Mapping[str, NDArray[Any]],  # of the graph, by the program's node
    nudged: Run,
    eager: EagerRun,
    expected: Mapping[str, NDArray[Any]],  # of PyTorch: the outputs, by the program's node
) -> Comparison:
    """Values of the graph, against all that live PyTorch computed on the source line they come from.

    A line may be traced into other steps than the calls PyTorch makes, so only what leaves a line is held against it.
    """
    agreed, differences = set(), []
    for node in program.graph.nodes:
        value, stack = values.get(node.name), stack_of(node.meta.get("stack_trace"))
        if value is None:
            continue
        candidates = [expected[node.name]] if node.name in expected else eager.values.get(stack, [])
        leaves = node.name in expected or any(stack_of(user.meta.get("stack_trace")) != stack for user in node.users)
        allowed = allowed_error(value, nudged.values.get(node.name))
        found = [difference(value, candidate, allowed) for candidate in candidates]
        if any(not problem for problem, _ in found):
            agreed.add(node.name)
        elif found and leaves and value.ndim:  # a number is a size, which no torch function gave
            problem, error = min(found, key=lambda item: item[1])
            differences.append(Difference(node.name, problem, error, allowed))
    return Comparison(frozenset(agreed), tuple(differences))


def allowed_error(value: NDArray[Any], nudged: NDArray[Any] | None) -> float:
    if value.dtype.kind != "f":
        return 0.0
    finite = np.abs(value[np.isfinite(value)].astype(np.float64))
    noise = max_error(value, nudged) if nudged is not None and nudged.shape == value.shape else 0.0
    return MARGIN * max(noise if np.isfinite(noise) else 0.0, float(np.finfo(value.dtype).eps) * float(finite.max(initial=0.0)))


def difference(ours: NDArray[Any], theirs: NDArray[Any], allowed: float) -> tuple[str, float]:
    """What is wrong with `ours`, or an empty string; and the largest error."""
    if not theirs.ndim and ours.size == 1:
        ours = ours.reshape(())  # a size is a number in the program, and a tensor of one element in the graph
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} came out, PyTorch has {list(theirs.shape)}", float("inf")
    if theirs.dtype.kind in "fc":
        holes = np.isnan(theirs)
        if not np.array_equal(holes, np.isnan(ours)):
            return "NaN values came out where PyTorch has none", float("inf")
        ours, theirs = ours[~holes], theirs[~holes]
    error = max_error(ours, theirs)
    return (f"error {error:.2e}, allowed {allowed:.2e}" if error > allowed else ""), error


def place_of(value: str, model: onnx.ModelProto, origins: Mapping[str, torch.fx.Node]) -> Place:
    """The node that makes `value`, and the code it was traced from."""
    node = next((node for node in model.graph.node if value in node.output), None)
    origin = origins.get(value)
    module, line = "", ""
    if origin is not None:
        paths = [path for path, _ in (origin.meta.get("nn_module_stack") or {}).values()]
        module = paths[-1] if paths and not paths[-1].startswith("_") else ""
        line = user_line(origin.meta.get("stack_trace"))
    if node is None:
        return Place(value, "constant", (), module, line)
    return Place(node.name or value, node.op_type, tuple(filter(None, node.input)), module, line)


def user_line(trace: str | None) -> str:
    """The innermost line of a stack trace that is not torch's own: "model.py:12: code"."""
    lines = (trace or "").splitlines()
    for index in range(len(lines) - 1, -1, -1):
        frames = stack_of(lines[index])
        if frames and not frames[0][0].startswith((TORCH, "torch/")):
            code = lines[index + 1].strip() if index + 1 < len(lines) and not stack_of(lines[index + 1]) else ""
            return show_frame(frames[0]) + (f": {code}" if code else "")
    return ""


def show_frame(frame: Frame) -> str:
    path = os.path.relpath(frame[0])
    return f"{frame[0] if path.startswith('..') else path}:{frame[1]}"
