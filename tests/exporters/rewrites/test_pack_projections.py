from __future__ import annotations

import onnx

from exporters.rewrites.pack_projections import REWRITE

from .graphs import check_fused, check_left_alone, graph, node, normal, operators

WIDTHS = {"q": 8, "k": 8, "v": 6}


def projections(*, biases: bool = True, opset: int = 20) -> onnx.ModelProto:
    nodes, weights = [], {}
    for index, (name, width) in enumerate(WIDTHS.items()):
        weights[f"w{name}"] = normal(8, width, seed=index)
        weights[f"b{name}"] = normal(width, seed=10 + index)
        nodes.append(node("MatMul", ["x", f"w{name}"], f"m{name}" if biases else name))
        if biases:
            nodes.append(node("Add", [f"m{name}", f"b{name}"], name))
    outputs = {name: ["batch", "time", width] for name, width in WIDTHS.items()}
    return graph(nodes, weights, outputs=outputs, opset=opset)


def test_with_their_biases_they_become_one_product_of_any_widths() -> None:
    packed = check_fused(REWRITE, projections(), 1)
    assert operators(packed) == {"MatMul": 1, "Add": 1, "Split": 1}


def test_without_biases_they_become_one_product() -> None:
    assert operators(check_fused(REWRITE, projections(biases=False), 1)) == {"MatMul": 1, "Split": 1}


def test_where_one_has_no_bias_the_others_keep_their_own() -> None:
    model = projections()
    model.graph.node.remove(model.graph.node[1])
    model.graph.node[0].output[0] = "q"
    assert operators(check_fused(REWRITE, model, 1)) == {"MatMul": 1, "Split": 1, "Add": 2}


def test_products_of_different_inputs_are_not_packed() -> None:
    nodes = [node("MatMul", ["x", "a"], "y"), node("MatMul", ["x2", "b"], "z")]
    shape = ["batch", "time", 8]
    weights = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}
    check_left_alone(REWRITE, graph(nodes, weights, inputs={"x": shape, "x2": shape}, outputs={"y": shape, "z": shape}))


def test_a_product_from_the_other_side_is_not_packed() -> None:
    nodes = [node("MatMul", ["x", "a"], "y"), node("MatMul", ["b", "x"], "z")]
    shape = ["batch", 8, 8]
    weights = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}
    check_left_alone(REWRITE, graph(nodes, weights, inputs={"x": shape}, outputs={"y": shape, "z": shape}))


def test_a_weight_that_is_shared_is_left_alone() -> None:
    model = projections()
    model.graph.node.append(node("MatMul", ["q", "wk"], "again"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("again", 1, ["batch", "time", 8]))
    check_left_alone(REWRITE, model, "a weight is shared with another node and would be stored twice")


def test_before_opset_13_it_is_left_alone() -> None:
    reason = "Split takes its sizes as an input from opset 13 on, and this graph has opset 12"
    check_left_alone(REWRITE, projections(opset=12), reason)
