"""What a check says: how bad, where, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from runtime.signature import GraphSignature

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str  # error: will fail or answer wrongly; warning: will hurt; info: worth knowing
    node: str  # the node or tensor it is about; "" for the whole graph
    reason: str
    fix: str


@dataclass(frozen=True)
class Graph:
    """What a rule looks at."""

    name: str
    path: Path
    model: onnx.ModelProto
    signature: GraphSignature | None  # what the bundle promises, or the file declares; None if it cannot be read
    complete: bool = True  # False if weights in other files could not be loaded
    sizes: Mapping[str, int] | None = None  # named sizes it is known to run at, from the goldens


@dataclass(frozen=True)
class Rule:
    name: str
    description: str
    run: Callable[[Graph], Iterator[Finding]]
