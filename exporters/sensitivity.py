"""Sensitivity: how much of an answer is lost when one node alone is quantized.

    error = ‖answer - original's‖ / ‖original's‖, of the output that suffers most, on a few samples

Errors of several nodes add up roughly as their squares, so that the nodes with the largest ones are those to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import onnx

from runtime.bundle import Bundle
from runtime.errors import EdgekitError
from runtime.session import Session
from runtime.state import specified

from .parity import Arrays
from .quantized_graphs import Part, convert_parts
from .quantizers.scheme import Calibration
from .weights import open_model

_BATCHES = 2  # of samples for each graph
_GROUPS = 24  # at most so many conversions: neighbours in a deep network are looked at together


def sensitivity(
    bundle: Bundle,
    part: Part,
    labels: Sequence[str],
    calibration: Calibration | None,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Label of a node → its error under this part's scheme; of a group of neighbours, the group's. Empty if time is up."""
    size = -(-len(labels) // _GROUPS)
    groups = [tuple(labels[start : start + size]) for start in range(0, len(labels), size)]
    samples = {name: _samples(bundle, name, calibration) for name in bundle.manifest.graphs}
    original = {name: _answers(bundle, name, None, samples[name]) for name in samples}
    errors: dict[str, float] = {}
    for done, group in enumerate(groups):
        if stop():
            return {}
        progress(done, len(groups))
        alone = Part(part.scheme, part.settings, nodes=frozenset(group))
        try:
            models = convert_parts(bundle, (alone,), calibration).models
            worst = max(
                _error(original[name], _answers(bundle, name, models[name], samples[name]))
                for name in _graphs_of(bundle, group)
            )
        except EdgekitError:  # alone it cannot be converted or run
            worst = float("inf")
        errors |= dict.fromkeys(group, worst)
    return errors


def _graphs_of(bundle: Bundle, labels: Sequence[str]) -> set[str]:
    names = list(bundle.manifest.graphs)
    return {label.partition(": ")[0] for label in labels} if len(names) > 1 else set(names)


def _samples(bundle: Bundle, name: str, calibration: Calibration | None) -> list[Arrays]:
    if calibration is not None:
        return [dict(feeds) for feeds in islice(calibration(name), _BATCHES)]
    return [inputs for entry, inputs, _ in bundle.goldens() if entry.graph == name][:_BATCHES]


def _answers(bundle: Bundle, name: str, model: onnx.ModelProto | None, samples: Sequence[Arrays]) -> list[Arrays]:
    """Of the graph, or of `model` in its place."""
    signature = bundle.manifest.graphs[name].signature
    if model is None:
        session = Session(bundle.graph_path(name), signature, device="cpu", log_level=4)
    else:
        session = open_model(model, signature)
    return [specified(signature.states, session.run(feeds)) for feeds in samples]


def _error(before: Sequence[Arrays], after: Sequence[Arrays]) -> float:
    worst = 0.0
    for expected, actual in zip(before, after, strict=True):
        for name, reference in expected.items():
            if reference.dtype.kind != "f" or not reference.size:
                continue
            if actual[name].shape != reference.shape:  # sizes that depend on values
                return float("inf")
            scale = float(np.linalg.norm(reference.astype(np.float64)))
            difference = float(np.linalg.norm(actual[name].astype(np.float64) - reference))
            worst = max(worst, difference / scale if scale else float(difference > 0))
    return worst if np.isfinite(worst) else float("inf")
