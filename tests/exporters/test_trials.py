"""Sizes and values of someone's graph are found by reading it and trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from exporters.adopt import adopt
from exporters.export import ExportReport
from exporters.trial_sizes import Move, cases_of, completed, find_moves, tied_axes
from runtime.feeds import example_feeds
from runtime.signature import GraphSignature, TensorSpec

from ..helpers import make_model, save

FLOAT, INT32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL
Node = helper.make_node


def adopted(model: onnx.ModelProto, folder: Path) -> ExportReport:
    return adopt(save(model, folder / "m.onnx"), folder / "m.bundle")


def values(report: ExportReport, name: str) -> set[Any]:
    return {value for case in report.cases for value in np.unique(case.inputs[name]).tolist()}


def embedding(kind: int, *before: onnx.NodeProto, rows: int = 50) -> onnx.ModelProto:
    table = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    indices = before[-1].output[0] if before else "ids"
    nodes = [*before, Node("Gather", ["table", indices], ["y"])]
    weights = {"table": table, "one": np.array([1], np.int64)}
    return make_model(nodes, weights, inputs={"ids": (kind, ["batch", "steps"])}, outputs={"y": (FLOAT, ["batch", "steps", 4])})


@pytest.mark.parametrize("kind", [INT32, INT64])
def test_an_index_reaches_over_its_table_and_not_beyond(kind: int, tmp_path: Path) -> None:
    assert values(adopted(embedding(kind), tmp_path), "ids") == set(range(50))


def test_an_index_is_followed_through_casts_and_reshapes(tmp_path: Path) -> None:
    cast = [Node("Identity", ["ids"], ["same"]), Node("Cast", ["same"], ["whole"], to=INT64)]
    assert values(adopted(embedding(FLOAT, *cast), tmp_path), "ids") == set(range(50))


def test_the_smallest_of_several_tables_limits_an_index(tmp_path: Path) -> None:
    model = embedding(INT64)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((7, 4), np.float32), "small"))
    model.graph.node[0].output[0] = "first"
    model.graph.node.extend([Node("Gather", ["small", "ids"], ["second"]), Node("Add", ["first", "second"], ["y"])])
    assert values(adopted(model, tmp_path), "ids") == set(range(7))


def test_an_index_into_a_table_inside_a_branch_is_found(tmp_path: Path) -> None:
    table = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32), "table")
    out = helper.make_tensor_value_info("o", FLOAT, ["n", 4])
    branch = helper.make_graph([Node("Gather", ["table", "ids"], ["o"])], "then", [], [out], [table])
    other = helper.make_graph([Node("Neg", ["x"], ["o"])], "else", [], [out])
    model = make_model(
        [Node("If", ["which"], ["y"], then_branch=branch, else_branch=other)],
        inputs={"x": (FLOAT, ["n", 4]), "ids": (INT64, ["n"]), "which": (BOOL, [])},
        outputs={"y": (FLOAT, ["n", 4])},
    )
    report = adopted(model, tmp_path)
    assert values(report, "which") == {False, True}
    assert values(report, "ids") == set(range(9))


def test_a_scalar_takes_the_value_it_is_compared_with_and_another(tmp_path: Path) -> None:
    nodes = [
        Node("Equal", ["sr", "rate"], ["same"]),
        Node("Where", ["same", "one", "two"], ["factor"]),
        Node("Mul", ["x", "factor"], ["y"]),
    ]
    weights = {"rate": np.array(16000, np.int64), "one": np.array(1, np.float32), "two": np.array(2, np.float32)}
    inputs = {"x": (FLOAT, ["batch", 4]), "sr": (INT64, [])}
    report = adopted(make_model(nodes, weights, inputs=inputs, outputs={"y": (FLOAT, ["batch", 4])}), tmp_path)
    assert values(report, "sr") == {0, 16000}


def test_an_integer_that_may_not_be_zero_is_one(tmp_path: Path) -> None:
    nodes = [Node("TopK", ["x", "k"], ["y", "places"])]
    inputs = {"x": (FLOAT, ["batch", 4]), "k": (INT64, [1])}
    outputs = {"y": (FLOAT, ["batch", None]), "places": (INT64, ["batch", None])}
    assert 1 in values(adopted(make_model(nodes, inputs=inputs, outputs=outputs), tmp_path), "k")


def test_a_root_gets_positive_values(tmp_path: Path) -> None:
    report = adopted(make_model([Node("Sqrt", ["x"], ["y"])], outputs={"y": (FLOAT, ["batch", 4])}), tmp_path)
    assert min(values(report, "x")) > 0


@pytest.mark.parametrize(("kind", "lowest", "highest"), [(TensorProto.UINT8, 0, 255), (TensorProto.INT8, -128, 127)])
def test_pixels_take_every_value_of_a_byte(kind: int, lowest: int, highest: int, tmp_path: Path) -> None:
    shape = ["batch", 16, 16, 3]
    model = make_model([Node("Cast", ["x"], ["y"], to=FLOAT)], inputs={"x": (kind, shape)}, outputs={"y": (FLOAT, shape)})
    seen = values(adopted(model, tmp_path), "x")
    assert (min(seen), max(seen)) == (lowest, highest)


def test_unnamed_axes_that_must_be_equal_get_one_name(tmp_path: Path) -> None:
    nodes = [Node("Concat", ["a", "b", "c"], ["y"], axis=1)]
    inputs = {name: (FLOAT, [None, 4]) for name in "abc"}
    report = adopted(make_model(nodes, inputs=inputs, outputs={"y": (FLOAT, [None, 12])}), tmp_path)
    signature = report.bundle.graph()[1].signature
    assert [spec.shape for spec in signature.inputs] == [("a_0", 4)] * 3
    assert {case.sizes["a_0"] for case in report.cases} >= {1, 2, 3, 4}


def test_question_marks_are_two_axes_and_not_one(tmp_path: Path) -> None:
    inputs = {"x": (FLOAT, ["?", "?"])}
    report = adopted(make_model([Node("Relu", ["x"], ["y"])], inputs=inputs, outputs={"y": (FLOAT, ["?", "?"])}), tmp_path)
    assert report.bundle.graph()[1].signature.inputs[0].shape == ("x_0", "x_1")


@pytest.mark.parametrize("total", ["past + steps", "total"])
def test_a_mask_as_long_as_past_and_present_together_moves_with_either(total: str, tmp_path: Path) -> None:
    nodes = [
        Node("Concat", ["past", "x"], ["all"], axis=1),
        Node("Cast", ["mask"], ["weights"], to=FLOAT),
        Node("Mul", ["all", "weights"], ["masked"]),
        Node("ReduceSum", ["masked", "axis"], ["y"], keepdims=0),
    ]
    inputs = {"x": (FLOAT, ["batch", "steps"]), "past": (FLOAT, ["batch", "past"]), "mask": (INT64, ["batch", total])}
    model = make_model(nodes, {"axis": np.array([1], np.int64)}, inputs=inputs, outputs={"y": (FLOAT, ["batch"])})
    report = adopted(model, tmp_path)
    sizes = [case.sizes for case in report.cases]
    assert len({case["past"] for case in sizes}) > 3
    assert len({case["steps"] for case in sizes}) > 3
    assert all(case[total] == case["past"] + case["steps"] for case in sizes)


def test_sums_are_read_from_names() -> None:
    assert completed({"a": 2, "b": 3, "a + b": 9, "b+1": 9, "c + d": 9}) == {"a": 2, "b": 3, "a + b": 5, "b+1": 4, "c + d": 9}


def test_moves_and_ties_of_axes() -> None:
    base = {"n": 3, "m": 3, "side": 32}
    moves = find_moves(base, lambda sizes: sizes["n"] == sizes["m"] and sizes["side"] % 32 == 0)
    assert moves == [Move(("n", "m"), 1), Move(("side",), 32)]
    assert tied_axes(base, moves) == {"m": "n"}
    cases = cases_of(base, moves)
    assert {"n": 3, "m": 3, "side": 64} in cases
    assert {"n": 17, "m": 17, "side": 32} in cases
    assert all(case["n"] == case["m"] for case in cases)


def test_pools_are_drawn_from_and_scalars_take_their_turn() -> None:
    signature = GraphSignature((TensorSpec("ids", "int64", ("n",)), TensorSpec("sr", "int32", ())), ())
    pools = {"ids": range(5, 8), "sr": (8000, 16000)}
    drawn = [example_feeds(signature, {"n": 40}, seed, pools) for seed in (0, 1)]
    assert set(drawn[0]["ids"].tolist()) == {5, 6, 7}
    assert [int(feeds["sr"]) for feeds in drawn] == [8000, 16000]
    assert drawn[0]["sr"].shape == ()
