from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from exporters.graph import clean, graphs_of
from exporters.rewrites import REWRITES, fuse_gelu, pack_projections
from exporters.rewrites.engine import apply

from ...helpers import make_model
from .graphs import check_fused, graph, node, normal
from .test_fuse_gelu import CONSTANTS, erf


def test_a_graph_inside_a_graph_is_rewritten_too() -> None:
    body = erf("first").graph
    del body.input[:]
    del body.initializer[:]
    other = helper.make_graph([node("Neg", ["x"], "z")], "else", [], [helper.make_tensor_value_info("z", 1, None)])
    choice = helper.make_node("If", ["yes"], ["out"], then_branch=body, else_branch=other)
    model = make_model(
        [node("ReduceMax", ["x"], "top", keepdims=0), node("Greater", ["top", "low"], "yes"), choice],
        {name: np.float32(value) for name, value in CONSTANTS.items()} | {"low": np.float32(-1e9)},
        inputs={"x": (TensorProto.FLOAT, ["batch", "time", 8])},
        outputs={"out": (TensorProto.FLOAT, ["batch", "time", 8])},
    )
    fused = check_fused(fuse_gelu.REWRITE, clean(model), 1)
    assert "Gelu" in [item.op_type for inner in graphs_of(fused) for item in inner.node]


def test_equal_reasons_are_counted() -> None:
    model = erf("first", opset=17)
    second = erf("first", opset=17)
    for item in second.graph.node:
        item.input[:] = [name if name in CONSTANTS else "y" if name == "x" else f"{name}2" for name in item.input]
        item.output[:] = [f"{name}2" for name in item.output]
    model.graph.node.extend(second.graph.node)
    model.graph.output.append(helper.make_tensor_value_info("y2", 1, ["batch", "time", 8]))
    (reason,) = apply(fuse_gelu.REWRITE, model, portable=True).refusals
    assert reason == "Gelu is a standard operator from opset 20 on, and this graph has opset 17 (2 places)"


def test_a_new_weight_never_takes_a_name_that_is_taken() -> None:
    nodes = [node("MatMul", ["x", "a"], "y"), node("MatMul", ["x", "b"], "z"), node("Add", ["z", "y.weight"], "w")]
    weights = {"a": normal(8, 8), "b": normal(8, 8, seed=1), "y.weight": normal(8, seed=2)}
    shape = ["batch", "time", 8]
    packed = check_fused(pack_projections.REWRITE, graph(nodes, weights, outputs={"y": shape, "w": shape}), 1)
    names = [tensor.name for tensor in packed.graph.initializer]
    assert len(names) == len(set(names)) == 3


def test_the_input_model_is_not_touched() -> None:
    model = erf("first")
    before = model.SerializeToString()
    assert apply(fuse_gelu.REWRITE, model).matches == 1
    assert model.SerializeToString() == before


def test_names_of_rewrites_are_distinct_and_described() -> None:
    assert len({rewrite.name for rewrite in REWRITES}) == len(REWRITES)
    assert all(rewrite.description for rewrite in REWRITES)


def test_the_documentation_lists_every_pass() -> None:
    from exporters.passes import PASSES

    from ...helpers import ROOT

    table = (ROOT / "docs" / "optimize.md").read_text()
    for item in PASSES:
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {item.name} |"))
        assert ("| onnxruntime |" in row) == (not item.standard)


def test_a_graph_with_nothing_to_find_comes_back_as_it_is() -> None:
    model = graph([node("Relu", ["x"], "y")], {})
    for rewrite in REWRITES:
        result = apply(rewrite, model)
        assert (result.matches, result.refusals) == (0, ())
        assert isinstance(result.model, onnx.ModelProto)
        assert result.model is model
