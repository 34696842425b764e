"""Calibration streams, in bounded memory, and refuses what it cannot use."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters import calibration
from exporters.calibration import BINS, Activations, Samples, Statistics, histogram
from runtime.errors import DataError

from ..helpers import make_model

Array = np.ndarray[Any, Any]
WIDTH = 64


def chain(width: int = WIDTH) -> onnx.ModelProto:
    """x → h = xA → r = relu(h) → y = rB, on sequences."""
    random = np.random.default_rng(0)
    weights = {name: (random.standard_normal((width, width)) / 8).astype(np.float32) for name in ("A", "B")}
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "B"], ["y"], name="second"),
    ]
    shape = (TensorProto.FLOAT, ["batch", "time", width])
    return make_model(nodes, weights, inputs={"x": shape}, outputs={"y": shape})


def ragged(count: int = 5, width: int = WIDTH, scale: float = 1.0) -> Iterator[dict[str, Array]]:
    """Batches of different lengths."""
    random = np.random.default_rng(1)
    for number in range(count):
        values = random.standard_normal((4, 3 + number % 4, width)) * scale * (1 + number % 3)
        yield {"x": values.astype(np.float32)}


def everything(model: onnx.ModelProto, samples: Samples) -> dict[str, Array]:
    """All values at once, which calibration must never have."""
    x = np.concatenate([feeds["x"].reshape(-1, WIDTH) for feeds in samples()])
    a, b = (onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    return {"x": x, "h": x @ a, "r": np.maximum(x @ a, 0), "y": np.maximum(x @ a, 0) @ b}


def extremes(model: onnx.ModelProto, names: Sequence[str], samples: Samples) -> dict[str, Activations]:
    return Statistics().of(model, dict.fromkeys(names, ()), samples)


def test_ranges_equal_those_of_all_samples_at_once() -> None:
    values = everything(chain(), ragged)
    for name, found in extremes(chain(), ["x", "h", "r", "y"], ragged).items():
        assert (found.low, found.high) == pytest.approx((values[name].min(), values[name].max()), rel=1e-4, abs=1e-4)


def test_counts_equal_those_of_all_samples_at_once() -> None:
    found = Statistics().of(chain(), {"x": (), "r": (-1,)}, ragged, counted=True)
    values = everything(chain(), ragged)
    for name in ("x", "r"):
        assert found[name].values == values[name].size
        assert found[name].samples == 20
        assert found[name].counts is not None
        assert found[name].counts.sum() == values[name].size
        expected, _ = np.histogram(values[name], BINS, (found[name].low, found[name].high))
        assert np.abs(np.cumsum(found[name].counts) - np.cumsum(expected)).max() <= 3  # values next to an edge
    assert not found["x"].highest
    assert found["r"].highest[-1] == pytest.approx(values["r"].max(axis=0), rel=1e-4)
    assert found["r"].zeros == (values["r"] == 0).sum()


def test_a_histogram_has_its_ends_and_takes_a_tensor_of_one_value() -> None:
    counts = histogram(np.array([-1.0, 0.0, 1.0], np.float32), -1.0, 1.0)
    assert (counts[0], counts[BINS // 2], counts[-1], counts.sum()) == (1, 1, 1, 3)
    assert histogram(np.zeros((2, 3), np.float32), 0.0, 0.0)[0] == 6


def test_in_groups_the_answer_is_the_same_and_each_group_is_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, sessions = [], []
    make = calibration.session_for
    monkeypatch.setattr(
        calibration, "session_for", lambda model, names, *more: sessions.append(names) or make(model, names, *more)
    )

    def samples() -> Iterator[dict[str, Array]]:
        passes.append(1)
        return ragged()

    axes = {"h": (), "r": (), "y": ()}
    together = Statistics().of(chain(), axes, samples, counted=True)
    first = len(passes)
    assert sessions[1] == ["h", "r", "y"]
    monkeypatch.setattr(calibration, "_AT_ONCE", 1)
    passes.clear()
    sessions.clear()
    apart = Statistics().of(chain(), axes, samples, counted=True)
    assert len(passes) == first + 4  # two more groups, in both passes
    assert [names for names in sessions if ".size" not in names[0]] == [["h"], ["r"], ["y"]] * 2
    for name in axes:
        assert (apart[name].low, apart[name].high) == (together[name].low, together[name].high)
        np.testing.assert_array_equal(apart[name].counts, together[name].counts)


def test_only_what_is_asked_for_is_computed() -> None:
    session = calibration.session_for(chain(), ["r"])
    assert [output.name for output in session.get_outputs()] == ["r"]
    read = {name for node in calibration._needed(chain().graph.node, ["r"]) for name in node.input}
    assert read == {"x", "A", "h"}


def test_what_a_branch_reads_of_the_graph_around_it_is_kept() -> None:
    def branch(name: str) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node("Neg", [name], [f"{name}.out"])], name, [], [output])

    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("If", ["flag"], ["chosen"], then_branch=branch("r"), else_branch=branch("a")),
    ]
    shape = (TensorProto.FLOAT, ["batch", 2])
    inputs = {"x": shape, "flag": (TensorProto.BOOL, [])}
    model = make_model(nodes, inputs=inputs, outputs={"chosen": shape})
    feeds = {"x": np.array([[-3.0, 2.0]], np.float32), "flag": np.array(True)}
    found = extremes(model, ["chosen"], lambda: [feeds])["chosen"]
    assert (found.low, found.high) == (-2.0, 0.0)


def test_what_is_known_is_not_gathered_again() -> None:
    passes = []

    def samples() -> Iterator[dict[str, Array]]:
        passes.append(1)
        return ragged()

    statistics = Statistics()
    before = statistics.of(chain(), {"h": (), "r": ()}, samples)
    count = len(passes)
    assert statistics.of(chain(), {"r": ()}, samples) == {"r": before["r"]}
    assert len(passes) == count
    counted = statistics.of(chain(), {"r": ()}, samples, counted=True)["r"]
    assert counted.low == before["r"].low
    statistics.of(chain(), {"r": (-1,)}, samples)
    assert len(passes) > count


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    """A hundred times the samples must not take a hundred times the memory."""

    def peak(count: int) -> int:
        tracemalloc.start()
        Statistics().of(chain(), {"x": (), "h": (-1,), "r": ()}, lambda: ragged(count), counted=True)
        high = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return high

    peak(1)
    assert peak(400) < 1.5 * peak(4)


def test_data_that_is_empty_not_finite_or_of_another_shape_is_refused() -> None:
    def refused(*batches: dict[str, Array], message: str) -> None:
        with pytest.raises(DataError, match=message):
            extremes(chain(), ["r"], lambda: iter(batches))

    good = next(ragged())
    refused(message="no calibration data; pass --data with at least one sample")
    for bad in (np.nan, np.inf):
        spoiled = {"x": np.full((1, 2, WIDTH), bad, np.float32)}
        refused(good, spoiled, message="batch 2 gives NaN or infinite values in 'x'; look at the data")
    narrow = {"x": np.zeros((1, 2, WIDTH - 1), np.float32)}
    refused(good, narrow, message=r"batch 2 does not fit the graph: axis 2 of 'x' is 63 but must be 64")
    refused({"x": np.zeros((2, WIDTH), np.float32)}, message="batch 1 does not fit the graph: .* has 3 axes")
    refused({"x": np.zeros((1, 2, WIDTH))}, message="dtype float64 but float32 is expected")
    refused({"y": np.zeros(1)}, message=r"lacks the input x: float32\[batch, time, 64\]")
    refused({"x": np.zeros((0, 2, WIDTH), np.float32)}, message="never gives 'r' a value")


def test_values_that_the_network_itself_makes_infinite_are_refused() -> None:
    huge = {"x": np.full((1, 1, WIDTH), 3e38, np.float32)}
    with pytest.raises(DataError, match="batch 1 gives NaN or infinite values in 'h'"):
        extremes(chain(), ["h"], lambda: iter([huge]))


def test_long_work_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_QUIET_SECONDS", -1.0)
    lines: list[str] = []
    Statistics().of(chain(), {"h": ()}, ragged, counted=True, progress=lines.append)
    assert lines[0] == "calibrating: ranges of 1 tensors, 4 samples so far"
    assert lines[-1] == "calibrating: distributions of 1 tensors, 20 samples so far"
