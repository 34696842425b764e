"""What a check says (how bad, where, why, and what to do about it), and what a rule looks at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from runtime.signature import GraphSignature

from .wiring import Wiring

SEVERITIES = ("error", "warning", "info")
_PARTICULARS = re.compile(r"'[^']*'|\[[^\]]*\]|\d[\d,.]*")


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str  # error: will fail or answer wrongly; warning: will hurt; info: worth knowing
    node: str  # the node or tensor it is about; "" for the whole graph
    reason: str
    fix: str
    graph: str = ""  # the graph it is in, where there are several

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Equal for findings that differ only in names and numbers, so that fifty of them can be shown as one."""
        return self.rule, self.severity, self.graph, _PARTICULARS.sub("#", self.reason)


@dataclass(frozen=True)
class Graph:
    """What a rule looks at."""

    name: str
    path: Path
    model: onnx.ModelProto
    signature: GraphSignature | None  # what the bundle promises, or the file declares; None if it cannot be read
    complete: bool = True  # False if weights in other files could not be loaded
    sizes: Mapping[str, int] | None = None  # named sizes it is known to run at, from the goldens
    feeds: Mapping[str, NDArray[Any]] | None = None  # inputs it is known to run on, from the goldens
    target: str = "cpu"

    @cached_property
    def wiring(self) -> Wiring:
        return Wiring.of(self.model)

    @cached_property
    def typed(self) -> onnx.ModelProto:
        """The model with the types and shapes that can be inferred; as it is where they cannot."""
        try:
            return onnx.shape_inference.infer_shapes(self.model)
        except Exception:  # the shape-inference rule reports it
            return self.model

    @cached_property
    def types(self) -> dict[str, onnx.TypeProto.Tensor]:
        """Type and shape of each tensor of the main graph that has one, weights excepted."""
        graph = self.typed.graph
        return {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}

    @cached_property
    def kinds(self) -> dict[str, int]:
        """The element type of each tensor of the main graph, where known."""
        weights = {item.name: item.data_type for item in self.model.graph.initializer}
        return {name: item.elem_type for name, item in self.types.items()} | weights


@dataclass(frozen=True)
class Rule:
    """Looks at one graph at a time."""

    name: str
    description: str
    run: Callable[[Graph], Iterator[Finding]]


@dataclass(frozen=True)
class BundleRule:
    """Looks at all graphs of a bundle together."""

    name: str
    description: str
    run: Callable[[Sequence[Graph]], Iterator[Finding]]
