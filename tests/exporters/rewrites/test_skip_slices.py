from __future__ import annotations

import numpy as np
import onnx
import pytest

from exporters.rewrites.skip_slices import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, operators


def sliced(size: int | str = 1, start: int = 0, end: int = 1, step: int = 1) -> onnx.ModelProto:
    nodes = [node("Slice", ["x", "start", "end", "axis", "step"], "part"), node("Squeeze", ["part", "axis"], "y")]
    weights = {name: np.array([value]) for name, value in (("start", start), ("end", end), ("axis", 1), ("step", step))}
    return graph(nodes, weights, inputs={"x": ["batch", size, 8]}, outputs={"y": ["batch", 8]})


@pytest.mark.parametrize("end", [1, np.iinfo(np.int64).max])
def test_a_slice_that_takes_everything_goes(end: int) -> None:
    assert operators(check_fused(REWRITE, sliced(end=end), 1)) == {"Squeeze": 1}


@pytest.mark.parametrize(
    "settings", [{"size": 3}, {"size": "time"}, {"start": -1, "end": 9}, {"start": -1, "end": -9, "step": -1}]
)
def test_a_slice_that_may_take_less_or_turn_round_is_left_alone(settings: dict[str, int | str]) -> None:
    check_left_alone(REWRITE, sliced(**settings), "the slice does not take everything, or that is not known")  # type: ignore
