"""Replays a bundle's goldens on this machine: does it answer here as PyTorch answered when it was exported?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle
from .machine import cpu_features, describe_machine
from .session import Session
from .state import specified


@dataclass(frozen=True)
class OutputComparison:
    golden: str
    output: str
    shape: tuple[int, ...]
    error: float  # largest absolute difference
    allowed: float
    problem: str | None = None  # why it failed, if it did

    def __bool__(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class ParityReport:
    bundle: str
    device: str
    comparisons: tuple[OutputComparison, ...]
    machine: dict[str, Any]
    warnings: tuple[str, ...] = ()  # of what the goldens may not show

    def __bool__(self) -> bool:
        return bool(self.comparisons) and all(self.comparisons)

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "passed": bool(self),
            "device": self.device,
            "comparisons": [vars(item) | {"passed": bool(item), "shape": list(item.shape)} for item in self.comparisons],
            "machine": self.machine,
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        rows = [
            f"{'ok  ' if item else 'FAIL'} {item.golden} {item.output}{list(item.shape)}: "
            f"error {item.error:.2e}, allowed {item.allowed:.2e}{'' if item else ' — ' + str(item.problem)}"
            for item in self.comparisons
        ]
        passed = sum(map(bool, self.comparisons))
        verdict = "verified" if self else "NOT verified"
        return [*rows, f"{verdict}: {passed} of {len(self.comparisons)} golden outputs agree on {self.device} ({self.bundle})"]


def verify_bundle(path: str | Path, *, device: str = "cpu", threads: int | None = None) -> ParityReport:
    """Open the bundle (which checks every byte of it) and compare each golden. Truthy when all agree."""
    bundle = Bundle.open(path)
    sessions = {
        name: Session(bundle.graph_path(name), graph.signature, device=device, threads=threads)
        for name, graph in bundle.manifest.graphs.items()
    }
    comparisons = []
    for entry, inputs, expected in bundle.goldens():
        session = sessions[entry.graph]
        actual = specified(session.signature.states, session.run(inputs))
        for output, reference in expected.items():
            allowed = bundle.manifest.tolerance[entry.graph][output].allowed
            comparisons.append(compare(entry.file, output, actual[output], reference, allowed))
    taken = next(iter(sessions.values())).device
    return ParityReport(bundle.manifest.name, taken, tuple(comparisons), describe_machine(), _warnings(bundle, taken))


def _warnings(bundle: Bundle, device: str) -> tuple[str, ...]:
    """Of a CPU without the instructions that a quantized bundle needs to compute as it did where it was made."""
    needed = bundle.manifest.requirements.get("cpu_features") or []
    if device != "cpu" or not needed or set(needed) & set(cpu_features()):
        return ()
    return (
        f"this CPU has none of {', '.join(needed)}: int8 products of {bundle.manifest.name} can saturate here, so that answers "
        "to other inputs may be wrong even where the goldens agree; quantize the original with --set reduce_range=always",
    )


def compare(golden: str, output: str, actual: NDArray[Any], reference: NDArray[Any], allowed: float) -> OutputComparison:
    """One output against its reference. NaN proves nothing and fails; infinities (masks) must be the same ones."""
    shape = tuple(reference.shape)
    if actual.shape != reference.shape:
        return OutputComparison(golden, output, shape, float("inf"), allowed, f"shape {list(actual.shape)} came out")
    if str(actual.dtype) != str(reference.dtype):
        return OutputComparison(golden, output, shape, float("inf"), allowed, f"dtype {actual.dtype} came out")
    if np.isnan(reference).any():
        return OutputComparison(golden, output, shape, float("inf"), allowed, "the reference has NaN values")
    if np.isnan(actual).any():
        return OutputComparison(golden, output, shape, float("inf"), allowed, "NaN values came out")
    error = max_error(actual, reference)
    problem = None if error <= allowed else f"needs a tolerance of {error:.2e}"
    return OutputComparison(golden, output, shape, error, allowed, problem)


def max_error(actual: NDArray[Any], reference: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where one is infinite and the other is not, or where shapes differ."""
    if actual.shape != reference.shape:
        return float("inf")
    mine, theirs = actual.astype(np.float64), reference.astype(np.float64)
    different = mine != theirs  # equal infinities would give inf - inf = NaN
    return float(np.max(np.abs(mine[different] - theirs[different]), initial=0.0))
