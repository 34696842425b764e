"""The rules by which values are compared, each on the smallest thing that shows it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from exporters.baked import baked_constant, unrolled_loop
from exporters.divergence import Comparison, Difference, difference, graph_against_eager
from exporters.exportable import GraphSource
from exporters.intermediates import EagerRun, Run, run_eager

from ..helpers import make_model

_STACK = (("model.py", 3, "forward"),)
_TRACE = 'File "model.py", line 3, in forward'


def program(*nodes: str) -> Any:
    """A traced program whose nodes all come from one line."""
    made = [SimpleNamespace(name=name, target="tanh", users={}, meta={"stack_trace": _TRACE}) for name in nodes]
    return SimpleNamespace(graph=SimpleNamespace(nodes=made))


def test_a_difference_that_a_right_run_has_too_is_no_evidence() -> None:
    first, second = (Difference(name, "", 1.0, 0.0) for name in ("a", "b"))
    compared = Comparison(frozenset(), (first, second))
    assert compared.first(None) is first
    assert compared.first(Comparison(frozenset(), (first,))) is second


def test_nan_in_the_same_places_agrees_and_elsewhere_does_not() -> None:
    holes = np.array([np.nan, 1.0])
    assert difference(holes, holes, 0.0) == ("", 0.0)
    assert difference(np.array([np.nan, np.nan]), holes, 0.0)[0] == "NaN values came out where PyTorch has none"


def test_an_output_is_held_against_the_output_and_not_against_any_step_of_its_line() -> None:
    steps = [np.array([1.0]), np.array([2.0])]
    eager = EagerRun({_STACK: steps}, Counter())
    inside = graph_against_eager(program("tanh"), {"tanh": steps[0]}, Run({}), eager, {})
    assert inside.agreed == {"tanh"}
    cut_short = graph_against_eager(program("tanh"), {"tanh": steps[0]}, Run({}), eager, {"tanh": steps[1]})
    assert [item.value for item in cut_short.differences] == ["tanh"]


def test_a_constant_behind_a_value_that_is_right_is_not_blamed() -> None:
    nodes = [
        onnx.helper.make_node("Add", ["x", "three"], ["right"]),
        onnx.helper.make_node("Relu", ["right"], ["y"]),
    ]
    model = make_model(nodes, {"three": np.array(3.0, np.float32)})
    assert baked_constant(model, "y", {"right"}, {"batch": 3}, ["batch"]) is None
    found = baked_constant(model, "y", (), {"batch": 3}, ["batch"])
    assert found is not None
    assert (found.value, found.what) == ("right", "constant 3.0 in 'three'")


def test_a_loop_that_one_operator_stands_for_is_not_called_unrolled() -> None:
    before, now = EagerRun({}, Counter({(_STACK, "tanh"): 3})), EagerRun({}, Counter({(_STACK, "tanh"): 5}))
    assert unrolled_loop(program("rnn"), before, now) is None
    found = unrolled_loop(program("tanh", "tanh_1", "tanh_2"), before, now)
    assert found is not None
    assert (found.traced, found.needed) == (3, 5)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return y + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_calls_on_lines_that_were_not_traced_are_left_out() -> None:
    graph = GraphSource(Outer(), {"x": torch.zeros(1)}, {}, ("y",))
    outer, inner = ((__file__, kind.forward.__code__.co_firstlineno + 1, "forward") for kind in (Outer, Inner))
    ran = run_eager(graph, {"x": np.array([-1.0], np.float32)}, {outer, inner})
    assert {stack: [value.tolist() for value in values] for stack, values in ran.values.items()} == {(outer, inner): [[0.0]]}
